// The error of one group at any scale.

// The code of y, a value over the scale (and the zero point added), as a number.
static inline vf code_of(vf y, const Rounding& r) {
    const vf c = vmin(vmax(y, splat(r.qmin)), splat(r.qmax));
    return r.is_int ? round_int(c) : round_float(c, r.smallest_normal, r.magic);
}

// Sum of weight * (|error| / unit)^norm in fp64, value by value.
static double precise_sum(const float* x, const float* w, int64_t n, const Rounding& r, double scale,
                          float zero_point, double norm, double unit) {
    double total = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        const vf q = code_of(load(x + i) * float(1 / scale) + zero_point, r) - zero_point;
        for (int lane = 0; lane < LANES; ++lane) {
            const double e = std::abs(x[i + lane] - scale * q[lane]) / unit;
            const double raised = norm == 2 ? e * e : norm == 3 ? e * e * e : std::pow(e, norm);
            total += w != nullptr ? raised * w[i + lane] : raised;
        }
    }
    return total;
}

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

// The same for any norm, in units of the scale: y is x / scale, beyond [low, high] of the codes.
template <int NORM, bool WEIGHTED>
static void clip_powers(const float* x, const float* w, int64_t n, float inverse, float low,
                        float high, const Power& power, double* below, double* above) {
    vf a = {}, b = {};
    const vf zero = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const vf y = load(x + i) * inverse;
        const vf under = vmax(low - y, zero), over = vmax(y - high, zero);
        // the power of zero is not quite zero
        vf e = raise<NORM>(under, power), f = raise<NORM>(over, power);
        if constexpr (NORM == 0) {
            e = under > zero ? e : zero;
            f = over > zero ? f : zero;
        }
        if constexpr (WEIGHTED) {
            e *= load(w + i);
            f *= load(w + i);
        }
        a += e;
        b += f;
    }
    *below += sum(a);
    *above += sum(b);
}

using ClipPowers = void (*)(const float*, const float*, int64_t, float, float, float, const Power&,
                            double*, double*);

static ClipPowers clip_powers_for(bool weighted, float norm) {
    if (norm == 3.0f) return weighted ? clip_powers<3, true> : clip_powers<3, false>;
    return weighted ? clip_powers<0, true> : clip_powers<0, false>;
}

// Sums of x*q and q*q (weighed), from which least squares gives the best scale for fixed codes.
static void fit_sums(const float* x, const float* w, int64_t n, const Rounding& r, float inverse,
                     float zero_point, double* xq, double* qq) {
    for (int64_t begin = 0; begin < n; begin += CHECK_EVERY) {
        vf a = {}, b = {};
        for (int64_t i = begin; i < std::min(n, begin + CHECK_EVERY); i += LANES) {
            const vf v = load(x + i);
            const vf q = code_of(v * inverse + zero_point, r) - zero_point;
            const vf wq = w != nullptr ? q * load(w + i) : q;
            a += v * wq;
            b += q * wq;
        }
        *xq += sum(a);
        *qq += sum(b);
    }
}

// Sums from which Newton's method gives the next scale for fixed codes under another norm: of d*q
// and q*q, with d the error in units of the scale, each weighed by |d|^(norm - 2) too.
static void newton_sums(const float* x, const float* w, int64_t n, const Rounding& r, float inverse,
                        float zero_point, const Power& curvature, double* dq, double* qq) {
    for (int64_t begin = 0; begin < n; begin += CHECK_EVERY) {
        vf a = {}, b = {};
        for (int64_t i = begin; i < std::min(n, begin + CHECK_EVERY); i += LANES) {
            const vf y = load(x + i) * inverse + zero_point;
            const vf code = code_of(y, r);
            const vf q = code - zero_point, d = y - code;
            vf wq = q * curvature(vmax(vabs(d), splat(1e-3f)));  // finite where the norm is below 2
            if (w != nullptr) wq *= load(w + i);
            a += d * wq;
            b += q * wq;
        }
        *dq += sum(a);
        *qq += sum(b);
    }
}

// One group's errors, read whole or tile by tile. Values are in units of group.unit.
struct Errors {
    const OptimalProblem& p;
    Rounding rounding;
    const bool squared;
    Power power, curvature;
    ErrorSums sums;
    ClipPowers clip_powers;
    View weights;
    int64_t g;
    int threads;
    float absmax;
    Group whole;

    Errors(const OptimalProblem& problem, int threads_)
        : p(problem),
          rounding(problem.format),
          squared(problem.norm == 2.0f),
          power(problem.norm),
          curvature(problem.norm - 2.0f),
          sums(error_sums_for(problem.format.is_int, problem.weights != nullptr, problem.norm)),
          clip_powers(clip_powers_for(problem.weights != nullptr, problem.norm)),
          weights(weight_view(problem.values, problem.weights, problem.weight_stride)),
          threads(threads_) {}

    static constexpr int64_t LOOK_EVERY = 64;  // most codes cannot win: stop early

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

    // The factor from errors in units of the scale to the error of the group. Other powers than the
    // square are relative to the group's largest magnitude, so that they neither overflow nor vanish.
    double raised(double scale) const {
        if (squared) return scale * scale;
        const double relative = std::abs(scale) / (absmax * unit());
        return p.norm == 3.0f ? relative * relative * relative : std::pow(relative, double(p.norm));
    }

    // Adds up body(tile, sums) over all tiles of the group; sums is three doubles.
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
        const double factor = raised(scale);
        each(total, [&](const Group& group, double* out) {
            const double found = sums.one(group.x.data(), w(group), group.padded, rounding,
                                          float(1 / scale), zero_point, power, limit / factor,
                                          LOOK_EVERY);
            // the power of zero is not quite zero
            if (squared || found > group.padded * 0x1p-100) out[0] += factor * found;
        });
        return total[0];
    }

    // Sum of weight * |x|^norm: the error if all were rounded to zero.
    double of_zeros() {
        double total[3] = {};
        each(total, [&](const Group& group, double* out) {
            if (!squared) {
                clip_powers(group.x.data(), w(group), group.padded, float(1 / (absmax * unit())),
                            0.0f, 0.0f, power, out, out + 1);
            } else if (p.weights != nullptr) {
                clip_sums<true>(group.x.data(), w(group), group.padded, 0, 0, out, out + 1);
            } else {
                clip_sums<false>(group.x.data(), nullptr, group.padded, 0, 0, out, out + 1);
            }
        });
        return total[0] + total[1];
    }

    double root(double error) const {
        return squared          ? std::sqrt(error)
               : p.norm == 3.0f ? std::cbrt(error)
                                : std::pow(error, 1 / double(p.norm));
    }

    // The error in fp64, to compare with another such.
    double precise(double scale, float zero_point) {
        double total[3] = {};
        each(total, [&](const Group& group, double* out) {
            out[0] += precise_sum(group.x.data(), w(group), group.padded, rounding, scale,
                                  zero_point, p.norm, absmax * unit());
        });
        return total[0];
    }

    void clip(double scale, float zero_point, double* below, double* above) {
        double total[3] = {};
        if (!squared) {
            const float from = rounding.qmin - zero_point, to = rounding.qmax - zero_point;
            each(total, [&](const Group& group, double* out) {
                clip_powers(group.x.data(), w(group), group.padded, float(1 / scale), from, to,
                            power, out, out + 1);
            });
            *below = total[0] * raised(scale);
            *above = total[1] * raised(scale);
            return;
        }
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
        if (!squared) {
            each(total, [&](const Group& group, double* out) {
                newton_sums(group.x.data(), w(group), group.padded, rounding, float(1 / scale),
                            zero_point, curvature, out, out + 1);
            });
            const double step = total[1] > 0 ? total[0] / total[1] : 0.0;
            return scale * (1 + step / std::max(1.0, p.norm - 1.0));
        }
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
        vf least = {}, most = {};
        for (int64_t i = 0; i < whole.padded; i += LANES) {
            const vf v = load(whole.w.data() + i) > 0.0f ? load(whole.x.data() + i) : vf{};
            least = vmin(least, v);
            most = vmax(most, v);
        }
        *low = *high = 0;
        for (int lane = 0; lane < LANES; ++lane) {
            *low = std::min(*low, least[lane]);
            *high = std::max(*high, most[lane]);
        }
    }
};
