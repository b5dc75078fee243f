// Quantize and pack a matrix straight into the stored layout.

// Rounds a quotient to a type, as torch does when it divides in that type.
template <Type TYPE>
static inline float as_type(float x) {
    if constexpr (TYPE == Type::bf16) {
        uint32_t bits = to_bits(x);
        bits += 0x7fff + ((bits >> 16) & 1);
        return from_bits(bits & 0xffff0000u);
    }
    if constexpr (TYPE == Type::f16) {
        const float magnitude = std::fabs(x) < 131008.0f ? std::fabs(x) : 131008.0f;
        const uint32_t exponent = to_bits(magnitude > 0x1p-14f ? magnitude : 0x1p-14f) & 0x7f800000u;
        const float magic = from_bits(exponent) * (1.5f * 8192);
        return from_bits(to_bits((magnitude + magic) - magic) | (to_bits(x) & 0x80000000u));
    }
    return x;
}

template <Type QUOTIENT>
static void scale_row(float* x, int64_t n, float scale, const float* zero_point, float qmin,
                      float qmax) {
    const float zp = zero_point != nullptr ? *zero_point : 0.0f;
    if (zero_point != nullptr) {
        for (int64_t i = 0; i < n; ++i) {
            const float y = as_type<QUOTIENT>(as_type<QUOTIENT>(x[i] / scale) + zp);
            x[i] = std::min(std::max(y, qmin), qmax);
        }
    } else {
        for (int64_t i = 0; i < n; ++i) {
            x[i] = std::min(std::max(as_type<QUOTIENT>(x[i] / scale), qmin), qmax);
        }
    }
}

static void scale_row(Type quotient, float* x, int64_t n, float scale, const float* zero_point,
                      float qmin, float qmax) {
    switch (quotient) {
        case Type::f32: return scale_row<Type::f32>(x, n, scale, zero_point, qmin, qmax);
        case Type::f16: return scale_row<Type::f16>(x, n, scale, zero_point, qmin, qmax);
        case Type::bf16: return scale_row<Type::bf16>(x, n, scale, zero_point, qmin, qmax);
    }
}

template <int MANTISSA, int MIN_EXPONENT, int SIGN_BIT>
static void float_codes(const float* row, int64_t n, uint8_t* codes) {
    const float least_normal = std::ldexp(1.0f, MIN_EXPONENT);
    const float step = std::ldexp(1.0f, MIN_EXPONENT - MANTISSA);
    for (int64_t i = 0; i < n; ++i) {
        const float magnitude = std::fabs(row[i]);
        const uint32_t exponent =
            to_bits(magnitude > least_normal ? magnitude : least_normal) & 0x7f800000u;
        const float magic = from_bits(exponent) * (1.5f * float(1 << (23 - MANTISSA)));
        const float rounded = (magnitude + magic) - magic;
        // a normal number's top bits are its code, counted from the least normal exponent
        const int32_t normal = int32_t(to_bits(rounded) >> (23 - MANTISSA)) -
                               int32_t(uint32_t(MIN_EXPONENT + 126) << MANTISSA);
        const int32_t subnormal = int32_t(rounded / step);
        const int32_t sign = int32_t(to_bits(row[i]) >> 31) << SIGN_BIT;
        codes[i] = uint8_t((rounded < least_normal ? subnormal : normal) | sign);
    }
}

static void int_codes(const float* row, int64_t n, int32_t offset, uint8_t* codes) {
    for (int64_t i = 0; i < n; ++i) {
        codes[i] = uint8_t(int32_t((row[i] + 12582912.0f) - 12582912.0f) + offset);
    }
}

static void pack_nibbles(const uint8_t* codes, int64_t bytes, uint8_t* out) {
    for (int64_t i = 0; i < bytes; ++i) {
        const uint32_t pair = uint32_t(codes[2 * i]) | uint32_t(codes[2 * i + 1]) << 4;
        out[i] = uint8_t(pair);
    }
}

// Packs values of `bits` bits densely, low first, across byte boundaries.
static int64_t pack_bits(const uint8_t* codes, int64_t n, int bits, uint8_t* out) {
    uint32_t pending = 0;
    int held = 0;
    int64_t written = 0;
    for (int64_t i = 0; i < n; ++i) {
        pending |= uint32_t(codes[i]) << held;
        held += bits;
        while (held >= 8) {
            out[written++] = uint8_t(pending);
            pending >>= 8;
            held -= 8;
        }
    }
    if (held > 0) out[written++] = uint8_t(pending);
    return written;
}

// Sum of (reconstructed - x)^2, given x and what it was scaled to.
static double squared_error(const float* x, const float* scaled, int64_t n, const Rounding& r,
                            float scale, float zero_point) {
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += CHECK_EVERY) {
        const int64_t end = std::min(n, begin + CHECK_EVERY);
        vf part = {};
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) {
            const vf y = load(scaled + i);
            const vf q = r.is_int ? round_int(y) : round_float(y, r.smallest_normal, r.magic);
            const vf d = (q - zero_point) * scale - load(x + i);
            part += d * d;
        }
        total += sum(part);
        for (; i < end; ++i) {
            const vf y = splat(scaled[i]);
            const vf q = r.is_int ? round_int(y) : round_float(y, r.smallest_normal, r.magic);
            const float d = (q[0] - zero_point) * scale - x[i];
            total += d * d;
        }
    }
    return total;
}

static void pack(const PackProblem& p, int threads) {
    const Format& f = p.format;
    const int64_t across = (p.columns + p.block_columns - 1) / p.block_columns;
    const Type quotient = p.round_quotient ? p.type : Type::f32;
    const Rounding rounding(f);
    parallel_for(p.rows, std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(p.columns, 1)), threads,
                 [&](int64_t begin, int64_t end) {
        std::vector<float> row(p.columns), before(p.errors != nullptr ? p.columns : 0);
        std::vector<uint8_t> codes(p.columns + 32);
        for (int64_t r = begin; r < end; ++r) {
            widen_row(p.data, p.type, r * p.row_stride, p.column_stride, p.columns, row.data());
            if (p.errors != nullptr) {
                std::copy(row.begin(), row.end(), before.begin());
                p.errors[r] = 0;
            }
            for (int64_t b = 0; b < across; ++b) {
                const int64_t block = (r / p.block_rows) * across + b, at = b * p.block_columns;
                const int64_t n = std::min(p.block_columns, p.columns - at);
                const float* zp = p.zero_point != nullptr ? p.zero_point + block : nullptr;
                const float scale = f.has_global ? p.scale[block] / f.global_scale : p.scale[block];
                scale_row(quotient, row.data() + at, n, scale, zp, f.qmin, f.qmax);
                if (p.errors != nullptr) {
                    p.errors[r] += squared_error(before.data() + at, row.data() + at, n, rounding,
                                                 scale, zp != nullptr ? *zp : 0.0f);
                }
            }
            if (p.out == nullptr) continue;
            uint8_t* out = p.out + r * p.out_row_bytes;
            int64_t written = p.columns;
            if (p.layout == Layout::bytes && f.is_int) {
                int_codes(row.data(), p.columns, 0, out);
            } else if (p.layout == Layout::bytes) {
                float_codes<3, -6, 7>(row.data(), p.columns, out);
            } else if (p.layout == Layout::nibbles) {
                float_codes<1, 0, 3>(row.data(), p.columns, codes.data());
                written = p.columns / 2;
                pack_nibbles(codes.data(), written, out);
            } else {
                int_codes(row.data(), p.columns, 1 << (p.num_bits - 1), codes.data());
                if (p.num_bits == 4 && p.columns % 2 == 0) {
                    written = p.columns / 2;
                    pack_nibbles(codes.data(), written, out);
                } else if (p.num_bits == 8) {
                    std::copy(codes.begin(), codes.begin() + p.columns, out);
                } else {
                    written = pack_bits(codes.data(), p.columns, p.num_bits, out);
                }
            }
            std::fill(out + written, out + p.out_row_bytes, 0);
        }
    });
}
