// From ranges to stored scales: the same arithmetic, in the same order, as kernels/qparams.py.

static inline float store_bf16(float x) {
    uint32_t bits = to_bits(x);
    bits += 0x7fff + ((bits >> 16) & 1);
    bits &= 0xffff0000u;
    bits = bits >= 0x7f800000u ? 0x7f7f0000u : bits;  // the largest finite one
    return from_bits(bits == 0 ? 0x00010000u : bits);
}

// Nearest number of a small float type, ties to even, for x >= 0; at least its least subnormal.
static inline float store_small(float x, int mantissa, int min_exponent, float largest) {
    const float clamped = x < largest ? x : largest;
    const float floor = std::ldexp(1.0f, min_exponent);
    const uint32_t exponent = to_bits(clamped > floor ? clamped : floor) & 0x7f800000u;
    const float magic = from_bits(exponent) * (1.5f * float(1 << (23 - mantissa)));
    const float rounded = (clamped + magic) - magic;
    const float least = std::ldexp(1.0f, min_exponent - mantissa);
    return rounded == 0 ? least : rounded;
}

static inline float power_of_two(int code) {  // 2^(code - 127), code in [0, 254]
    return code == 0 ? from_bits(0x00400000u) : from_bits(uint32_t(code) << 23);
}

static inline float store_scale(float ideal, ScaleType type) {
    switch (type) {
        case ScaleType::bf16: return store_bf16(ideal);
        case ScaleType::f16: return store_small(ideal, 10, -14, 65504.0f);
        case ScaleType::e4m3: return store_small(ideal, 3, -6, 448.0f);
        case ScaleType::f32:
            if (ideal > 3.4028234e38f) return 3.4028234e38f;
            return ideal == 0 ? from_bits(1) : ideal;
        case ScaleType::e8m0: break;  // made from the range, not from an ideal scale
    }
    return ideal;
}

static inline float scale_epsilon(ScaleType type) {
    switch (type) {
        case ScaleType::f32: return 1.1920929e-07f;
        case ScaleType::f16: return 0.0009765625f;
        case ScaleType::bf16: return 0.0078125f;
        default: return 0.125f;
    }
}

struct Candidate {
    float stored, effective, zero_point;
};

static inline float mx_scale(float absmax, const Format& f) {
    const int exponent = int(((to_bits(absmax) + f.mx_round_bit) & 0x7f800000u) >> 23);
    return power_of_two(std::max(exponent - f.mx_offset, 0));
}

static inline float zero_point_for(float low, float effective, const Format& f) {
    float zp = f.qmin - low / effective;
    zp = zp < f.qmin ? f.qmin : (zp > f.qmax ? f.qmax : zp);
    return std::nearbyint(zp);
}

// low <= 0 <= high
static inline Candidate candidate(float low, float high, const Format& f) {
    const float absmax = std::max(-low, high);
    const float half = absmax > 3.4028234e38f / 4 ? 0.5f : 1.0f;
    const float span = f.qmax - f.qmin;
    Candidate c;
    if (f.scale == ScaleType::e8m0) {
        c.stored = std::min(mx_scale(absmax * half, f) / half, 1.7014118e38f);
    } else if (absmax == 0) {
        c.stored = scale_epsilon(f.scale);
    } else {
        float ideal = f.symmetric ? absmax * half / (span / 2) : (high * half - low * half) / span;
        if (f.has_global) ideal = f.global_scale * ideal;
        if (ideal == 0) ideal = 1.1920929e-07f;  // as compressed-tensors does before it is stored
        c.stored = store_scale(ideal / half, f.scale);
    }
    c.effective = f.has_global ? c.stored / f.global_scale : c.stored;
    c.zero_point = f.symmetric ? 0.0f : zero_point_for(low, c.effective, f);
    return c;
}

// Rounds ideal scales, neither tiny nor huge, to what `type` stores.
static inline vf store_scales(vf scale, ScaleType type) {
    switch (type) {
        case ScaleType::bf16: {
            const vi bits = (vi)scale;
            return (vf)((bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000);
        }
        case ScaleType::f16:
            scale = round_float(vmin(scale, splat(65504.0f)), 6.103515625e-05f, 1.5f * 8192);
            return vmax(scale, splat(5.9604645e-08f));
        case ScaleType::e4m3:
            scale = round_float(vmin(scale, splat(448.0f)), 0.015625f, 1.5f * 1048576);
            return vmax(scale, splat(0.001953125f));
        default: return scale;
    }
}

// All candidates of a group at once; arrays are padded to whole vectors. low <= 0 <= high
static void make_candidates(float low, float high, const float* factors, int count, const Format& f,
                            float* effective, float* zero_points) {
    const float absmax = std::max(-low, high);
    if (absmax < 1e-30f || absmax > 1e30f) {
        for (int i = 0; i < count; ++i) {
            const Candidate c = candidate(low * factors[i], high * factors[i], f);
            effective[i] = c.effective;
            zero_points[i] = c.zero_point;
        }
        return;
    }
    const float span = f.qmax - f.qmin;
    for (int i = 0; i < count; i += LANES) {
        const vf p = load(factors + i);
        vf scale;
        if (f.scale == ScaleType::e8m0) {
            const vi exponent = (((vi)(p * absmax) + (int32_t)f.mx_round_bit) >> 23) - f.mx_offset;
            scale = (vf)((exponent > 1 ? exponent : (vi){} + 1) << 23);
        } else {
            scale = f.symmetric ? p * absmax / (span / 2) : (rounded(p * high) - rounded(p * low)) / span;
            if (f.has_global) scale = scale * f.global_scale;
            scale = store_scales(scale, f.scale);
            if (f.has_global) scale = scale / f.global_scale;
        }
        std::memcpy(effective + i, &scale, sizeof scale);
        if (!f.symmetric) {
            const vf zp = vmin(vmax(f.qmin - p * low / scale, splat(f.qmin)), splat(f.qmax));
            const vf whole = round_int(zp);
            std::memcpy(zero_points + i, &whole, sizeof whole);
        }
    }
}

static inline uint16_t half_bits(float x) {  // of a positive number that fp16 holds
    const uint32_t normal = (to_bits(x) >> 13) - (112u << 10);
    const uint32_t subnormal = uint32_t(int32_t(x * 0x1p24f));
    return uint16_t(x < 0x1p-14f ? subnormal : normal);
}

static void write_scales(const float* scale, int64_t n, Type type, void* out, int64_t at) {
    uint16_t* halves = static_cast<uint16_t*>(out) + at;
    switch (type) {
        case Type::f32: std::copy(scale, scale + n, static_cast<float*>(out) + at); break;
        case Type::f16: for (int64_t i = 0; i < n; ++i) halves[i] = half_bits(scale[i]); break;
        case Type::bf16:
            for (int64_t i = 0; i < n; ++i) halves[i] = uint16_t(to_bits(scale[i]) >> 16);
            break;
    }
}

// Stored parameters of many ranges.
static void qparams(const QparamsProblem& p, int threads) {
    constexpr int64_t TILE = 512;
    const Format& f = p.format;
    const float span = f.qmax - f.qmin;
    parallel_for((p.count + TILE - 1) / TILE, 32, threads, [&](int64_t first, int64_t last) {
        float scales[TILE], zero_points[TILE];
        for (int64_t at = first * TILE; at < std::min(last * TILE, p.count); at += TILE) {
            const int64_t n = std::min(TILE, p.count - at);
            const int64_t whole = n / LANES * LANES;
            const float *low = p.min_vals + at, *high = p.max_vals + at;
            vf largest = {}, least = splat(1.0f);
            for (int64_t i = 0; i < whole; i += LANES) {
                const vf absmax = vmax(-load(low + i), load(high + i));
                largest = vmax(largest, absmax);
                least = vmin(least, absmax > 0 ? absmax : splat(1.0f));
            }
            bool ordinary = true;  // neither tiny nor huge
            for (int i = 0; i < LANES; ++i) ordinary &= largest[i] <= 1e30f && least[i] >= 1e-30f;
            for (int64_t i = 0; ordinary && i < whole; i += LANES) {
                const vf a = vmin(load(low + i), vf{}), b = vmax(load(high + i), vf{});
                const vf absmax = vmax(-a, b);
                vf scale;
                if (f.scale == ScaleType::e8m0) {
                    const vi exponent = (((vi)absmax + (int32_t)f.mx_round_bit) >> 23) - f.mx_offset;
                    scale = (vf)(exponent > 0 ? exponent << 23 : vi{} + 0x00400000);
                } else {
                    scale = f.symmetric ? absmax / (span / 2) : (b - a) / span;
                    if (f.has_global) scale = scale * f.global_scale;
                    scale = store_scales(scale, f.scale);
                    scale = absmax > 0 ? scale : splat(scale_epsilon(f.scale));
                }
                std::memcpy(scales + i, &scale, sizeof scale);
                if (!f.symmetric) {
                    const vf effective = f.has_global ? scale / f.global_scale : scale;
                    const vf zp = round_int(
                        vmin(vmax(f.qmin - a / effective, splat(f.qmin)), splat(f.qmax)));
                    std::memcpy(zero_points + i, &zp, sizeof zp);
                }
            }
            for (int64_t i = ordinary ? whole : 0; i < n; ++i) {
                const Candidate c = candidate(std::min(low[i], 0.0f), std::max(high[i], 0.0f), f);
                scales[i] = c.stored;
                zero_points[i] = c.zero_point;
            }
            write_scales(scales, n, p.scale_type, p.scale, at);
            if (p.zero_point != nullptr) std::copy(zero_points, zero_points + n, p.zero_point + at);
        }
    });
}
