// The GPTQ elimination: the same arithmetic as round_block in gptq_rounding.py.
//
// Rows are independent, so a vector holds the same column of LANES rows: rounding, error
// and update are then plain vector arithmetic, and only the factor's entries are scalars. A tile of
// rows goes through all columns, so that its errors stay in the cache.

// Rounds to the weight's type, saturating at its largest value.
template <Type TYPE>
static inline vf held(vf a) {
    if constexpr (TYPE == Type::bf16) {
        const vi bits = (vi)a;
        const vf nearest = (vf)((bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000);
        return vmin(vmax(nearest, splat(-0x1.fep127f)), splat(0x1.fep127f));
    }
    if constexpr (TYPE == Type::f16) {
        const vf inside = vmin(vmax(a, splat(-65504.0f)), splat(65504.0f));
        return round_float(inside, 0x1p-14f, 1.5f * 8192);
    }
    return a;
}

constexpr int64_t SQUARE = 64;  // rows and columns that are transposed in the nearest cache

template <class T>
static void read_columns(const ColumnsProblem& p, int threads) {
    parallel_for((p.rows + SQUARE - 1) / SQUARE, 1, threads, [&](int64_t begin, int64_t) {
        const int64_t row = begin * SQUARE, height = std::min(SQUARE, p.rows - row);
        float square[SQUARE][SQUARE + 1];
        for (int64_t left = 0; left < p.columns; left += SQUARE) {
            const int64_t width = std::min(SQUARE, p.columns - left);
            for (int64_t r = 0; r < height; ++r) {
                const T* from = static_cast<const T*>(p.weight) + (row + r) * p.columns + left;
                for (int64_t c = 0; c < width; ++c) square[r][c] = widen(from[c]);
            }
            for (int64_t c = 0; c < width; ++c) {
                float* to = p.ordered + p.place[left + c] * p.rows + row;
                for (int64_t r = 0; r < height; ++r) to[r] = square[r][c];
            }
        }
    });
}

static void columns(const ColumnsProblem& p, int threads) {
    switch (p.type) {
        case Type::f32: read_columns<float>(p, threads); break;
        case Type::f16: read_columns<half_t>(p, threads); break;
        case Type::bf16: read_columns<bfloat_t>(p, threads); break;
    }
}

constexpr int GPTQ_VECTORS = STRIP_VECTORS;
constexpr int GPTQ_AHEAD = 6;
constexpr int GPTQ_TILES = 4;  // that go through the columns together
constexpr int GPTQ_TILE = TILE_WIDTH;

// One column of a tile: values of `n` rows, the rest filled up.
struct Strip {
    vf at[GPTQ_VECTORS];

    static Strip read(const float* from, int64_t n, float fill) {
        float padded[GPTQ_TILE];
        if (n < GPTQ_TILE) {
            std::fill(padded, padded + GPTQ_TILE, fill);
            std::copy(from, from + n, padded);
            from = padded;
        }
        Strip strip;
        for (int v = 0; v < GPTQ_VECTORS; ++v) strip.at[v] = load(from + v * LANES);
        return strip;
    }

    void write(float* to, int64_t n) const {
        std::memcpy(to, at, size_t(std::min<int64_t>(n, GPTQ_TILE)) * sizeof(float));
    }
};

// Codes and decoded values of LANES weights that share a column.
template <Type TYPE>
struct Stored {
    const Rounding& r;
    vf scale, zero;
    bool rounds;  // the quotient, as compressed-tensors does

    vf place(vf x, bool rounds_here) const {
        const vf quotient = x / scale;
        const vf y = (rounds_here ? held<TYPE>(quotient) : quotient) + zero;
        return clamp(rounds_here ? held<TYPE>(y) : y);
    }

    vf clamp(vf y) const { return vmin(vmax(y, splat(r.qmin)), splat(r.qmax)); }
    vf round(vf y) const { return r.is_int ? round_int(y) : round_float(y, r.smallest_normal, r.magic); }
    vf decode(vf q) const { return held<TYPE>(rounded((q - zero) * scale)); }
    vi kept(vf q) const { return round(place(decode(q), rounds)) == q; }

    // The code if its value packs to it, else a neighbour whose value packs to its own.
    vf kept_near(vf q, vf y) const {
        const vf step = y > q ? splat(1.0f) : splat(-1.0f);
        const vf beside = clamp(q + step), opposite = clamp(q - step);
        const vf other = kept(beside) ? beside : (kept(opposite) ? opposite : q);
        return kept(q) ? q : other;
    }
};

// s_j of a tile for some columns that follow each other, as far as errors of the columns behind them go.
static void gptq_sums(const GptqProblem& p, int64_t first, int64_t last, const float* errors, float* sums) {
    std::fill(sums, sums + (last - first) * GPTQ_TILE, 0.0f);
    add_to_tile(p.upper + first * p.columns + last, p.columns, 1, errors + last * GPTQ_TILE, last - first,
                p.columns - last, sums);
}

// Some rows, on their way through the columns.
struct GptqTile {
    int64_t row, n;
    float* errors;          // (columns, GPTQ_TILE)
    Strip lengths, shift;  // the squares of e L, and how much of them is dampening
};

template <Type TYPE>
static void gptq_panel(const GptqProblem& p, const Rounding& r, int64_t first, int64_t last, GptqTile& t) {
    const bool nearest = p.upper == nullptr;
    const int64_t row = t.row, n = t.n;
    float sums[PANEL_SUMS * GPTQ_TILE];
    if (!nearest) gptq_sums(p, first, last, t.errors, sums);
    for (int64_t j = last - 1; j >= first; --j) {
        if (j >= GPTQ_AHEAD) {  // columns lie too far apart for the hardware prefetcher
            const int64_t ahead = (j - GPTQ_AHEAD) * p.rows + row;
            for (int64_t k = 0; k < n; k += 16) {
                __builtin_prefetch(p.weight + ahead + k);
                __builtin_prefetch((nearest ? p.errors : p.values) + ahead + k, 1);
            }
        }
        Strip sum{};
        float pivot = 1.0f;
        if (!nearest) {
            const float* factors = p.upper + j * p.columns;
            pivot = factors[j];
            sum = Strip::read(sums + (j - first) * GPTQ_TILE, GPTQ_TILE, 0.0f);
            for (int64_t i = j + 1; i < last; ++i) {
                for (int v = 0; v < GPTQ_VECTORS; ++v) {
                    sum.at[v] += load(t.errors + i * GPTQ_TILE + v * LANES) * factors[i];
                }
            }
        }
        const int64_t parameter = p.group[j] * p.rows + row;
        const Strip weight = Strip::read(p.weight + j * p.rows + row, n, 0.0f);
        const Strip scale = Strip::read(p.scale + parameter, n, 1.0f);
        const Strip zero = p.zero_point != nullptr ? Strip::read(p.zero_point + parameter, n, 0.0f)
                                                   : Strip{};
        Strip value, error;
        for (int v = 0; v < GPTQ_VECTORS; ++v) {
            const Stored<TYPE> codes{r, scale.at[v], zero.at[v], p.round_quotient};
            const vf target = weight.at[v] + sum.at[v] / pivot;
            const vf y = codes.place(target, nearest && p.round_quotient);
            const vf q = codes.round(y);
            value.at[v] = codes.decode(p.tight && !nearest ? codes.kept_near(q, y) : q);
            error.at[v] = weight.at[v] - value.at[v];
            const vf entry = error.at[v] * pivot + sum.at[v];
            t.lengths.at[v] += entry * entry;
            t.shift.at[v] += error.at[v] * error.at[v] * p.added[j];
        }
        if (p.errors != nullptr) error.write(p.errors + j * p.rows + row, n);
        if (nearest) continue;
        value.write(p.values + j * p.rows + row, n);
        error.write(t.errors + j * GPTQ_TILE, GPTQ_TILE);
    }
    for (int64_t k = 0; k < n; ++k) {  // fp32 holds the terms of a panel, fp64 their sum
        const double length = nearest ? 0.0 : double(t.lengths.at[k / LANES][k % LANES]);
        p.losses[row + k] += length - double(t.shift.at[k / LANES][k % LANES]);
    }
    t.lengths = t.shift = Strip{};
}

// Several tiles go through a panel of columns after each other, while its part of the factor is near.
template <Type TYPE>
static void gptq_tiles(const GptqProblem& p, const Rounding& r, int64_t begin, int64_t end) {
    const int64_t size = p.upper != nullptr ? p.columns * GPTQ_TILE : 0;
    std::vector<float> errors((end - begin) * size);
    std::vector<GptqTile> tiles;
    for (int64_t row = begin * GPTQ_TILE; row < std::min(p.rows, end * GPTQ_TILE); row += GPTQ_TILE) {
        float* own = errors.data() + tiles.size() * size;
        tiles.push_back({row, std::min<int64_t>(GPTQ_TILE, p.rows - row), own, Strip{}, Strip{}});
    }
    for (int64_t last = p.columns; last > 0; last -= PANEL_SUMS) {
        const int64_t first = std::max<int64_t>(last - PANEL_SUMS, 0);
        for (GptqTile& tile : tiles) gptq_panel<TYPE>(p, r, first, last, tile);
    }
}

static void gptq(const GptqProblem& p, int threads) {
    const Rounding r(p.format);
    const int64_t tiles = (p.rows + GPTQ_TILE - 1) / GPTQ_TILE;
    parallel_for(tiles, GPTQ_TILES, threads, [&](int64_t begin, int64_t end) {
        switch (p.type) {
            case Type::f32: gptq_tiles<Type::f32>(p, r, begin, end); break;
            case Type::f16: gptq_tiles<Type::f16>(p, r, begin, end); break;
            case Type::bf16: gptq_tiles<Type::bf16>(p, r, begin, end); break;
        }
    });
}
