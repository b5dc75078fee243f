// Minimum and maximum per group, at the speed of reading.
//
// A float's bits, with those below the sign flipped where it is set, order like a signed integer.
// Comparing those needs no conversion; NaN lands beyond infinity and so shows up in the result.

template <class Int>
static inline Int ordered(Int bits) {
    return Int(bits ^ (Int(bits >> (8 * sizeof(Int) - 1)) & std::numeric_limits<Int>::max()));
}

template <class Int>
struct Extent {
    Int low = std::numeric_limits<Int>::max();
    Int high = std::numeric_limits<Int>::min();

    void add(Int a, Int b) {
        low = a < low ? a : low;
        high = b > high ? b : high;
    }

    void read(const Int* from, int64_t stride, int64_t n) {
        Int a = low, b = high;
        if (stride == 1) {
            for (int64_t i = 0; i < n; ++i) {
                const Int v = ordered(from[i]);
                a = v < a ? v : a;
                b = v > b ? v : b;
            }
        } else {
            for (int64_t i = 0; i < n; ++i) {
                const Int v = ordered(from[i * stride]);
                a = v < a ? v : a;
                b = v > b ? v : b;
            }
        }
        low = a;
        high = b;
    }
};

template <class Int>
static float to_float(Int value, Type type) {
    const Int bits = ordered(value);  // flipping twice restores
    if (type == Type::f32) return from_bits(uint32_t(bits));
    if (type == Type::bf16) return widen(bfloat_t{uint16_t(bits)});
    return widen(half_t{uint16_t(bits)});
}

// Merges contiguous rows into one.
static View merged(View v) {
    auto join = [&v](int outer, int inner) {
        if (v.size[outer] == 1) return;
        if (v.size[inner] == 1) {
            v.size[inner] = v.size[outer];
            v.stride[inner] = v.stride[outer];
        } else if (v.stride[outer] == v.size[inner] * v.stride[inner]) {
            v.size[inner] *= v.size[outer];
        } else {
            return;
        }
        v.size[outer] = 1;
    };
    join(3, 4);
    if (v.size[3] == 1) join(0, 4);
    join(1, 2);
    return v;
}

// Vectors of integers as wide as the values; `pick` takes the even or odd elements of two.
template <class Int>
struct Wide {
    static constexpr int SIZE = VECTOR_BYTES / sizeof(Int);
    typedef Int type __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(Int)), may_alias));

    template <int FIRST>
    static type pick(type a, type b) {
        return pick<FIRST>(a, b, std::make_integer_sequence<int, SIZE>());
    }
    template <int FIRST, int... I>
    static type pick(type a, type b, std::integer_sequence<int, I...>) {
#if defined(__clang__)  // clang has no __builtin_shuffle, gcc before 12 no __builtin_shufflevector
        return __builtin_shufflevector(a, b, (2 * I + FIRST)...);
#else
        return __builtin_shuffle(a, b, type{Int(2 * I + FIRST)...});
#endif
    }
    static type load(const Int* from) {  // ordered
        const type x = *reinterpret_cast<const type*>(from);
        return x ^ ((x >> (8 * sizeof(Int) - 1)) & std::numeric_limits<Int>::max());
    }
    static type min(type a, type b) { return a < b ? a : b; }
    static type max(type a, type b) { return a > b ? a : b; }
};

// Groups whose rows are contiguous and fill whole vectors, or a fraction of one. Neighbours are
// compared in many groups at once until each has one value left, so that no vector is reduced on
// its own; a matrix in blocks is read row by row.
template <class Int>
class Neighbours {
    using W = Wide<Int>;
    using V = typename W::type;
    static constexpr int64_t SIZE = W::SIZE, TILE = 64;  // a tile is at most so many vectors

    const View& v;
    const int64_t size, rows, across;
    const int64_t parts, width, together;  // vectors of a row; values and groups of a vector
    const int64_t tile, tiles;             // groups of a tile, tiles of a row

    void read(const Int* at, int64_t vectors, V* lows, V* highs) const {
        for (int64_t row = 0; row < rows; ++row) {
            const Int* from = at + row * v.stride[3];
            for (int64_t i = 0; i < vectors; ++i) {
                V next = W::load(from);
                V a = row == 0 ? next : W::min(lows[i], next);
                V b = row == 0 ? next : W::max(highs[i], next);
                from += SIZE;
                for (int64_t part = 1; part < parts; ++part, from += SIZE) {
                    next = W::load(from);
                    a = W::min(a, next);
                    b = W::max(b, next);
                }
                lows[i] = a;
                highs[i] = b;
            }
        }
    }

    void reduce(int64_t vectors, V* lows, V* highs) const {
        for (int64_t left = width; left > 1; left /= 2) {
            vectors = (vectors + 1) / 2;
            for (int64_t i = 0; i < vectors; ++i) {
                const V a = lows[2 * i], b = lows[2 * i + 1], c = highs[2 * i], d = highs[2 * i + 1];
                lows[i] = W::min(W::template pick<0>(a, b), W::template pick<1>(a, b));
                highs[i] = W::max(W::template pick<0>(c, d), W::template pick<1>(c, d));
            }
        }
    }

    void write(const V* found, int64_t count, float* to) const {
        Int values[TILE * SIZE];
        std::memcpy(values, found, count * sizeof(Int));
        for (int64_t i = 0; i < count; ++i) to[i] = to_float(values[i], v.type);
    }

  public:
    static bool fit(const View& v) {
        const int64_t columns = v.size[4];
        const bool whole = columns < SIZE ? columns >= 2 && (columns & (columns - 1)) == 0
                                          : columns % SIZE == 0 && columns <= 1024;
        return whole && v.size[0] == 1 && v.stride[4] == 1 && v.size[2] > 1 && v.stride[2] == columns;
    }

    explicit Neighbours(const View& view)
        : v(view),
          size(v.size[4]),
          rows(v.size[3]),
          across(v.size[2]),
          parts(std::max<int64_t>(size / SIZE, 1)),
          width(std::min(size, SIZE)),
          together(SIZE / width),
          tile(std::min(TILE * together, (across + together - 1) / together * together)),
          tiles((across + tile - 1) / tile) {}

    int64_t count() const { return v.size[1] * tiles; }
    int64_t grain() const { return (1 << 17) / (tile * size * rows); }

    void run(int64_t t, float* low, float* high) const {
        const int64_t first = t % tiles * tile, g = t / tiles * across + first;
        const int64_t count = std::min(tile, across - first), vectors = count / together;
        const Int* at = static_cast<const Int*>(v.data) + t / tiles * v.stride[1] + first * size;
        V lows[TILE + 1], highs[TILE + 1];
        read(at, vectors, lows, highs);
        lows[vectors] = highs[vectors] = V{};  // an odd one's neighbour
        reduce(vectors, lows, highs);
        const int64_t done = vectors * together;
        write(lows, done, low + g);
        write(highs, done, high + g);
        for (int64_t i = done; i < count; ++i) {  // too few for a vector
            Extent<Int> extent;
            for (int64_t row = 0; row < rows; ++row) {
                extent.read(at + row * v.stride[3] + i * size, 1, size);
            }
            low[g + i] = to_float(extent.low, v.type);
            high[g + i] = to_float(extent.high, v.type);
        }
    }
};

template <class Int>
static void range_of(const View& v, float* low, float* high, int threads) {
    const Int* data = static_cast<const Int*>(v.data);
    const int64_t groups = v.groups(), size = v.group_size();
    if (Neighbours<Int>::fit(v)) {
        const Neighbours<Int> neighbours(v);
        parallel_for(neighbours.count(), neighbours.grain(), threads, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) neighbours.run(t, low, high);
        });
        return;
    }
    const bool spread = v.size[0] > 1 && groups > 1;  // each observation touches every group
    const int64_t parts = spread ? std::min<int64_t>(v.size[0], 32)
                                 : std::max<int64_t>(1, size / (1 << 18));
    if (!spread && parts == 1) {
        parallel_for(groups, std::max<int64_t>(1, (1 << 17) / size), threads,
                     [&](int64_t begin, int64_t end) {
            for (int64_t g = begin; g < end; ++g) {
                Extent<Int> extent;
                const Int* at = data + v.group_offset(g);
                for (int64_t n = 0; n < v.size[0]; ++n) {
                    for (int64_t h = 0; h < v.size[3]; ++h) {
                        extent.read(at + n * v.stride[0] + h * v.stride[3], v.stride[4], v.size[4]);
                    }
                }
                low[g] = to_float(extent.low, v.type);
                high[g] = to_float(extent.high, v.type);
            }
        });
        return;
    }
    // Split what each group holds: by observation, by row, or along one long row.
    const int dim = spread || v.size[0] >= parts ? 0 : (v.size[3] >= parts ? 3 : 4);
    std::vector<Extent<Int>> found(parts * groups);
    parallel_for(parts, 1, threads, [&](int64_t first, int64_t last) {
        for (int64_t part = first; part < last; ++part) {
            int64_t from[5] = {0, 0, 0, 0, 0}, to[5];
            std::copy(v.size, v.size + 5, to);
            from[dim] = v.size[dim] * part / parts;
            to[dim] = v.size[dim] * (part + 1) / parts;
            Extent<Int>* out = found.data() + part * groups;
            for (int64_t n = from[0]; n < to[0]; ++n) {
                for (int64_t g = 0; g < groups; ++g) {
                    const Int* at = data + n * v.stride[0] + v.group_offset(g);
                    for (int64_t h = from[3]; h < to[3]; ++h) {
                        out[g].read(at + h * v.stride[3] + from[4] * v.stride[4], v.stride[4],
                                    to[4] - from[4]);
                    }
                }
            }
        }
    });
    for (int64_t g = 0; g < groups; ++g) {
        Extent<Int> extent;
        for (int64_t part = 0; part < parts; ++part) {
            extent.add(found[part * groups + g].low, found[part * groups + g].high);
        }
        low[g] = to_float(extent.low, v.type);
        high[g] = to_float(extent.high, v.type);
    }
}

static void range(const View& view, float* low, float* high, int threads) {
    const View v = merged(view);
    if (v.type == Type::f32) return range_of<int32_t>(v, low, high, threads);
    return range_of<int16_t>(v, low, high, threads);
}

// Sum of squares per column of (n, w); columns are split, so the order of rows is fixed.
static void sum_squares(const View& v, float* sums, int threads) {
    constexpr int64_t COLUMNS = 512, ROWS = 256;
    parallel_for(v.size[4], COLUMNS, threads, [&](int64_t begin, int64_t end) {
        const int64_t width = end - begin;
        std::vector<float> row(width), part(width);
        std::vector<double> total(width, 0.0);
        for (int64_t n = 0; n < v.size[0]; n += ROWS) {
            std::fill(part.begin(), part.end(), 0.0f);
            for (int64_t r = n; r < std::min(n + ROWS, v.size[0]); ++r) {
                widen_row(v.data, v.type, r * v.stride[0] + begin * v.stride[4], v.stride[4], width,
                          row.data());
                for (int64_t i = 0; i < width; ++i) part[i] += row[i] * row[i];
            }
            for (int64_t i = 0; i < width; ++i) total[i] += part[i];
        }
        for (int64_t i = 0; i < width; ++i) sums[begin + i] = float(total[i]);
    });
}
