// One block of columns of the GPTQ elimination: the same arithmetic as round_block in gptq.py.
//
// Rows do not know of each other, so a vector holds the same column of LANES rows: rounding, error
// and update are then plain vector arithmetic, and only the factor's entries are scalars.

// Rounds to the type that the weight has, keeping what it cannot hold at its largest value.
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

template <Type TYPE>
static void gptq_tile(const GptqProblem& p, const Rounding& r, int64_t row, float* errors) {
    const int64_t n = std::min<int64_t>(GPTQ_TILE, p.rows - row);
    Strip lengths{}, added{};  // squares of entries of e L; squared errors, as far as dampening
                               // has put them in there
    for (int64_t j = p.columns - 1; j >= 0; --j) {
        const Strip weight = Strip::read(p.weight + j * p.rows + row, n, 0.0f);
        const float* lower = p.lower + j * p.columns;
        const float pivot = lower[j];
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
        const int64_t parameter = p.group[j] * p.rows + row;
        const Strip scale = Strip::read(p.scale + parameter, n, 1.0f);
        const Strip zero = p.zero_point != nullptr ? Strip::read(p.zero_point + parameter, n, 0.0f)
                                                   : Strip{};
        Strip value, error;
        for (int v = 0; v < GPTQ_VECTORS; ++v) {
            const vf target = weight.at[v] + sum.at[v] / pivot;
            const vf scaled = target / scale.at[v] + zero.at[v];
            const vf y = vmin(vmax(scaled, splat(r.qmin)), splat(r.qmax));
            const vf q = r.is_int ? round_int(y) : round_float(y, r.smallest_normal, r.magic);
            value.at[v] = held<TYPE>(rounded((q - zero.at[v]) * scale.at[v]));
            error.at[v] = weight.at[v] - value.at[v];
            const vf entry = error.at[v] * pivot + sum.at[v];
            lengths.at[v] += entry * entry;
            added.at[v] += error.at[v] * error.at[v] * p.added[j];
        }
        value.write(p.values + j * p.rows + row, n);
        error.write(p.errors + j * p.rows + row, n);
        error.write(errors + j * GPTQ_TILE, GPTQ_TILE);
    }
    float sums[2][GPTQ_TILE];
    lengths.write(sums[0], GPTQ_TILE);
    added.write(sums[1], GPTQ_TILE);
    for (int64_t k = 0; k < n; ++k) p.losses[row + k] += double(sums[0][k]) - double(sums[1][k]);
}

static void gptq_block(const GptqProblem& p, int threads) {
    const Rounding r(p.format);
    const int64_t tiles = (p.rows + GPTQ_TILE - 1) / GPTQ_TILE;
    parallel_for(tiles, 1, threads, [&](int64_t begin, int64_t end) {
        std::vector<float> errors(p.columns * GPTQ_TILE);
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
