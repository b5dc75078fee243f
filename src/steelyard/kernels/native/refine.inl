// Scales and codes after GPTQ: the arithmetic of refine_block in gptq_refine.py.
//
// As in gptq.inl, a vector holds the same column of LANES rows. A row that does not gain takes a step
// of zero, and a vector of zeros is not added: most codes stop changing after the first round.

constexpr int REFINE_TRIES = 2;
constexpr int REFINE_SUMS = 8;

static inline bool any(vf a) {
    uint64_t words[sizeof(vf) / 8], found = 0;
    std::memcpy(words, &a, sizeof a);
    for (uint64_t word : words) found |= word;
    return found != 0;
}

static inline vf power_below(vf a) { return (vf)((vi)a & 0x7f800000); }

// The storable scale nearest to a positive one.
static inline vf nearest_stored(vf wish, ScaleType type) {
    if (type == ScaleType::bf16) {
        const vi bits = (vi)wish;
        const vi stored = (bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000;
        return vmax(vmin((vf)stored, splat(0x1.fep127f)), splat(0x1p-133f));
    }
    if (type == ScaleType::e8m0) {
        const vf low = power_below(wish);
        return wish < 1.5f * low ? low : 2.0f * low;
    }
    return store_scales(wish, type);
}

// The next scales of one byte below and above.
static inline void beside(vf stored, ScaleType type, vf& low, vf& high) {
    const vf power = power_below(stored);
    if (type == ScaleType::e8m0) {
        low = vmax(stored * 0.5f, splat(0x1p-127f));
        high = vmin(stored * 2.0f, splat(0x1p127f));
        return;
    }
    const vf gap = vmax(power, splat(0x1p-6f)) * 0.125f;
    const vi halved = (stored == power) & (power > 0x1p-6f);
    low = vmax(stored - (halved ? gap * 0.5f : gap), splat(0x1p-9f));
    high = vmin(stored + gap, splat(448.0f));
}

template <Type TYPE>
struct RefineTile {
    const RefineProblem& p;
    const Rounding& r;
    int64_t row, n, start, columns;  // of the tile, and of the block
    std::vector<float> errors;       // of all columns, (columns, GPTQ_TILE)
    std::vector<float> sums, values, became, step, product;  // of the block, likewise

    RefineTile(const RefineProblem& problem, const Rounding& rounding)
        : p(problem), r(rounding), row(0), n(0), start(0), columns(0) {
        errors.resize(p.columns * GPTQ_TILE);
        for (auto* each : {&sums, &values, &became, &step, &product}) each->resize(p.block * GPTQ_TILE);
    }

    const float* hessian(int64_t j) const { return p.hessian + (start + j) * p.columns + start; }
    const int64_t* group_of(int64_t j) const { return p.group + start + j; }

    vf at(const std::vector<float>& m, int64_t j, int v) const {
        return load(m.data() + j * GPTQ_TILE + v * LANES);
    }
    static void put(std::vector<float>& m, int64_t j, int v, vf x) {
        std::memcpy(m.data() + j * GPTQ_TILE + v * LANES, &x, sizeof x);
    }

    Stored<TYPE> codes(vf scale, vf zero) const { return {r, scale, zero, p.round_quotient}; }

    vf nearest(const Stored<TYPE>& c, vf x) const {
        const vf y = c.place(x, false), q = c.round(y);
        return c.decode(p.tight ? c.kept_near(q, y) : q);
    }

    // H e of the columns from `from` on, after column j has moved.
    void subtract(int64_t j, int v, vf moved, int64_t from) {
        if (!any(moved)) return;
        const float* h = hessian(j);
        for (int64_t k = from; k < columns; ++k) put(sums, k, v, at(sums, k, v) - moved * h[k]);
    }

    // Replaces the values by `became` in rows that gain.
    void move(int64_t first, int64_t last, int v, vi better) {
        for (int64_t j = first; j < last; ++j) {
            const vf from = at(values, j, v), to = better ? at(became, j, v) : from;
            put(values, j, v, to);
            subtract(j, v, to - from, first);
        }
    }

    // product = H m within a group
    void multiply(const std::vector<float>& m, int64_t first, int64_t last, int v) {
        int64_t k = first;
        for (; k + REFINE_SUMS <= last; k += REFINE_SUMS) {  // several sums, to hide their latency
            const float* h = hessian(k);
            vf totals[REFINE_SUMS] = {};
            for (int64_t j = first; j < last; ++j) {
                const vf each = at(m, j, v);
                for (int i = 0; i < REFINE_SUMS; ++i) totals[i] += each * h[i * p.columns + j];
            }
            for (int i = 0; i < REFINE_SUMS; ++i) put(product, k + i, v, totals[i]);
        }
        for (; k < last; ++k) {
            vf total = {};
            for (int64_t j = first; j < last; ++j) total += at(m, j, v) * hessian(k)[j];
            put(product, k, v, total);
        }
    }

    vf fit(int64_t first, int64_t last, int v, vf scale, vf zero) {
        const Stored<TYPE> now = codes(scale, zero);
        for (int64_t j = first; j < last; ++j) {
            put(became, j, v, now.round(at(values, j, v) / scale + zero) - zero);  // codes, so far
        }
        multiply(became, first, last, v);
        vf pull = {}, curvature = {};
        for (int64_t j = first; j < last; ++j) {
            pull += at(became, j, v) * at(sums, j, v);
            curvature += at(became, j, v) * at(product, j, v);
        }
        const vf size = vabs(scale), wanted = scale + pull / curvature;
        const vf wish = scale < 0.0f ? -wanted : wanted;
        vi better = (wish > 0.0f) & (wish < std::numeric_limits<float>::infinity());
        const vf moved = stored_near(better ? wish : size);
        const vf signed_ = scale < 0.0f ? -moved : moved;
        const Stored<TYPE> then = codes(signed_, zero);
        for (int64_t j = first; j < last; ++j) {
            put(became, j, v, then.decode(at(became, j, v) + zero));
            put(step, j, v, at(became, j, v) - at(values, j, v));
        }
        multiply(step, first, last, v);
        vf gain = {};
        for (int64_t j = first; j < last; ++j) {
            gain += at(step, j, v) * (2.0f * at(sums, j, v) - at(product, j, v));
        }
        better = better & (gain > 0.0f);
        move(first, last, v, better);
        return better ? signed_ : scale;
    }

    vf replaced(int64_t first, int64_t last, int v, vf scale, vf other, vf zero) {
        const Stored<TYPE> then = codes(other, zero);
        for (int64_t j = first; j < last; ++j) {
            put(became, j, v, at(values, j, v));
            put(product, j, v, at(sums, j, v));  // H e with the candidate's values
        }
        vf gain = {};
        for (int64_t i = first; i < first + REFINE_TRIES * (last - first); ++i) {
            const int64_t j = first + (i - first) % (last - first);
            const float* h = hessian(j);
            const vf sum = at(product, j, v), from = at(became, j, v);
            const vf best = nearest(then, from + sum / h[j]), moved = best - from;
            if (!any(moved)) continue;
            gain += moved * (2.0f * sum - moved * h[j]);
            for (int64_t k = first; k < last; ++k) put(product, k, v, at(product, k, v) - moved * h[k]);
            put(became, j, v, best);
        }
        const vi better = (gain > 0.0f) & (other != scale);
        move(first, last, v, better);
        return better ? other : scale;
    }

    // The last sweep of a group needs H e only of the columns still to come.
    void sweep(int64_t first, int64_t last, int v, vf scale, vf zero, bool is_last) {
        const Stored<TYPE> c = codes(scale, zero);
        for (int64_t j = first; j < last; ++j) {
            const float pivot = hessian(j)[j];
            const vf sum = at(sums, j, v), from = at(values, j, v);
            const vf best = nearest(c, from + sum / pivot), moved = best - from;
            const vi better = moved * (2.0f * sum - moved * pivot) > 0.0f;
            put(values, j, v, better ? best : from);
            subtract(j, v, better ? moved : vf{}, is_last ? j + 1 : first);
        }
    }

    vf stored_near(vf size) const {
        const ScaleType type = p.format.scale;
        if (!p.format.has_global) return nearest_stored(size, type);
        return nearest_stored(size * p.format.global_scale, type) / p.format.global_scale;
    }

    void group(int64_t first, int64_t last) {
        float* place = p.scale + *group_of(first) * p.rows + row;
        Strip scale = Strip::read(place, n, 1.0f);
        const Strip zero = p.zero_point != nullptr
                               ? Strip::read(p.zero_point + *group_of(first) * p.rows + row, n, 0.0f)
                               : Strip{};
        const bool coarse = p.format.scale == ScaleType::e4m3 || p.format.scale == ScaleType::e8m0;
        const float divisor = p.format.has_global ? p.format.global_scale : 1.0f;
        for (int v = 0; v < GPTQ_VECTORS; ++v) {
            if (p.fit) scale.at[v] = fit(first, last, v, scale.at[v], zero.at[v]);
            if (p.fit && coarse) {
                sweep(first, last, v, scale.at[v], zero.at[v], false);
                vf near[2];
                beside(nearest_stored(scale.at[v] * divisor, p.format.scale), p.format.scale, near[0],
                       near[1]);
                for (const vf each : near) {
                    scale.at[v] = replaced(first, last, v, scale.at[v], each / divisor, zero.at[v]);
                }
            }
            sweep(first, last, v, scale.at[v], zero.at[v], true);
        }
        if (p.fit) scale.write(place, n);
    }

    void run_block() {
        std::fill(sums.begin(), sums.end(), 0.0f);
        add_to_tile(p.hessian + start * p.columns, p.columns, 1, errors.data(), columns, p.columns,
                    sums.data());
        for (int64_t j = 0; j < columns; ++j) {
            const float* from = p.values + (start + j) * p.rows + row;
            Strip::read(from, n, 0.0f).write(&values[j * GPTQ_TILE], GPTQ_TILE);
        }
        for (int64_t first = 0, last = 0; first < columns; first = last) {
            while (last < columns && *group_of(last) == *group_of(first)) ++last;
            group(first, last);
        }
        for (int64_t j = 0; j < columns; ++j) {
            float *value = p.values + (start + j) * p.rows + row, *error = &errors[(start + j) * GPTQ_TILE];
            for (int64_t k = 0; k < n; ++k) {
                error[k] += value[k] - values[j * GPTQ_TILE + k];
                value[k] = values[j * GPTQ_TILE + k];
            }
        }
    }

    void run(int64_t at_row) {
        row = at_row;
        n = std::min<int64_t>(GPTQ_TILE, p.rows - row);
        for (int64_t j = 0; j < p.columns; ++j) {
            const Strip target = Strip::read(p.target + j * p.rows + row, n, 0.0f);
            Strip error = Strip::read(p.values + j * p.rows + row, n, 0.0f);
            for (int v = 0; v < GPTQ_VECTORS; ++v) error.at[v] = target.at[v] - error.at[v];
            error.write(&errors[j * GPTQ_TILE], GPTQ_TILE);
        }
        for (start = p.first; start < p.last; start += p.block) {
            columns = std::min(p.block, p.last - start);
            run_block();
        }
    }
};

template <Type TYPE>
static void refine_tiles(const RefineProblem& p, const Rounding& r, int64_t begin, int64_t end) {
    RefineTile<TYPE> tile(p, r);
    for (int64_t each = begin; each < end; ++each) tile.run(each * GPTQ_TILE);
}

static void refine(const RefineProblem& p, int threads) {
    const Rounding r(p.format);
    const int64_t tiles = (p.rows + GPTQ_TILE - 1) / GPTQ_TILE;
    parallel_for(tiles, 1, threads, [&](int64_t begin, int64_t end) {
        switch (p.type) {
            case Type::f32: refine_tiles<Type::f32>(p, r, begin, end); break;
            case Type::f16: refine_tiles<Type::f16>(p, r, begin, end); break;
            case Type::bf16: refine_tiles<Type::bf16>(p, r, begin, end); break;
        }
    });
}
