// Counts values in bins of equal width, half of them on each side of zero; kernels/bin_counts.py
// defines the bins.
//
// Neighbouring values often fall into one bin, and an increment waits for the one before it at the
// same address. So neighbours go to different tables, small enough to stay in the first cache, and
// these are added up before a 16-bit count can overflow.

constexpr int COUNT_TABLES = 4;

struct CountTables {
    static constexpr int64_t LIMIT = 65535;  // values, even if all are in one bin of one table
    uint16_t count[COUNT_TABLES][BINS];

    void clear() { std::memset(count, 0, sizeof count); }
    void add_to(int64_t* to) const {
        for (int b = 0; b < BINS; ++b) {
            int64_t sum = 0;
            for (int t = 0; t < COUNT_TABLES; ++t) sum += count[t][b];
            to[b] += sum;
        }
    }
};

// Bin of each value: truncated towards zero, and mirrored where it is negative.
static void bins_of(const float* x, int64_t n, float inverse, int32_t* bins) {
    for (int64_t i = 0; i < n; ++i) {
        const int32_t place = int32_t(std::fabs(x[i]) * inverse);
        bins[i] = (place ^ -int32_t(x[i] < 0)) + BINS / 2;
    }
}

// Adds elements [begin, end) of group g to `to`; with rows, those of the observations listed there.
static void count_part(const View& v, const int64_t* rows, int64_t g, int64_t begin, int64_t end,
                       float inverse, int64_t* to) {
    constexpr int64_t STEP = 1024;
    float x[STEP];
    int32_t bins[STEP];
    const bool few = end - begin < 2 * BINS;
    CountTables tables;
    if (!few) tables.clear();
    int64_t held = 0;
    const int64_t width = v.group_size() / v.size[0];
    int64_t n = 0;
    for (int64_t i = begin; i < end; i += n) {
        n = std::min(STEP, end - i);
        int64_t from = i;
        if (rows != nullptr) {
            n = std::min(n, width - i % width);
            from = rows[i / width] * width + i % width;
        }
        gather(v, g, from, from + n, x);
        bins_of(x, n, inverse, bins);
        if (few) {
            for (int64_t j = 0; j < n; ++j) ++to[bins[j]];
            continue;
        }
        if (held + STEP > CountTables::LIMIT) {
            tables.add_to(to);
            tables.clear();
            held = 0;
        }
        held += STEP;
        int64_t j = 0;
        for (; j + COUNT_TABLES <= n; j += COUNT_TABLES) {
            for (int t = 0; t < COUNT_TABLES; ++t) ++tables.count[t][bins[j + t]];
        }
        for (; j < n; ++j) ++tables.count[0][bins[j]];
    }
    if (!few) tables.add_to(to);
}

// histogram: per group, the exponent of the bins' width and BINS counts, which are added to.
// rows: the observations to count, or null for all.
static void histogram(const View& view, const int64_t* rows, int64_t count, int64_t* histogram,
                      int threads) {
    const View v = rows != nullptr ? view : merged(view);
    const int64_t groups = v.groups();
    const int64_t size = rows != nullptr ? count * (v.group_size() / v.size[0]) : v.group_size();
    auto inverse = [&](int64_t g) { return float(std::ldexp(1.0, int(-histogram[g * (1 + BINS)]))); };
    auto counts = [&](int64_t g) { return histogram + g * (1 + BINS) + 1; };
    if (groups > 1) {
        parallel_for(groups, std::max<int64_t>(1, (1 << 16) / size), threads, [&](int64_t begin, int64_t end) {
            for (int64_t g = begin; g < end; ++g) count_part(v, rows, g, 0, size, inverse(g), counts(g));
        });
        return;
    }
    std::mutex adding;
    parallel_for(size, 1 << 18, threads, [&](int64_t begin, int64_t end) {
        std::vector<int64_t> part(BINS);
        count_part(v, rows, 0, begin, end, inverse(0), part.data());
        const std::lock_guard<std::mutex> lock(adding);
        for (int b = 0; b < BINS; ++b) counts(0)[b] += part[b];
    });
}
