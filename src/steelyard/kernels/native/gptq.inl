// One block of columns of the GPTQ elimination: the same arithmetic as round_block in gptq_rounding.py.
//
// Rows are independent, so a vector holds the same column of LANES rows: rounding, error
// and update are then plain vector arithmetic, and only the factor's entries are scalars.

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

constexpr int GPTQ_VECTORS = 4;
constexpr int GPTQ_AHEAD = 6;
constexpr int GPTQ_TILE = GPTQ_VECTORS * LANES;

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

// s_j of a tile, given the errors of the columns behind column j.
static Strip gptq_sum(const GptqProblem& p, int64_t j, int64_t row, int64_t n, const float* errors) {
    const float* lower = p.lower + j * p.columns;
    Strip sum = Strip::read(p.sums + j * p.rows + row, n, 0.0f), odd{};
    int64_t i = p.columns - 1;
    for (; i - 1 > j; i -= 2) {  // two chains of additions, to hide their latency
        const float *even_error = errors + i * GPTQ_TILE, *odd_error = even_error - GPTQ_TILE;
        for (int v = 0; v < GPTQ_VECTORS; ++v) {
            sum.at[v] += load(even_error + v * LANES) * lower[i];
            odd.at[v] += load(odd_error + v * LANES) * lower[i - 1];
        }
    }
    for (int v = 0; v < GPTQ_VECTORS; ++v) {
        if (i > j) odd.at[v] += load(errors + i * GPTQ_TILE + v * LANES) * lower[i];
        sum.at[v] += odd.at[v];
    }
    return sum;
}

template <Type TYPE>
static void gptq_tile(const GptqProblem& p, const Rounding& r, int64_t row, float* errors) {
    const int64_t n = std::min<int64_t>(GPTQ_TILE, p.rows - row);
    const bool nearest = p.lower == nullptr;
    Strip lengths{}, shift{};  // the squares of e L, and how much of them is dampening
    for (int64_t j = p.columns - 1; j >= 0; --j) {
        if (j >= GPTQ_AHEAD) {  // columns lie too far apart for the hardware prefetcher
            const int64_t ahead = (j - GPTQ_AHEAD) * p.rows + row;
            for (int64_t k = 0; k < n; k += 16) {
                __builtin_prefetch(p.weight + ahead + k);
                __builtin_prefetch(p.errors + ahead + k, 1);
                if (nearest) continue;
                __builtin_prefetch(p.sums + ahead + k);
                __builtin_prefetch(p.values + ahead + k, 1);
            }
        }
        const Strip sum = nearest ? Strip{} : gptq_sum(p, j, row, n, errors);
        const float pivot = nearest ? 1.0f : p.lower[j * p.columns + j];
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
            lengths.at[v] += entry * entry;
            shift.at[v] += error.at[v] * error.at[v] * p.added[j];
        }
        error.write(p.errors + j * p.rows + row, n);
        if (nearest) continue;
        value.write(p.values + j * p.rows + row, n);
        error.write(errors + j * GPTQ_TILE, GPTQ_TILE);
    }
    float sums[2][GPTQ_TILE];
    lengths.write(sums[0], GPTQ_TILE);
    shift.write(sums[1], GPTQ_TILE);
    for (int64_t k = 0; k < n; ++k) {
        p.losses[row + k] += (nearest ? 0.0 : double(sums[0][k])) - double(sums[1][k]);
    }
}

static void gptq_block(const GptqProblem& p, int threads) {
    const Rounding r(p.format);
    const int64_t tiles = (p.rows + GPTQ_TILE - 1) / GPTQ_TILE;
    parallel_for(tiles, 1, threads, [&](int64_t begin, int64_t end) {
        std::vector<float> errors(p.lower != nullptr ? p.columns * GPTQ_TILE : 0);
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t row = tile * GPTQ_TILE;
            switch (p.type) {
                case Type::f32: gptq_tile<Type::f32>(p, r, row, errors.data()); break;
                case Type::f16: gptq_tile<Type::f16>(p, r, row, errors.data()); break;
                case Type::bf16: gptq_tile<Type::bf16>(p, r, row, errors.data()); break;
            }
        }
    });
}
