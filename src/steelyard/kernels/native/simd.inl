// Vectors of floats in the compiler's own notation: one source for every width.

#define LANES (VECTOR_BYTES / 4)

typedef float vf __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

static inline vf splat(float x) { return x - (vf){}; }
static inline vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }

// A product that must be rounded before it is used, not contracted into a multiply-add.
static inline vf rounded(vf a) {
#if defined(__x86_64__)
    asm("" : "+x"(a));
#elif defined(__aarch64__)
    asm("" : "+w"(a));
#endif
    return a;
}

static inline float sum(vf a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)a);
#else
    float part[LANES];
    std::memcpy(part, &a, sizeof a);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) part[i] += part[i + width];
    }
    return part[0];
#endif
}

// Nearest integer, ties to even, for |a| < 2^22.
static inline vf round_int(vf a) {
#if defined(__AVX512F__)
    return (vf)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float magic = 12582912.0f;  // 1.5 * 2^23
    return (a + magic) - magic;
#endif
}

// Nearest number with `mantissa` bits, subnormal below 2^min_exponent, ties to even. The magic
// number is scaled to the value's own exponent, so that adding it drops the bits below the step.
static inline vf round_float(vf a, float smallest_normal, float magic) {
    const vf exponent = (vf)((vi)vmax(vabs(a), splat(smallest_normal)) & 0x7f800000);
    const vf m = exponent * magic;
    return (a + m) - m;
}

// a^power for a >= 0; zero stays (nearly) zero. Built once per power, since that goes into the
// coefficients. The relative error is below 1e-6 and alternates, so that it averages out in a sum.
#if defined(__AVX512F__)
// |a|^power for |a| from 2^-20 to below 2^12, and as at these ends beyond them: the power of two from
// a table, times a polynomial through the power of the mantissa at Chebyshev's points.
struct BoundedPower {
    static constexpr float END = 0x1p12f;
    static constexpr int DEGREE = 5;
    float of_exponent[32], c[DEGREE + 1];
    bool close = true;  // whether the relative error is below 1e-6 here too

    explicit BoundedPower(double p) {
        for (int e = -20; e < 12; ++e) of_exponent[(e + 127) & 31] = float(std::exp2(p * e));
        double at[DEGREE + 1], newton[DEGREE + 1], monomial[DEGREE + 1] = {};
        for (int i = 0; i <= DEGREE; ++i) {
            at[i] = 1.5 + 0.5 * std::cos((i + 0.5) * 3.14159265358979323846 / (DEGREE + 1));
            newton[i] = std::pow(at[i], p);
        }
        for (int k = 1; k <= DEGREE; ++k) {
            for (int i = DEGREE; i >= k; --i) newton[i] = (newton[i] - newton[i - 1]) / (at[i] - at[i - k]);
        }
        for (int k = DEGREE; k >= 0; --k) {  // times (m - at[k]), and the next coefficient
            for (int i = DEGREE; i > 0; --i) monomial[i] = monomial[i - 1] - at[k] * monomial[i];
            monomial[0] = newton[k] - at[k] * monomial[0];
        }
        for (int i = 0; i <= DEGREE; ++i) c[i] = float(monomial[i]);
        for (double m = 1; m < 2; m += 1 / 64.0) {
            float found = c[DEGREE];
            for (int i = DEGREE - 1; i >= 0; --i) found = found * float(m) + c[i];
            close &= std::abs(found / std::pow(m, p) - 1) < 8e-7;
        }
    }

    vf operator()(vf a) const {
        constexpr int LARGER_MAGNITUDE = 11;
        const __m512 above = _mm512_range_ps((__m512)a, _mm512_set1_ps(0x1p-20f), LARGER_MAGNITUDE);
        const __m512 v = _mm512_min_ps(above, _mm512_set1_ps(0x1.fffffep11f));
        const vf m = (vf)_mm512_getmant_ps(v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
        const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(v), 23);  // five bits count
        vf q = splat(c[DEGREE]);
        for (int i = DEGREE - 1; i >= 0; --i) q = q * m + c[i];
        return q * (vf)_mm512_permutex2var_ps(_mm512_loadu_ps(of_exponent), exponent,
                                              _mm512_loadu_ps(of_exponent + 16));
    }
};

// Sixteen entries of a table fit in a register: 1 / c, log2(c) for c near the mantissa, 2^(i / 16).
struct Power {
    float inverse[16], log2_of[16], exp2_of[16], log2_c[3], power;
    BoundedPower bounded;

    explicit Power(float p) : power(p), bounded(p) {
        static constexpr double LOG2_C[3] = {1.4426949415166461, -0.7216213251776091, 0.48127169509464074};
        for (int i = 0; i < 16; ++i) {
            inverse[i] = float(1 / (1 + (i + 0.5) / 16));
            log2_of[i] = float(-std::log2(double(inverse[i])) * p);
            exp2_of[i] = float(std::exp2(i / 16.0));
        }
        for (int i = 0; i < 3; ++i) log2_c[i] = float(LOG2_C[i] * p);
    }

    vf operator()(vf a) const {
        constexpr float EXP2_C[3] = {0.9999999977068046f, 0.693187833758281f, 0.2402382480422087f};
        const __m512 v = (__m512)vmax(a, splat(1e-30f));
        const vf exponent = (vf)_mm512_getexp_ps(v);
        const vf mantissa = (vf)_mm512_getmant_ps(v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
        const __m512i place = (__m512i)((vi)v >> 19);  // only four bits of it count
        const vf t = mantissa * at(inverse, place) - 1.0f;
        const vf logarithm = (log2_c[2] * t + log2_c[1]) * t + log2_c[0];
        const vf x = logarithm * t + (exponent * power + at(log2_of, place));
        const vf shifted = x + 786432.0f;  // 1.5 * 2^19: the last bits count sixteenths
        const vf whole = shifted - 786432.0f;
        const vf f = x - whole;
        const vf q = ((EXP2_C[2] * f + EXP2_C[1]) * f + EXP2_C[0]) * at(exp2_of, (__m512i)shifted);
        return (vf)_mm512_scalef_ps((__m512)q, (__m512)whole);
    }

  private:
    static vf at(const float* table, __m512i place) {
        return (vf)_mm512_permutexvar_ps(place, _mm512_loadu_ps(table));
    }
};
#else
struct NoBoundedPower {
    static constexpr float END = 0;
    static constexpr bool close = false;
    vf operator()(vf a) const { return a; }
};

struct Power {
    float log2_c[8], power;
    NoBoundedPower bounded;

    explicit Power(float p) : power(p) {
        // log2(1 + t) / t for t in [sqrt(1/2) - 1, sqrt(2) - 1]
        static constexpr double LOG2_C[8] = {1.442694902420044,   -0.721352756023407,
                                             0.4809240400791168,  -0.36024197936058044,
                                             0.28707560896873474, -0.24882180988788605,
                                             0.2342098504304886,  -0.14620353281497955};
        for (int i = 0; i < 8; ++i) log2_c[i] = float(LOG2_C[i] * p);
    }

    vf operator()(vf a) const {
        const vi bits = (vi)vmax(a, splat(1e-30f));
        const vi shifted = bits - 0x3f3504f3;  // mantissa into [sqrt(1/2), sqrt(2))
        const vf exponent = __builtin_convertvector(shifted >> 23, vf);
        const vf t = (vf)(bits - (shifted & (int32_t)0xff800000)) - 1.0f;
        vf p = splat(log2_c[7]);
        for (int i = 6; i >= 0; --i) p = p * t + log2_c[i];
        return exp2(p * t + exponent * power);
    }

  private:
    static vf exp2(vf x) {  // fraction in [-1/2, 1/2] through a polynomial
        constexpr float C[6] = {1.0000001192092896f,   0.6931471824645996f,
                                0.2402210682630539f,   0.05550327152013779f,
                                0.009676037356257439f, 0.0013400432653725147f};
        x = vmin(vmax(x, splat(-126.0f)), splat(127.99f));  // beyond it the exponent would wrap
        const vf shifted = x + 12582912.0f;
        const vf fraction = x - (shifted - 12582912.0f);
        vf q = splat(C[5]);
        for (int i = 4; i >= 0; --i) q = q * fraction + C[i];
        return (vf)((vi)q + ((vi)shifted << 23));
    }
};
#endif
