// The exact search: the stored scale (and zero point) with the least sum of weight * |error|^norm,
// among all.
//
// Codes that provably cannot win are not tried.
// Let E(s) be that sum at scale s, and let s_u be so large that nothing is clipped at s_u.
//   Above: the grid of 2s lies within the grid of s as far as the values reach, if nothing is
//     clipped at s. So E(2s) >= E(s), and codes from 2 * s_u on cannot win, provided that half of
//     the code is a code too.
//   Below: the error of the clipped values alone, C(s) <= E(s), only grows as s falls. Once C(s)
//     is above the best error found, no smaller code can win.
//   Between: f = E^(1/norm) is the distance from the group x to s * q, q the nearest codes, in a
//     weighted norm |.|. With q' the codes at another scale s' and t = |s' - s| / s',
//     f(s) <= |x - s q'| <= f(s') + t |s' q'| <= f(s') + t (|x| + f(s')). So where f(s) is above the
//     best f found, no scale wins for which t < (f(s) - f_best) / (|x| + f_best), and all those are
//     skipped. It pays where the values have few codes and the scales many: otherwise that is less
//     than the distance of two scales.
// An asymmetric integer has a grid per zero point; the first two facts are used for each of them.
// For a symmetric integer of few codes, a closer bound excludes most scales at once: scale_bounds.inl.
//
// Sums of fp32 cannot decide between scales that are nearly as good, and some are exactly as good:
// s and -s if the group reaches equally far to both sides, or a power of two and its half. Such pairs
// are compared in fp64, and of two equal ones the first stays, so that every instruction set and the
// reference find the same.

struct Best {
    double error = NO_LIMIT;
    float stored = 0, zero_point = 0;
    double precise = -1;  // the error in fp64, once it was needed
};

class OptimalSearch {
  public:
    OptimalSearch(const OptimalProblem& problem, int threads)
        : p(problem),
          f(problem.format),
          codes(problem.format.scale),
          errors(problem, threads),
          near(1e-5 * problem.norm),
          by_one(codes.type == ScaleType::e8m0 || codes.type == ScaleType::e4m3),
          skips(!by_one && f.qmax - f.qmin < 64),
          bounded(skips && f.is_int && f.symmetric && !f.has_global && (p.norm == 2 || p.norm == 3)),
          bounds(codes, errors.rounding, p.weights != nullptr, p.norm == 3.0f) {
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
        } else if (bounded && by_bounds(low, high)) {
            // done
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
    const double near;  // relative; fp32 cannot tell errors apart that are as close
    const bool by_one;  // scales are so few that each is a step
    const bool skips;
    const bool bounded;
    ScaleBounds bounds;
    std::vector<ScaleRange> intervals;  // of codes to try
    int starts[2];                      // the first code to try, of scales below and above zero
    double magnitude = 0;               // |x|
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

    // Returns the error, or more than `enough` times the best if it is more.
    double try_scale(float stored, float zero_point, int sign, double enough = 1) {
        const double scale = sign * effective(stored), limit = best.error * (1 + near);
        const double found = errors.error(scale, zero_point, limit * enough);
        if (found >= limit) return found;
        Best next{found, sign * stored, zero_point};
        if (found > best.error * (1 - near)) {
            if (best.precise < 0) {
                best.precise = errors.precise(effective(best.stored), best.zero_point);
            }
            next.precise = errors.precise(scale, zero_point);
            if (next.precise >= best.precise * (1 - 1e-12)) return found;
        }
        best = next;
        return found;
    }

    // No scale can win if it is nearer than this, as a fraction of itself, to one with that error.
    double reach(double error) const {
        if (!skips || error <= 1.1 * best.error) return 0;  // too little to skip a scale
        const double least = errors.root(best.error) * (1 + 1e-4);  // more than fp32 rounds off
        return std::max(0.0, (errors.root(error) - least) / (magnitude + least));
    }

    int end_of_codes(double unclipped) const {  // first code that need not be tried
        const double bound = std::max(2 * stored_for(unclipped) * (1 + 1e-6), codes.halves_above);
        const int end = codes.at_or_above(bound);
        return codes.value(end) < bound ? end + 1 : end;
    }

    void symmetric(float low, float high, int sign) {
        const double unclipped = std::max(double(high) / f.qmax, double(low) / f.qmin);
        const int start = codes.at_or_above(stored_for(unclipped));
        const double enough = skips ? 4 : 1;
        if (skips) magnitude = errors.root(errors.of_zeros());
        int tried = 0;
        bool look = false;
        for (int code = start; code >= codes.first && best.error > 0;) {
            if (look) {
                double below, above;
                errors.clip(sign * effective(codes.value(code)), 0.0f, &below, &above);
                if (below + above > best.error) break;
            }
            const double found = try_scale(codes.value(code), 0.0f, sign, enough);
            look = by_one || ++tried % 8 == 0 || (skips && found > 2 * best.error);
            const double next = codes.value(code) / (1 + reach(found));
            do --code;
            while (code >= codes.first && codes.value(code) > next);
        }
        const int end = std::min(end_of_codes(unclipped), codes.last + 1);
        for (int code = start + 1; code < end && best.error > 0;) {
            const double found = try_scale(codes.value(code), 0.0f, sign, enough);
            const double next = codes.value(code) / (1 - std::min(0.5, reach(found)));
            do ++code;
            while (code < end && codes.value(code) < next);
        }
        if (codes.type == ScaleType::f32) refine(sign);
    }

    // Tries the codes that can have the least error of all, in the same order as `symmetric`; returns
    // false where their errors cannot be bounded.
    bool by_bounds(float low, float high) {
        if (errors.tiled() || errors.unit() != 1.0) return false;
        double bound = NO_LIMIT;  // not below the least error
        intervals.clear();
        for (int sign : {1, -1}) {
            if (sign < 0 && !p.negative) break;
            const double up = sign > 0 ? high : -low, down = sign > 0 ? low : -high;
            const double unclipped = std::max(up / f.qmax, down / f.qmin);
            const int start = codes.at_or_above(unclipped);
            const int end = std::min(end_of_codes(unclipped), codes.last + 1);
            starts[sign > 0] = start;
            intervals.push_back({sign, start, std::max(end - 1, start)});
            if (sign > 0) bound = errors.error(codes.value(codes.at_or_above(0.9 * unclipped)), 0.0f, bound);
        }
        if (bound == 0) return false;
        for (ScaleRange& each : intervals) {
            each.first = first_unexcluded(each.first, each.sign, bound * (1 + near));
        }
        if (codes.type != ScaleType::f32) return try_contenders(intervals, bound);
        for (const ScaleRange& each : intervals) {  // of either sign, the best is refined
            if (!try_contenders({each}, NO_LIMIT)) return false;
            refine(each.sign);
        }
        return true;
    }

    // Tries the codes of intervals that can have the least error, of which some have at most `bound`.
    bool try_contenders(const std::vector<ScaleRange>& in, double bound) {
        if (bound < NO_LIMIT) bound /= errors.raised(1.0);
        bounds.search(errors.whole, errors.absmax, in, bound);
        std::vector<Contender>& all = bounds.contenders;
        if (all.empty()) return false;
        double least = NO_LIMIT;
        for (const Contender& each : all) least = std::min(least, each.error);
        const double limit = least * (1 + near) + 1e-9 * bounds.size;
        const auto worse = [&](const Contender& each) { return each.error > limit; };
        all.erase(std::remove_if(all.begin(), all.end(), worse), all.end());
        for (const ScaleRange& each : in) {
            const int start = starts[each.sign > 0];
            for (auto it = all.rbegin(); it != all.rend(); ++it) {
                if (it->sign == each.sign && it->code <= start) retry(*it);
            }
            for (const Contender& it : all) {
                if (it.sign == each.sign && it.code > start) retry(it);
            }
        }
        return true;
    }

    void retry(const Contender& each) {
        if (best.error > 0) try_scale(codes.value(each.code), 0.0f, each.sign);
    }

    // A code below which clipping alone costs more than `bound`; never above `start`.
    int first_unexcluded(int start, int sign, double bound) {
        const auto excluded = [&](int code) {
            double below, above;
            errors.clip(sign * double(codes.value(code)), 0.0f, &below, &above);
            return below + above > bound;
        };
        int high = start, low = start;  // high is not excluded; low is, or is the first code
        do {
            high = low;
            low = codes.at_or_above(codes.value(low) / 2);
        } while (low < high && !excluded(low));
        for (int round = 0; round < 2 && high - low > 4; ++round) {
            const int middle = low + (high - low) / 2;
            (excluded(middle) ? low : high) = middle;
        }
        return low;
    }

    // Of fp32 scales only some are listed. The scale of the range is one more, so that the result is
    // never worse than it; and the best of all is refined by least squares, or by Newton's method.
    void refine(int sign) {
        if (sign > 0) {
            const Candidate c = range_candidate();
            try_scale(c.stored, c.zero_point, 1);
        }
        for (int round = 0; round < 8 && best.error > 0 && best.stored * sign > 0; ++round) {
            const double scale = errors.fit(effective(best.stored), best.zero_point);
            const float stored = float(stored_for(std::abs(scale)));
            if (!(stored > 0) || stored == std::abs(best.stored)) break;
            try_scale(stored, best.zero_point, sign);
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

    // Tries every zero point that clipping does not exclude; returns whether there was one.
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
    parallel_for(p.values.groups(), std::max<int64_t>(1, (1 << 16) / size), threads,
                 [&](int64_t begin, int64_t end) {
                     OptimalSearch search(p, 1);
                     for (int64_t g = begin; g < end; ++g) search.run(g);
                 });
}
