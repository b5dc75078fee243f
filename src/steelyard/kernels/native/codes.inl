// The scales that a type can store.

struct Codes {  // the scales that a type can store, in order
    ScaleType type;
    int first, last;
    double halves_above;  // from here on, half of a code is a code

    explicit Codes(ScaleType t) : type(t) {
        switch (t) {
            case ScaleType::f32:  // too many to list: bf16's, and the best is refined
            case ScaleType::bf16: first = 1; last = 0x7f7f; halves_above = 0x1p-125; break;
            case ScaleType::f16: first = 1; last = 0x7bff; halves_above = 0x1p-13; break;
            case ScaleType::e4m3: first = 1; last = 0x7e; halves_above = 0x1p-5; break;
            case ScaleType::e8m0: first = 0; last = 254; halves_above = 0x1p-126; break;
        }
    }

    float value(int code) const {
        switch (type) {
            case ScaleType::f32:
            case ScaleType::bf16: return from_bits(uint32_t(code) << 16);
            case ScaleType::f16: return widen(half_t{uint16_t(code)});
            case ScaleType::e4m3: {
                const int exponent = code >> 3, mantissa = code & 7;
                return exponent == 0 ? mantissa * 0x1p-9f
                                     : (8 + mantissa) * from_bits(uint32_t(exponent + 117) << 23);
            }
            case ScaleType::e8m0: return power_of_two(code);
        }
        return 0;
    }

    int at_or_above(double value_wanted) const {  // `last` where no code is
        int low = first, high = last;
        if (type == ScaleType::bf16 || type == ScaleType::f32) {  // codes are bits of the value
            const int near = int(to_bits(float(std::min(value_wanted, 3.4e38))) >> 16);
            low = std::min(std::max(near - 1, first), last);
            high = std::min(std::max(near + 1, first), last);
        }
        while (low < high) {
            const int middle = low + (high - low) / 2;
            if (value(middle) >= value_wanted) high = middle;
            else low = middle + 1;
        }
        return low;
    }
};
