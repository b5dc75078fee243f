// What a histogram loses with given parameters; kernels/range_costs.py defines the costs.

constexpr double NOT_JUDGED = std::numeric_limits<double>::max();

struct CodeErrors {
    const Format& f;

    double step(double a) const {  // distance of neighbouring codes at a >= 0
        const int exponent = a > 0 ? std::max(std::ilogb(a), f.min_exponent) : f.min_exponent;
        return std::ldexp(1.0, exponent - f.mantissa);
    }
    double round(double code) const {
        if (f.is_int) return std::nearbyint(code);
        const double h = step(std::fabs(code));
        return std::nearbyint(code / h) * h;
    }
    static double area(double scaled) {
        const double whole = std::nearbyint(scaled), d = scaled - whole;
        return whole / 12 + d * d * d / 3;
    }
    // Integral of the squared error from 0 to code, of which that beyond the range is a cube.
    double integral(double code) const {
        const double inside = std::min(std::max(code, double(f.qmin)), double(f.qmax));
        const double beyond = code - inside;
        return (f.is_int ? area(inside) : of_floats(inside)) + beyond * beyond * beyond / 3;
    }

  private:
    double of_floats(double code) const {
        const double a = std::fabs(code), h = step(a), cells = std::ldexp(1.0, f.mantissa) / 12;
        const double first = std::ldexp(1.0, f.min_exponent - f.mantissa);
        double found = h * h * h * area(a / h);
        if (h > first) {
            found -= cells * h * h * h;
            found += cells * 2 * first * first * first;
            for (double lower = 2 * first; lower < h; lower *= 2) found += cells * lower * lower * lower;
        }
        return code < 0 ? -found : found;
    }
};

// Bins that hold something, those furthest from zero first.
struct FilledBin {
    int place;  // its lower edge, counted from zero
    double count;
};

static std::vector<FilledBin> outermost_first(const int64_t* counts) {
    std::vector<FilledBin> found;
    for (int m = BINS / 2 - 1; m >= 0; --m) {
        for (const int place : {m, -1 - m}) {
            if (const int64_t n = counts[BINS / 2 + place]) found.push_back({place, double(n)});
        }
    }
    return found;
}

static void squared_errors(const RangeCosts& p, int64_t row) {
    const CodeErrors codes{p.format};
    const std::vector<FilledBin> bins = outermost_first(p.counts + row * BINS);
    double best = NOT_JUDGED;
    for (int64_t i = row * p.candidates; i < (row + 1) * p.candidates; ++i) {
        const double u = p.unit[i], z = p.zero_point[i], cube = u * u * u;
        double cost = 0;
        for (const FilledBin& bin : bins) {
            const double low = codes.integral(bin.place / u + z);
            cost += bin.count * (codes.integral((bin.place + 1) / u + z) - low) * cube;
            if (cost > best) break;  // clipped values alone may cost more than the best candidate
        }
        p.costs[i] = cost > best ? NOT_JUDGED : cost;
        best = std::min(best, cost);
    }
}

static double divergence(const Format& format, const int64_t* counts, int first, int last, double u, double z) {
    const CodeErrors codes{format};
    double below = 0, above = 0, inside = 0, cost = 0;
    for (int b = 0; b < first; ++b) below += double(counts[b]);
    for (int b = last; b < BINS; ++b) above += double(counts[b]);
    double code = 0, mass = 0, bins = 0, clipped = 0;  // of the codes so far: that of one segment
    bool lost = false;
    auto close = [&] {
        if (bins == 0) return;
        if (mass == 0) lost = true;
        else cost -= clipped * std::log(mass / bins);
        inside += mass;
        mass = bins = clipped = 0;
    };
    for (int b = first; b < last; ++b) {
        const double q = double(counts[b]);
        const double p = q + (b == first ? below : 0) + (b == last - 1 ? above : 0);
        if (p == 0) continue;
        const double t = (b - BINS / 2 + 0.5) / u + z;
        const double next =
            codes.round(std::min(std::max(t, double(format.qmin)), double(format.qmax)));
        if (next != code) close();
        code = next;
        mass += q;
        clipped += p;
        bins += 1;
        cost += p * std::log(p);
    }
    close();
    const double total = inside + below + above;
    return lost ? NOT_JUDGED : cost / total + std::log(inside / total);
}

static void range_costs(const RangeCosts& p, int threads) {
    parallel_for(p.rows, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            if (p.first == nullptr) {
                squared_errors(p, row);
                continue;
            }
            for (int64_t i = row * p.candidates; i < (row + 1) * p.candidates; ++i) {
                p.costs[i] = divergence(p.format, p.counts + row * BINS, int(p.first[i]) + BINS / 2,
                                        int(p.last[i]) + BINS / 2, p.unit[i], p.zero_point[i]);
            }
        }
    });
}
