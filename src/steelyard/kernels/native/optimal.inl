// The exact search: the stored scale (and zero point) with the least squared error, among all.
//
// Not every code has to be tried, and what is left out is left out for a reason that holds always.
// Let E(s) be the error of scale s, and let s_u be so large that nothing is clipped at s_u.
//   Above: the grid of 2s lies within the grid of s as far as the values reach, if nothing is
//     clipped at s. So E(2s) >= E(s), and codes from 2 * s_u on cannot win, provided that half of
//     the code is a code too.
//   Below: the error of the clipped values alone, C(s) <= E(s), only grows as s falls. Once C(s)
//     is above the best error found, no smaller code can win.
// An asymmetric integer has a grid per zero point; the same two facts hold for each of them.

struct Codes {  // the scales that a type can store, in order
    ScaleType type;
    int first, last;
    double halves_above;  // from here on, half of a code is a code

    explicit Codes(ScaleType t) : type(t) {
        switch (t) {
            case ScaleType::f32:  // too many to list: bf16's, and the best is refined
            case ScaleType::bf16: first = 1; last = 0x7f7f; halves_above = 0x1p-125; break;
            case ScaleType::f16: first = 1; last = 0x7bff; halves_above = 0x1p-13; break;
            case ScaleType::e4m3: first = 1; last = 0x7e; halves_above = 0x1p-5; break;
            case ScaleType::e8m0: first = 0; last = 254; halves_above = 0x1p-126; break;
        }
    }

    float value(int code) const {
        switch (type) {
            case ScaleType::f32:
            case ScaleType::bf16: return from_bits(uint32_t(code) << 16);
            case ScaleType::f16: return widen(half_t{uint16_t(code)});
            case ScaleType::e4m3: {
                const int exponent = code >> 3, mantissa = code & 7;
                return exponent == 0 ? mantissa * 0x1p-9f
                                     : (8 + mantissa) * from_bits(uint32_t(exponent + 117) << 23);
            }
            case ScaleType::e8m0: return power_of_two(code);
        }
        return 0;
    }

    int at_or_above(double value_wanted) const {  // `last` where no code is
        int low = first, high = last;
        while (low < high) {
            const int middle = low + (high - low) / 2;
            if (value(middle) >= value_wanted) high = middle;
            else low = middle + 1;
        }
        return low;
    }
};

// Sum of weight * (distance of x beyond the interval [low, high])^2, below and above.
template <bool WEIGHTED>
static void clip_sums(const float* x, const float* w, int64_t n, float low, float high,
                      double* below, double* above) {
    vf a = {}, b = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const vf v = load(x + i);
        const vf under = vmax(low - v, (vf){}), over = vmax(v - high, (vf){});
        if constexpr (WEIGHTED) {
            const vf weight = load(w + i);
            a += under * under * weight;
            b += over * over * weight;
        } else {
            a += under * under;
            b += over * over;
        }
    }
    *below += sum(a);
    *above += sum(b);
}

// Sums of x*q and q*q (weighed), from which least squares gives the best scale for fixed codes.
static void fit_sums(const float* x, const float* w, int64_t n, const Rounding& r, float inverse,
                     float zero_point, double* xq, double* qq) {
    for (int64_t begin = 0; begin < n; begin += CHECK_EVERY) {
        vf a = {}, b = {};
        for (int64_t i = begin; i < std::min(n, begin + CHECK_EVERY); i += LANES) {
            const vf v = load(x + i);
            const vf y = v * inverse + zero_point;
            const vf c = vmin(vmax(y, splat(r.qmin)), splat(r.qmax));
            const vf q = (r.is_int ? round_int(c) : round_float(c, r.smallest_normal, r.magic)) -
                         zero_point;
            const vf wq = w != nullptr ? q * load(w + i) : q;
            a += v * wq;
            b += q * wq;
        }
        *xq += sum(a);
        *qq += sum(b);
    }
}

// One group's errors, read whole or tile by tile. Values are in units of group.unit.
struct Errors {
    const OptimalProblem& p;
    Rounding rounding;
    Power power{2.0f};
    ErrorSums sums;
    View weights;
    int64_t g;
    int threads;
    float absmax;
    Group whole;

    Errors(const OptimalProblem& problem, int threads_)
        : p(problem),
          rounding(problem.format),
          sums(error_sums_for(problem.format.is_int, problem.weights != nullptr, 2.0f)),
          weights(weight_view(problem.values, problem.weights, problem.weight_stride)),
          threads(threads_) {}

    static constexpr int64_t LOOK_EVERY = 64;  // most codes are hopeless: find out soon

    bool tiled() const { return p.values.group_size() > WHOLE_GROUP; }

    void select(int64_t group) {
        g = group;
        absmax = std::max(-p.min_vals[g], p.max_vals[g]);
        if (!tiled()) fill(whole, 0, p.values.group_size());
    }

    void fill(Group& into, int64_t begin, int64_t end) const {
        into.fill(p.values, p.weights != nullptr ? &weights : nullptr, g, begin, end, absmax);
    }

    double unit() const {
        return absmax > 0 && (absmax < 1e-20f || absmax > 1e20f)
                   ? std::ldexp(1.0, -std::ilogb(absmax))
                   : 1.0;
    }

    // Adds body(group, part) over all parts of the group; a part is three doubles.
    template <class Body>
    void each(double* total, const Body& body) {
        if (!tiled()) return body(whole, total);
        const int64_t size = p.values.group_size();
        const int64_t tiles = (size + WHOLE_GROUP - 1) / WHOLE_GROUP;
        std::vector<double> parts(3 * tiles, 0.0);
        parallel_for(tiles, 8, threads, [&](int64_t first, int64_t last) {
            Group part;
            for (int64_t t = first; t < last; ++t) {
                fill(part, t * WHOLE_GROUP, std::min(size, (t + 1) * WHOLE_GROUP));
                body(part, parts.data() + 3 * t);
            }
        });
        for (int64_t t = 0; t < tiles; ++t) {
            for (int i = 0; i < 3; ++i) total[i] += parts[3 * t + i];
        }
    }

    const float* w(const Group& group) const {
        return p.weights != nullptr ? group.w.data() : nullptr;
    }

    double error(double scale, float zero_point, double limit) {
        double total[3] = {};
        const double square = scale * scale;
        each(total, [&](const Group& group, double* out) {
            out[0] += square * sums.one(group.x.data(), w(group), group.padded, rounding,
                                        float(1 / scale), zero_point, power, limit / square,
                                        LOOK_EVERY);
        });
        return total[0];
    }

    void clip(double scale, float zero_point, double* below, double* above) {
        double total[3] = {};
        const double a = (rounding.qmin - zero_point) * scale, b = (rounding.qmax - zero_point) * scale;
        const float low = float(std::min(a, b)), high = float(std::max(a, b));
        each(total, [&](const Group& group, double* out) {
            if (p.weights != nullptr) {
                clip_sums<true>(group.x.data(), w(group), group.padded, low, high, out, out + 1);
            } else {
                clip_sums<false>(group.x.data(), nullptr, group.padded, low, high, out, out + 1);
            }
        });
        *below = total[0];
        *above = total[1];
    }

    double fit(double scale, float zero_point) {
        double total[3] = {};
        each(total, [&](const Group& group, double* out) {
            fit_sums(group.x.data(), w(group), group.padded, rounding, float(1 / scale), zero_point,
                     out, out + 1);
        });
        return total[1] > 0 ? total[0] / total[1] : scale;
    }

    // Range of the values that weigh anything.
    void range(float* low, float* high) {
        *low = std::min(p.min_vals[g], 0.0f) * unit();
        *high = std::max(p.max_vals[g], 0.0f) * unit();
        if (p.weights == nullptr || tiled()) return;
        *low = *high = 0;
        for (int64_t i = 0; i < whole.padded; ++i) {
            if (whole.w[i] > 0) {
                *low = std::min(*low, whole.x[i]);
                *high = std::max(*high, whole.x[i]);
            }
        }
    }
};

struct Best {
    double error = NO_LIMIT;
    float stored = 0, zero_point = 0;
};

class OptimalSearch {
  public:
    OptimalSearch(const OptimalProblem& problem, int threads)
        : p(problem), f(problem.format), codes(problem.format.scale), errors(problem, threads) {
        // a code over the global scale must stay finite
        if (f.has_global) {
            const double largest = 3.4028234e38 * f.global_scale;
            while (codes.last > codes.first && codes.value(codes.last) > largest) --codes.last;
        }
    }

    void run(int64_t g) {
        errors.select(g);
        best = Best();
        float low, high;
        errors.range(&low, &high);
        if (low == 0 && high == 0) {
            const Candidate c = range_candidate();
            best.stored = c.stored;
            best.zero_point = c.zero_point;
        } else if (f.symmetric) {
            symmetric(low, high, 1);
            if (p.negative) symmetric(-high, -low, -1);
        } else {
            asymmetric(low, high);
        }
        p.scale[g] = best.stored;
        if (p.zero_point != nullptr) p.zero_point[g] = best.zero_point;
    }

  private:
    const OptimalProblem& p;
    const Format& f;
    Codes codes;
    Errors errors;
    Best best;

    // the scale that reconstructs the gathered values when `stored` is in the file
    double effective(double stored) const {
        return (f.has_global ? float(stored) / f.global_scale : stored) * errors.unit();
    }

    double stored_for(double effective_scale) const {
        return effective_scale / errors.unit() * (f.has_global ? f.global_scale : 1.0f);
    }

    Candidate range_candidate() const {
        const int64_t g = errors.g;
        return candidate(std::min(p.min_vals[g], 0.0f), std::max(p.max_vals[g], 0.0f), f);
    }

    void try_scale(float stored, float zero_point, int sign, double margin = 1) {
        const double limit = best.error * margin;
        const double found = errors.error(sign * effective(stored), zero_point, limit);
        if (found < limit) best = {found, sign * stored, zero_point};
    }

    int end_of_codes(double unclipped) const {  // first code that need not be tried
        const double bound = std::max(2 * stored_for(unclipped) * (1 + 1e-6), codes.halves_above);
        const int end = codes.at_or_above(bound);
        return codes.value(end) < bound ? end + 1 : end;
    }

    void symmetric(float low, float high, int sign) {
        const double unclipped = std::max(double(high) / f.qmax, double(low) / f.qmin);
        const int start = codes.at_or_above(stored_for(unclipped));
        const int block = codes.type == ScaleType::e8m0 || codes.type == ScaleType::e4m3 ? 1 : 8;
        for (int code = start; code >= codes.first && best.error > 0; --code) {
            if ((start - code) % block == 0 && code != start) {
                double below, above;
                errors.clip(sign * effective(codes.value(code)), 0.0f, &below, &above);
                if (below + above > best.error) break;
            }
            try_scale(codes.value(code), 0.0f, sign);
        }
        const int end = end_of_codes(unclipped);
        for (int code = start + 1; code < end && code <= codes.last && best.error > 0; ++code) {
            try_scale(codes.value(code), 0.0f, sign);
        }
        if (codes.type == ScaleType::f32) refine(sign);
    }

    // Of fp32 scales only some are listed. The scale of the range is one more, so that the result is
    // never worse than it; and the best of all is refined by least squares.
    void refine(int sign) {
        if (sign > 0) {
            const Candidate c = range_candidate();
            try_scale(c.stored, c.zero_point, 1);
        }
        for (int round = 0; round < 8 && best.error > 0 && best.stored * sign > 0; ++round) {
            const double scale = errors.fit(effective(best.stored), best.zero_point);
            const float stored = float(stored_for(std::abs(scale)));
            if (!(stored > 0) || stored == std::abs(best.stored)) break;
            // least squares is never worse, but for rounding
            try_scale(stored, best.zero_point, sign, 1 + 1e-5);
            if (std::abs(best.stored) != stored) break;
        }
    }

    void asymmetric(float low, float high) {
        const double unclipped = (double(high) - low) / (f.qmax - f.qmin - 2);
        const int start = codes.at_or_above(stored_for(unclipped));
        for (int code = start; code >= codes.first && best.error > 0; --code) {
            if (!zero_points(codes.value(code), low)) break;
        }
        const int end = end_of_codes(unclipped);
        for (int code = start + 1; code < end && code <= codes.last && best.error > 0; ++code) {
            zero_points(codes.value(code), low);
        }
        if (codes.type == ScaleType::f32) refine(1);
    }

    // Tries every zero point that clipping does not exclude; tells whether there was one.
    bool zero_points(float stored, float low) {
        const double scale = effective(stored);
        const float middle = zero_point_for(low, float(scale), f);
        bool tried = false;
        for (int direction : {1, -1}) {
            for (float zp = direction > 0 ? middle : middle - 1; zp >= f.qmin && zp <= f.qmax;
                 zp += direction) {
                double below, above;
                errors.clip(scale, zp, &below, &above);
                if (below + above <= best.error) {
                    tried = true;
                    try_scale(stored, zp, 1);
                    if (below + above == 0 && direction > 0) return true;  // the others only clip more
                }
                if ((direction > 0 ? above : below) > best.error) break;
            }
        }
        return tried;
    }
};

static void optimal(const OptimalProblem& problem, int threads) {
    OptimalProblem p = problem;
    if (p.weights == nullptr) p.values = merged(p.values);
    const int64_t size = p.values.group_size();
    if (size > WHOLE_GROUP) {
        OptimalSearch search(p, threads);
        for (int64_t g = 0; g < p.values.groups(); ++g) search.run(g);
        return;
    }
    parallel_for(p.values.groups(), std::max<int64_t>(1, (1 << 14) / size), threads,
                 [&](int64_t begin, int64_t end) {
                     OptimalSearch search(p, 1);
                     for (int64_t g = begin; g < end; ++g) search.run(g);
                 });
}
