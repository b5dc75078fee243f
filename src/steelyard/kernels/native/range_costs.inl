// What a histogram loses with given parameters; kernels/range_costs.py defines the costs.

constexpr double NOT_JUDGED = std::numeric_limits<double>::max();

struct CodeErrors {
    const Format& f;
    const double norm, cell;  // power of the errors, and the integral over the values of one code

    CodeErrors(const Format& format, double power)
        : f(format), norm(power), cell(2 * std::pow(0.5, power + 1) / (power + 1)) {}

    double step(double a) const {  // distance of neighbouring codes at a >= 0
        const int exponent = a > 0 ? std::max(std::ilogb(a), f.min_exponent) : f.min_exponent;
        return std::ldexp(1.0, exponent - f.mantissa);
    }
    double round(double code) const {
        if (f.is_int) return std::nearbyint(code);
        const double h = step(std::fabs(code));
        return std::nearbyint(code / h) * h;
    }
    double raised(double a) const {  // a^(norm + 1)
        if (norm == 2) return a * a * a;
        return norm == 1 ? a * a : std::pow(a, norm + 1);
    }
    // Integral of the error from 0 to code, rounded within the range and clipped beyond it.
    double integral(double code) const {
        const double inside = std::min(std::max(code, double(f.qmin)), double(f.qmax));
        return (f.is_int ? area(inside) : of_floats(inside)) + power(code - inside);
    }

  private:
    double power(double d) const {
        const double found = raised(std::fabs(d)) / (norm + 1);
        return d < 0 ? -found : found;
    }
    double area(double scaled) const {
        const double whole = std::nearbyint(scaled);
        return whole * cell + power(scaled - whole);
    }
    double of_floats(double code) const {
        const double a = std::fabs(code), h = step(a), cells = std::ldexp(cell, f.mantissa);
        const double first = std::ldexp(1.0, f.min_exponent - f.mantissa);
        double found = raised(h) * area(a / h);
        if (h > first) {
            found += cells * (2 * raised(first) - raised(h));
            for (double lower = 2 * first; lower < h; lower *= 2) found += cells * raised(lower);
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

static void errors_of(const RangeCosts& p, int64_t row) {
    const CodeErrors codes(p.format, p.norm);
    const std::vector<FilledBin> bins = outermost_first(p.counts + row * BINS);
    double best = NOT_JUDGED;
    for (int64_t i = row * p.candidates; i < (row + 1) * p.candidates; ++i) {
        const double u = p.unit[i], z = p.zero_point[i], unit = codes.raised(u);
        double cost = 0;
        for (const FilledBin& bin : bins) {
            const double low = codes.integral(bin.place / u + z);
            cost += bin.count * (codes.integral((bin.place + 1) / u + z) - low) * unit;
            if (cost > best) break;  // clipped values alone may cost more than the best candidate
        }
        p.costs[i] = cost > best ? NOT_JUDGED : cost;
        best = std::min(best, cost);
    }
}

// The filled bins in order, and the counts before each of them.
struct Filled {
    std::vector<FilledBin> bins;
    std::vector<double> before{0};

    explicit Filled(const int64_t* counts) {
        for (int b = 0; b < BINS; ++b) {
            if (counts[b] == 0) continue;
            bins.push_back({b - BINS / 2, double(counts[b])});
            before.push_back(before.back() + double(counts[b]));
        }
    }
    size_t at_or_above(int place) const {
        auto less = [](const FilledBin& bin, int value) { return bin.place < value; };
        return std::lower_bound(bins.begin(), bins.end(), place, less) - bins.begin();
    }
};

static double divergence(const CodeErrors& codes, const Filled& filled, int first, int last, double u,
                         double z) {
    const size_t begin = filled.at_or_above(first), end = filled.at_or_above(last);
    const double below = filled.before[begin], above = filled.before.back() - filled.before[end];
    double cost = 0, code = 0, mass = 0, bins = 0, clipped = 0;  // the last three of one code
    bool lost = false;
    auto close = [&] {
        if (bins == 0) return;
        if (mass == 0) lost = true;
        else cost -= clipped * std::log(mass / bins);
        mass = bins = clipped = 0;
    };
    auto add = [&](int place, double q) {
        const double p = q + (place == first ? below : 0) + (place == last - 1 ? above : 0);
        if (p == 0) return;
        const double t = (place + 0.5) / u + z;
        const double next = codes.round(std::min(std::max(t, double(codes.f.qmin)), double(codes.f.qmax)));
        if (next != code) close();
        code = next;
        mass += q;
        clipped += p;
        bins += 1;
        cost += p * std::log(p);
    };
    // the outermost bins may be filled only by what is clipped
    if (begin == end || filled.bins[begin].place != first) add(first, 0);
    for (size_t i = begin; i < end; ++i) add(filled.bins[i].place, filled.bins[i].count);
    if (last - 1 > first && (begin == end || filled.bins[end - 1].place != last - 1)) add(last - 1, 0);
    close();
    const double total = filled.before.back(), inside = total - below - above;
    return lost ? NOT_JUDGED : cost / total + std::log(inside / total);
}

static void range_costs(const RangeCosts& p, int threads) {
    parallel_for(p.rows, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            if (p.first == nullptr) {
                errors_of(p, row);
                continue;
            }
            const CodeErrors codes(p.format, p.norm);
            const Filled filled(p.counts + row * BINS);
            for (int64_t i = row * p.candidates; i < (row + 1) * p.candidates; ++i) {
                p.costs[i] = divergence(codes, filled, int(p.first[i]), int(p.last[i]), p.unit[i],
                                        p.zero_point[i]);
            }
        }
    });
}
