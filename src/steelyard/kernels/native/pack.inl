// Quantize and pack a matrix straight into the stored layout.

// Rounds a quotient to the tensor's own type, as torch does when it divides in that type.
static inline float as_type(float x, Type type) {
    if (type == Type::bf16) {
        uint32_t bits = to_bits(x);
        bits += 0x7fff + ((bits >> 16) & 1);
        return from_bits(bits & 0xffff0000u);
    }
    if (type == Type::f16) {
        const float magnitude = std::fabs(x) < 131008.0f ? std::fabs(x) : 131008.0f;
        const uint32_t exponent = to_bits(magnitude > 0x1p-14f ? magnitude : 0x1p-14f) & 0x7f800000u;
        const float magic = from_bits(exponent) * (1.5f * 8192);
        return from_bits(to_bits((magnitude + magic) - magic) | (to_bits(x) & 0x80000000u));
    }
    return x;
}

template <bool ROUND>
static inline void scale_row(float* x, int64_t n, float scale, float zero_point, bool has_zero_point,
                             Type type, float qmin, float qmax) {
    for (int64_t i = 0; i < n; ++i) {
        float y = x[i] / scale;
        if (ROUND) y = as_type(y, type);
        if (has_zero_point) {
            y += zero_point;
            if (ROUND) y = as_type(y, type);
        }
        y = y < qmin ? qmin : y;
        x[i] = y > qmax ? qmax : y;
    }
}

static inline uint8_t float_code(float y, int mantissa, int min_exponent, uint8_t sign_bit) {
    const float magnitude = std::fabs(y);
    const float least_normal = std::ldexp(1.0f, min_exponent);
    const uint32_t exponent = to_bits(magnitude > least_normal ? magnitude : least_normal) & 0x7f800000u;
    const float magic = from_bits(exponent) * (1.5f * float(1 << (23 - mantissa)));
    const float rounded = (magnitude + magic) - magic;
    // a normal number's top bits are its code, counted from the least normal exponent
    const uint32_t normal = (to_bits(rounded) >> (23 - mantissa)) -
                            (uint32_t(min_exponent + 126) << mantissa);
    const uint32_t subnormal = uint32_t(rounded * std::ldexp(1.0f, mantissa - min_exponent));
    const uint8_t code = uint8_t(rounded < least_normal ? subnormal : normal);
    return code | ((to_bits(y) >> 31) ? sign_bit : 0);
}

// Values of `bits` bits, one behind the other, low first, across byte borders.
static void pack_bits(const uint8_t* codes, int64_t n, int bits, uint8_t* out, int64_t bytes) {
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
    std::fill(out + written, out + bytes, 0);
}

static void pack(const PackProblem& p, int threads) {
    const Format& f = p.format;
    const int64_t across = (p.columns + p.block_columns - 1) / p.block_columns;
    parallel_for(p.rows, std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(p.columns, 1)), threads,
                 [&](int64_t begin, int64_t end) {
        std::vector<float> row(p.columns);
        std::vector<uint8_t> codes(p.columns + 32);
        for (int64_t r = begin; r < end; ++r) {
            widen_row(p.data, p.type, r * p.row_stride, p.column_stride, p.columns, row.data());
            const int64_t first = (r / p.block_rows) * across;
            for (int64_t b = 0; b < across; ++b) {
                const int64_t at = b * p.block_columns;
                const int64_t n = std::min(p.block_columns, p.columns - at);
                const float scale = f.has_global ? p.scale[first + b] / f.global_scale : p.scale[first + b];
                const float zp = p.zero_point != nullptr ? p.zero_point[first + b] : 0.0f;
                auto apply = p.round_quotient ? scale_row<true> : scale_row<false>;
                apply(row.data() + at, n, scale, zp, p.zero_point != nullptr, p.type, f.qmin, f.qmax);
            }
            uint8_t* out = p.out + r * p.out_row_bytes;
            if (p.layout == Layout::bytes) {
                if (f.is_int) {
                    for (int64_t i = 0; i < p.columns; ++i) {
                        out[i] = uint8_t(int32_t((row[i] + 12582912.0f) - 12582912.0f));
                    }
                } else {
                    for (int64_t i = 0; i < p.columns; ++i) out[i] = float_code(row[i], 3, -6, 0x80);
                }
            } else if (p.layout == Layout::nibbles) {
                for (int64_t i = 0; i < p.columns; ++i) codes[i] = float_code(row[i], 1, 0, 0x8);
                for (int64_t i = 0; i < p.columns / 2; ++i) {
                    out[i] = uint8_t(codes[2 * i] | (codes[2 * i + 1] << 4));
                }
            } else {
                const int32_t offset = 1 << (p.num_bits - 1);
                for (int64_t i = 0; i < p.columns; ++i) {
                    codes[i] = uint8_t(int32_t((row[i] + 12582912.0f) - 12582912.0f) + offset);
                }
                if (p.num_bits == 4 && p.columns % 2 == 0) {
                    for (int64_t i = 0; i < p.columns / 2; ++i) {
                        out[i] = uint8_t(codes[2 * i] | (codes[2 * i + 1] << 4));
                    }
                    std::fill(out + p.columns / 2, out + p.out_row_bytes, 0);
                } else if (p.num_bits == 8) {
                    std::copy(codes.begin(), codes.begin() + p.columns, out);
                    std::fill(out + p.columns, out + p.out_row_bytes, 0);
                } else {
                    pack_bits(codes.data(), p.columns, p.num_bits, out, p.out_row_bytes);
                }
            }
        }
    });
}
