// Sums over a group for many scales at once, one per lane: symmetric integers, the norms 2 and 3.

// The scale of a lane, and how far its block reaches to both sides, as fractions of it.
struct alignas(64) LaneScales {
    float scale[LANES], inverse[LANES], above[LANES], below[LANES];
};

struct alignas(64) LaneSums {
    float error[LANES], slope[LANES], curvature[LANES], above[LANES], below[LANES];
    float positive[LANES], negative[LANES];  // with BOTH: what the missing code costs either sign
};

static inline void put(float* to, vf v) { std::memcpy(to, &v, sizeof v); }
static inline void add_to(float* to, vf v) { put(to, load(to) + v); }

// A group in two parts: magnitudes of values that no scale clips, and the others. Each is filled up to a
// multiple of four with zeros.
struct SplitGroup {
    std::vector<float> inner, outer, inner_weights, outer_weights;
    int64_t inside = 0, outside = 0;

    void fill(const Group& group, bool weighted, float most) {
        inner.resize(group.padded + 4 + LANES);
        outer.resize(group.padded + 4 + LANES);
        inner_weights.resize(weighted ? inner.size() : 0);
        outer_weights.resize(inner_weights.size());
        inside = outside = 0;
        for (int64_t i = 0; i < group.padded; i += LANES) {
            const float* x = group.x.data() + i;
            if (weighted) {
                const float* w = group.w.data() + i;
                part(x, w, most, inner_weights.data() + inside, outer_weights.data() + outside);
            }
            const int added = part(x, nullptr, most, inner.data() + inside, outer.data() + outside);
            inside += added;
            outside += LANES - added;
        }
        for (; inside % 4 != 0; ++inside) {
            inner[inside] = 0;
            if (weighted) inner_weights[inside] = 0;
        }
        for (; outside % 4 != 0; ++outside) {
            outer[outside] = 0;
            if (weighted) outer_weights[outside] = 0;
        }
    }

  private:
    // Writes a vector of weights, or of values, to one or the other; returns the number of inner ones.
    static int part(const float* x, const float* w, float most, float* in, float* out) {
#if defined(__AVX512F__)
        const __m512 value = (__m512)load(x), size = (__m512)vabs(load(x));
        const __mmask16 small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(most), _CMP_LE_OQ);
        const __m512 weight = w != nullptr ? (__m512)load(w) : value;
        _mm512_storeu_ps(in, _mm512_maskz_compress_ps(small, w != nullptr ? weight : size));
        _mm512_storeu_ps(out, _mm512_maskz_compress_ps(__mmask16(~small), weight));
        return __builtin_popcount(small);
#else
        int count = 0;
        for (int i = 0; i < LANES; ++i) {
            const float size = std::fabs(x[i]);
            in[count] = w != nullptr ? w[i] : size;
            out[i - count] = w != nullptr ? w[i] : x[i];
            count += size <= most;
        }
        return count;
#endif
    }
};

template <int NORM, bool WEIGHTED, bool BOTH>
static void lane_sums(const SplitGroup& group, const Rounding& r, const LaneScales& at, LaneSums* sums) {
    const vf inverse = load(at.inverse), size = vabs(inverse), zero = {};
    const vf wider = load(at.above) + 1.0f, narrower = 1.0f - load(at.below);
    const vf half_wider = 0.5f * wider, half_narrower = 0.5f * narrower;
    const vf low = splat(r.qmin), high = splat(BOTH ? -r.qmin : r.qmax);
    vf error, slope, curvature, above, below, positive, negative;
    const auto weighed = [](vf v, float w) { return WEIGHTED ? v * w : v; };
    // d: difference; k: magnitude of the code, with the sign of d's; a: magnitude before rounding
    const auto add = [&](vf d, vf q, vf k, vf a, float w) {
        above += weighed(vmax(k * wider - half_wider - a, zero), w);
        below += weighed(vmax(a - half_narrower - k * narrower, zero), w);
        const vf part = weighed(NORM == 2 ? d : vabs(d) * d, w);
        const vf other = weighed(NORM == 2 ? q : vabs(d) * q, w);
        error += part * d;
        slope += part * q;
        curvature += other * q;
    };
    const auto power = [](vf d) { return NORM == 2 ? d * d : d * d * vabs(d); };
    const auto start = [&] { error = slope = curvature = above = below = positive = negative = zero; };
    const auto flush = [&] {
        add_to(sums->error, error);
        add_to(sums->slope, slope);
        add_to(sums->curvature, curvature);
        add_to(sums->above, above);
        add_to(sums->below, below);
        add_to(sums->positive, positive);
        add_to(sums->negative, negative);
    };
    *sums = LaneSums{};
    for (int64_t begin = 0; begin < group.inside; begin += CHECK_EVERY) {
        start();
        const int64_t end = std::min(group.inside, begin + CHECK_EVERY);
        for (int64_t i = begin; i < end; ++i) {
            const vf y = rounded(group.inner[i] * size), q = round_int(y);
            add(y - q, q, q, y, WEIGHTED ? group.inner_weights[i] : 1.0f);
        }
        flush();
    }
    for (int64_t begin = 0; begin < group.outside; begin += CHECK_EVERY) {
        start();
        const int64_t end = std::min(group.outside, begin + CHECK_EVERY);
        for (int64_t i = begin; i < end; ++i) {
            const float w = WEIGHTED ? group.outer_weights[i] : 1.0f;
            const vf y = rounded(group.outer[i] * inverse), c = vmin(vmax(y, low), high);
            const vf q = round_int(c), d = y - q;
            add(d, q, vabs(q), vabs(c), w);
            if constexpr (BOTH) {
                const vf found = power(d);
                positive += weighed(power(y - vmin(q, splat(r.qmax))) - found, w);
                negative += weighed(power(y - vmax(q, splat(-r.qmax))) - found, w);
            }
        }
        flush();
    }
}

// The errors at a scale per lane, in units of it.
template <int NORM, bool WEIGHTED>
static void lane_errors(const SplitGroup& group, const Rounding& r, const float* inverse, double* errors) {
    const vf factor = load(inverse), size = vabs(factor);
    vf sums[4] = {};  // none need wait for another
    const auto add = [&](vf& sum, vf d, const std::vector<float>& weights, int64_t i) {
        const vf e = NORM == 2 ? d * d : d * d * vabs(d);
        sum += WEIGHTED ? e * weights[i] : e;
    };
    const auto flush = [&] {
        const vf sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        for (int lane = 0; lane < LANES; ++lane) errors[lane] += sum[lane];
        for (vf& each : sums) each = vf{};
    };
    std::fill(errors, errors + LANES, 0.0);
    for (int64_t begin = 0; begin < group.inside; begin += CHECK_EVERY) {
        for (int64_t i = begin; i < std::min(group.inside, begin + CHECK_EVERY); i += 4) {
            for (int j = 0; j < 4; ++j) {
                const vf y = rounded(group.inner[i + j] * size);
                add(sums[j], y - round_int(y), group.inner_weights, i + j);
            }
        }
        flush();
    }
    for (int64_t begin = 0; begin < group.outside; begin += CHECK_EVERY) {
        for (int64_t i = begin; i < std::min(group.outside, begin + CHECK_EVERY); i += 4) {
            for (int j = 0; j < 4; ++j) {
                const vf y = rounded(group.outer[i + j] * factor);
                const vf d = y - round_int(vmin(vmax(y, splat(r.qmin)), splat(r.qmax)));
                add(sums[j], d, group.outer_weights, i + j);
            }
        }
        flush();
    }
}

// The error if all values were rounded to zero; values are multiplied by a factor.
template <int NORM, bool WEIGHTED>
static double size_of(const Group& group, float factor) {
    double total = 0;
    for (int64_t begin = 0; begin < group.padded; begin += CHECK_EVERY) {
        vf part = {};
        for (int64_t i = begin; i < std::min(group.padded, begin + CHECK_EVERY); i += LANES) {
            const vf a = vabs(load(group.x.data() + i) * factor), e = NORM == 2 ? a * a : a * a * a;
            part += WEIGHTED ? e * load(group.w.data() + i) : e;
        }
        total += sum(part);
    }
    return total;
}
