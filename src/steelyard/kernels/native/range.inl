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

// Rows that lie one behind the other are one row.
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

template <class Int>
static void range_of(const View& v, float* low, float* high, int threads) {
    const Int* data = static_cast<const Int*>(v.data);
    const int64_t groups = v.groups(), size = v.group_size();
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
