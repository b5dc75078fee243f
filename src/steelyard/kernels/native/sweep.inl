// The error of a group at every scale of an interval, for symmetric integers and the norms 2 and 3.
//
// As long as no value changes its code, the error is a polynomial of the scale s: the sum over
// values of weight * (a - s k)^2, or of +-weight * (a - s k)^3, with a the magnitude of the value and
// k that of its code. As s falls, a value gets code k instead of k - 1 at s = a / (k - 1/2), and its
// difference changes sign at s = a / k. Each of these steps adds a polynomial to the one of the group.
// So the steps are added to the bin of the scale where they happen, and one sum over the bins gives
// the error at every scale: a few additions per value instead of a pass over the group per scale.
//
// Steps are placed with an accuracy of fp32, and sums are fp64. A step that is misplaced changes the
// error of its value by some 1e-6 of it, since both codes are as good there.

template <int NORM>
struct MomentsOf {
    typedef double Vector __attribute__((vector_size(NORM == 2 ? 16 : 32), aligned(8), may_alias));
};

// A step of one value, as a number: bin, step and lane.
static constexpr int STEP_AT = 4, BIN_AT = 11;

// Appends the lanes whose code is in [low, low + count) to a list.
static inline int append_inside(vi code, int low, int count, int step, int32_t* list) {
    const vi bin = code - low;
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 inside = _mm512_cmplt_epu32_mask((__m512i)bin, _mm512_set1_epi32(count));
    const __m512i entry = (__m512i)((bin << BIN_AT) + (step << STEP_AT) + (vi)lanes);
    _mm512_storeu_si512(list, _mm512_maskz_compress_epi32(inside, entry));
    return __builtin_popcount(inside);
#else
    int listed = 0;
    for (int lane = 0; lane < LANES; ++lane) {
        list[listed] = int32_t(uint32_t(bin[lane]) << BIN_AT) + (step << STEP_AT) + lane;
        listed += uint32_t(bin[lane]) < uint32_t(count);
    }
    return listed;
#endif
}

// NORM 2: moments are {w a, w}, and the error is `size` + s * sum[0] + s^2 * sum[1].
// NORM 3: moments are {w a^3, w a^2, w a, w}, and it is sum[0] + s * sum[1] + s^2 * sum[2] + s^3 * sum[3].
template <int NORM>
class Sweep {
  public:
    std::vector<double> errors;  // by code, from the lowest
    double size = 0;             // the error if all were rounded to zero

    explicit Sweep(const Codes& codes_) : codes(codes_) {}

    // Adds the steps that scales of either sign have; low, high: first and last code of the interval.
    void begin(const Group& group, bool weighted, const Rounding& r, int low_, int high_) {
        low = low_;
        high = high_;
        x = group.x.data();
        n = group.padded;
        common = STEPS * int(std::min(r.qmax, -r.qmin));
        all = STEPS * int(std::max(r.qmax, -r.qmin));
        longer = -r.qmin > r.qmax ? -1 : 1;
        prepare(group, weighted);
        for (int64_t i = 0; i < n; i += LANES) {
            const vf a = vabs(load(x + i));
            vi passed = {};
            int listed = 0;
            for (int step = 1; step <= common; ++step) {
                const vi code = code_below(a * inverse[step]);
                passed -= (vi)(code >= high);  // true is -1
                listed += append_inside(code, low, high - low, step, list.data() + listed);
            }
            add(shared, i, listed);
            for (int lane = 0; lane < LANES; lane += 2) {
                first += *at(polynomial, passed[lane]) * *at(moments, i + lane);
                second += *at(polynomial, passed[lane + 1]) * *at(moments, i + lane + 1);
            }
        }
    }

    // Computes `errors` for scales of a sign; returns the least of codes from `from` to `to`.
    double finish(int sign, int from, int to) {
        sums = shared;
        const float side = float(sign * longer);
        const vi last = (vi){} + high;
        for (int64_t i = 0; i < n; i += LANES) {
            const vf a = vmax(load(x + i) * side, vf{});
            int listed = 0;
            for (int step = common + 1; step <= all; ++step) {
                const vi code = code_below(a * inverse[step]);
                listed += append_inside(code < last ? code : last, low, high - low + 1, step,
                                        list.data() + listed);
            }
            add(sums, i, listed);
        }
        Moments sum = first + second;
        int code = high;
        for (; code > low; code -= 2) {  // two at a time: one addition waits for the other
            const Moments here = *at(sums, code - low), next = here + *at(sums, code - 1 - low);
            *at(sums, code - low) = sum + here;
            sum += next;
            *at(sums, code - 1 - low) = sum;
        }
        if (code == low) *at(sums, 0) += sum;
        double least = NO_LIMIT;
        for (int i = from - low; i <= to - low; ++i) {
            const double s = scales[i], *m = sums.data() + i * WIDTH;
            double found;
            if constexpr (NORM == 2) found = size + s * (m[0] + s * m[1]);
            else found = m[0] + s * (m[1] + s * (m[2] + s * m[3]));
            errors[i] = found;
            least = found < least ? found : least;
        }
        return least;
    }

    double error(int code) const { return errors[code - low]; }

  private:
    using Moments = typename MomentsOf<NORM>::Vector;
    static constexpr int WIDTH = NORM == 2 ? 2 : 4, STEPS = NORM == 2 ? 1 : 2;  // of a code

    const Codes& codes;
    int low = 0, high = 0, common = 0, all = 0, longer = 1;
    const float* x = nullptr;
    int64_t n = 0;
    Moments first, second;  // of the steps above all codes; two sums, as one waits for the other
    std::vector<double> moments, shared, sums;  // WIDTH for each value, for each code
    std::vector<double> polynomial, change, scales;  // WIDTH for each step; each code
    std::vector<float> inverse;
    std::vector<int32_t> list;

    static Moments* at(std::vector<double>& of, int64_t index) {
        return reinterpret_cast<Moments*>(of.data() + index * WIDTH);
    }

    void add(std::vector<double>& to, int64_t i, int listed) {
        for (int e = 0; e < listed; ++e) {
            const int32_t entry = list[e], lane = entry & 15, step = (entry >> STEP_AT) & 127;
            *at(to, entry >> BIN_AT) += *at(change, step) * *at(moments, i + lane);
        }
    }

    // The last code that is not above r. Codes are bits of the scale: bf16's, or fp16's normal ones.
    vi code_below(vf r) const {
        if (codes.type == ScaleType::f16) return ((vi)r >> 13) - (112 << 10);
        return (vi)r >> 16;
    }

    void prepare(const Group& group, bool weighted) {
        if (polynomial.empty()) prepare_steps();
        moments.resize(n * WIDTH);
        double parts[4] = {};
        for (int64_t i = 0; i < n; ++i) {
            const double a = std::abs(x[i]);
            double* m = moments.data() + i * WIDTH;
            m[WIDTH - 1] = weighted ? group.w[i] : 1.0;
            for (int j = WIDTH - 2; j >= 0; --j) m[j] = m[j + 1] * a;
            parts[i % 4] += NORM == 2 ? m[0] * a : m[0];
        }
        size = parts[0] + parts[1] + parts[2] + parts[3];
        first = second = Moments{};
        const int count = high - low + 1;
        shared.assign(count * WIDTH, 0.0);
        errors.resize(count);
        scales.resize(count);
        if (codes.type == ScaleType::f16) {
            for (int i = 0; i < count; ++i) scales[i] = widen(half_t{uint16_t(low + i)});
        } else {
            for (int i = 0; i < count; ++i) scales[i] = from_bits(uint32_t(low + i) << 16);
        }
    }

    void prepare_steps() {
        for (int step = 0; step <= all; ++step) {
            const double k = NORM == 2 ? step : (step + 1) / 2;
            const double sign = NORM == 3 && step % 2 == 1 ? -1 : 1;  // the code is above the value
            if (NORM == 2) polynomial.insert(polynomial.end(), {-2 * k, k * k});
            else for (double c : {1.0, -3 * k, 3 * k * k, -k * k * k}) polynomial.push_back(sign * c);
            inverse.push_back(step == 0 ? 0 : float(1 / (NORM == 2 ? step - 0.5 : step / 2.0)));
        }
        change = polynomial;
        for (size_t i = WIDTH; i < change.size(); ++i) change[i] -= polynomial[i - WIDTH];
        list.resize((all + 1) * LANES);
    }
};
