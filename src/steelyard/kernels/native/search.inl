// The shrink-grid search; kernels/grid_search.py states the formula.
//
// Errors are summed in units of the candidate's scale: with y = x / scale, the error of a value is
// |y - round(y)|, and only the sum is multiplied by scale^norm. Values stay small, so neither the
// power nor its sum can overflow.

static constexpr double NO_LIMIT = 1e300;  // more than any error; the build assumes finite numbers
static constexpr int64_t WHOLE_GROUP = 16384;  // larger groups are read in tiles of this size
static constexpr int64_t CHECK_EVERY = 512;    // values between two checks of the error so far

struct Rounding {
    bool is_int;
    float qmin, qmax, smallest_normal, magic;

    explicit Rounding(const Format& f)
        : is_int(f.is_int),
          qmin(f.qmin),
          qmax(f.qmax),
          smallest_normal(std::ldexp(1.0f, f.min_exponent)),
          magic(1.5f * float(1 << (23 - f.mantissa))) {}
};

constexpr int BOUNDED = -1;  // any power, of numbers below BoundedPower::END

// |a|^NORM; NORM 0 stands for any other power.
template <int NORM>
static inline vf raise(vf a, const Power& power) {
    if constexpr (NORM == 1) return vabs(a);
    else if constexpr (NORM == 2) return a * a;
    else if constexpr (NORM == 3) return a * a * vabs(a);
    else if constexpr (NORM == BOUNDED) return power.bounded(a);
    else return power(vabs(a));
}

// Sums of weight * |y - round(y)|^norm.
template <bool INT, int NORM, bool WEIGHTED>
struct ErrorKernel {
    static vf error(const float* x, const float* w, int64_t i, const Rounding& r, float inverse,
                    float zero_point, const Power& power) {
        const vf y = load(x + i) * inverse + zero_point;
        const vf c = vmin(vmax(y, splat(r.qmin)), splat(r.qmax));
        const vf q = INT ? round_int(c) : round_float(c, r.smallest_normal, r.magic);
        vf e = raise<NORM>(y - q, power);
        if constexpr (WEIGHTED) e *= load(w + i);
        return e;
    }

    static float part(const float* x, const float* w, int64_t n, const Rounding& r, float inverse,
                      float zero_point, const Power& power) {
        vf first = {}, second = {};  // two sums, so that one need not wait for the other
        int64_t i = 0;
        for (; i + 2 * LANES <= n; i += 2 * LANES) {
            first += error(x, w, i, r, inverse, zero_point, power);
            second += error(x, w, i + LANES, r, inverse, zero_point, power);
        }
        if (i < n) first += error(x, w, i, r, inverse, zero_point, power);
        return sum(first + second);
    }

    // The sum of one candidate; returns early with a partial sum once that exceeds `limit`.
    static double one(const float* x, const float* w, int64_t n, const Rounding& r, float inverse,
                      float zero_point, const Power& power, double limit, int64_t check_every) {
        double total = 0;
        for (int64_t begin = 0; begin < n && total <= limit; begin += check_every) {
            total += part(x + begin, WEIGHTED ? w + begin : nullptr,
                          std::min(check_every, n - begin), r, inverse, zero_point, power);
        }
        return total;
    }

    // The sums of many candidates, for a short group: no branch to mispredict.
    static void many(const float* x, const float* w, int64_t n, const Rounding& r,
                     const float* inverse, const float* zero_points, int count, const Power& power,
                     float* sums) {
        for (int c = 0; c < count; ++c) {
            sums[c] = part(x, w, n, r, inverse[c], zero_points[c], power);
        }
    }
};

struct ErrorSums {
    double (*one)(const float*, const float*, int64_t, const Rounding&, float, float, const Power&,
                  double, int64_t);
    void (*many)(const float*, const float*, int64_t, const Rounding&, const float*, const float*,
                 int, const Power&, float*);
};

template <bool INT, bool WEIGHTED>
static ErrorSums error_sums_for(float norm, bool bounded) {
#define STEELYARD_SUMS(NORM) \
    ErrorSums { ErrorKernel<INT, NORM, WEIGHTED>::one, ErrorKernel<INT, NORM, WEIGHTED>::many }
    if (norm == 1.0f) return STEELYARD_SUMS(1);
    if (norm == 2.0f) return STEELYARD_SUMS(2);
    if (norm == 3.0f) return STEELYARD_SUMS(3);
    return bounded ? STEELYARD_SUMS(BOUNDED) : STEELYARD_SUMS(0);
#undef STEELYARD_SUMS
}

// bounded: whether all errors are below BoundedPower::END, and its power is as close as `Power`
static ErrorSums error_sums_for(bool is_int, bool weighted, float norm, bool bounded = false) {
    if (is_int) {
        return weighted ? error_sums_for<true, true>(norm, bounded)
                        : error_sums_for<true, false>(norm, bounded);
    }
    return weighted ? error_sums_for<false, true>(norm, bounded)
                    : error_sums_for<false, false>(norm, bounded);
}

using Improved = std::vector<std::atomic<bool>>;  // per factor: whether any group improved there

struct Searcher {
    const SearchProblem& p;
    Rounding rounding;
    Power power;
    ErrorSums sums;
    View weights;
    Group group;
    std::vector<float> factors, effective, inverse, zero_points, powers, found;
    // Halving a power-of-two scale often changes no reconstructed value at all. Such a tie must stay
    // one, though the power is only accurate to 1e-6.
    const double margin;
    std::vector<int> step;  // indices of the candidates that differ from the one before
    int distinct = 0;

    explicit Searcher(const SearchProblem& problem)
        : p(problem),
          rounding(problem.format),
          power(problem.norm),
          sums(error_sums_for(problem.format.is_int, problem.weights != nullptr, problem.norm,
                              is_bounded(problem, power))),
          weights(weight_view(problem.values, problem.weights, problem.weight_stride)),
          margin(problem.format.scale == ScaleType::e8m0 ? 1 - 2e-6 : 1) {
        const size_t padded = (p.num_factors + LANES - 1) / LANES * LANES;
        factors.assign(padded, 1.0f);
        std::copy(p.factors, p.factors + p.num_factors, factors.begin());
        effective.resize(padded);
        zero_points.assign(padded, 0.0f);
        inverse.resize(padded);
        powers.resize(padded);
        found.resize(padded);
        step.resize(padded);
    }

    // A scale of eight bits may be too small for its values by any factor; others are not.
    static bool is_bounded(const SearchProblem& p, const Power& power) {
        const bool wide = p.format.scale == ScaleType::f32 || p.format.scale == ScaleType::bf16;
        const float least = *std::min_element(p.factors, p.factors + p.num_factors);
        return wide && power.bounded.close &&
               2 * (p.format.qmax - p.format.qmin) < power.bounded.END * least;
    }

    void select(int64_t g, int64_t begin, int64_t end) {
        const float low = std::min(p.min_vals[g], 0.0f), high = std::max(p.max_vals[g], 0.0f);
        group.fill(p.values, p.weights != nullptr ? &weights : nullptr, g, begin, end,
                   std::max(-low, high));
        make_candidates(low, high, factors.data(), int(factors.size()), p.format, effective.data(),
                        zero_points.data());
        distinct = 0;
        for (int i = 0; i < p.num_factors; ++i) {
            if (i > 0 && effective[i] == effective[i - 1] && zero_points[i] == zero_points[i - 1]) {
                continue;
            }
            effective[distinct] = effective[i];
            zero_points[distinct] = zero_points[i];
            step[distinct++] = i;
        }
        for (int i = 0; i < distinct; ++i) {
            inverse[i] = group.unit == 1.0 ? 1.0f / effective[i]
                                           : float(1.0 / (double(effective[i]) * group.unit));
        }
        // scale^norm, relative to the first candidate's
        const float first = 1.0f / effective[0];
        for (int i = 0; i < distinct; i += LANES) {
            const vf ratio = load(effective.data() + i) * first;
            const vf raised = p.norm == 1.0f ? ratio : p.norm == 2.0f ? ratio * ratio : power(ratio);
            std::memcpy(powers.data() + i, &raised, sizeof raised);
        }
    }

    double error(int i, double limit) {
        return sums.one(group.x.data(), group.w.data(), group.padded, rounding, inverse[i],
                        zero_points[i], power, limit, CHECK_EVERY);
    }

    // The first best of `count` factors.
    int search_whole(int64_t g, int count, Improved& improved) {
        select(g, 0, p.values.group_size());
        const bool together = group.padded <= CHECK_EVERY;
        if (together) {
            sums.many(group.x.data(), group.w.data(), group.padded, rounding, inverse.data(),
                      zero_points.data(), distinct, power, found.data());
        }
        int best = 0;
        double best_error = NO_LIMIT;
        for (int i = 0; i < distinct && step[i] < count; ++i) {
            const double sum = together ? found[i] : error(i, best_error / powers[i]);
            if (sum * powers[i] < best_error * margin) {
                best_error = sum * powers[i];
                best = step[i];
                improved[best].store(true, std::memory_order_relaxed);
            }
        }
        return best;
    }

    // Errors of values [begin, end) for every candidate, into `out`.
    void tile(int64_t g, int64_t begin, int64_t end, double* out) {
        select(g, begin, end);
        for (int i = 0; i < distinct; ++i) {
            const double found = error(i, NO_LIMIT) * powers[i];
            const int next = i + 1 < distinct ? step[i + 1] : p.num_factors;
            std::fill(out + step[i], out + next, found);
        }
    }
};

static void write_range(const SearchProblem& p, int64_t g, int best) {
    p.best_min[g] = p.min_vals[g] * p.factors[best];
    p.best_max[g] = p.max_vals[g] * p.factors[best];
}

// How many factors are tried: `patience` of them in a row without an improvement end the search.
static int steps_taken(const SearchProblem& p, const Improved& improved) {
    int idle = 0;
    for (int i = 1; i < p.num_factors; ++i) {
        idle = improved[i].load() ? 0 : idle + 1;
        if (p.patience > 0 && idle >= p.patience) return i + 1;
    }
    return p.num_factors;
}

static void search_in_tiles(const SearchProblem& p, int threads) {
    const int64_t size = p.values.group_size(), count = p.num_factors, groups = p.values.groups();
    const int64_t tiles = (size + WHOLE_GROUP - 1) / WHOLE_GROUP;
    std::vector<double> parts(tiles * count), errors(groups * count, 0.0);
    for (int64_t g = 0; g < groups; ++g) {
        parallel_for(tiles, 4, threads, [&](int64_t begin, int64_t end) {
            Searcher searcher(p);
            for (int64_t t = begin; t < end; ++t) {
                searcher.tile(g, t * WHOLE_GROUP, std::min(size, (t + 1) * WHOLE_GROUP),
                              parts.data() + t * count);
            }
        });
        for (int64_t t = 0; t < tiles; ++t) {  // in the order of the tiles, whichever thread computed them
            for (int64_t i = 0; i < count; ++i) errors[g * count + i] += parts[t * count + i];
        }
    }
    Improved improved(count);
    const double margin = Searcher(p).margin;
    auto choose = [&](int64_t g, int among) {
        int best = 0;
        double best_error = NO_LIMIT;
        for (int i = 0; i < among; ++i) {
            if (errors[g * count + i] < best_error * margin) {
                best_error = errors[g * count + i];
                best = i;
                improved[i].store(true);
            }
        }
        return best;
    };
    for (int64_t g = 0; g < groups; ++g) choose(g, int(count));
    const int steps = steps_taken(p, improved);
    for (int64_t g = 0; g < groups; ++g) write_range(p, g, choose(g, steps));
}

// Until the last group is searched, only the index of each group's factor is stored.
template <class Place>
static void search_groups(const SearchProblem& p, int threads) {
    const int64_t groups = p.values.groups();
    const int64_t grain = std::max<int64_t>(1, (1 << 16) / p.values.group_size());
    Improved improved(p.num_factors);
    std::vector<Place> best(groups);
    parallel_for(groups, grain, threads, [&](int64_t begin, int64_t end) {
        Searcher searcher(p);
        for (int64_t g = begin; g < end; ++g) {
            best[g] = Place(searcher.search_whole(g, p.num_factors, improved));
        }
    });
    const int steps = steps_taken(p, improved);
    parallel_for(groups, grain, threads, [&](int64_t begin, int64_t end) {
        Searcher searcher(p);
        for (int64_t g = begin; g < end; ++g) {
            // a factor beyond the end of the search: choose again without those
            const bool again = best[g] >= steps;
            write_range(p, g, again ? searcher.search_whole(g, steps, improved) : best[g]);
        }
    });
}

static void search(const SearchProblem& problem, int threads) {
    SearchProblem p = problem;
    if (p.weights == nullptr) p.values = merged(p.values);
    if (p.values.group_size() > WHOLE_GROUP) return search_in_tiles(p, threads);
    if (p.num_factors <= 256) return search_groups<uint8_t>(p, threads);
    search_groups<int32_t>(p, threads);
}
