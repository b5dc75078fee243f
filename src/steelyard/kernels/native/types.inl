// Floats of other types, as bits and widened.

static inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float widen(float x) { return x; }
struct half_t { uint16_t bits; };
struct bfloat_t { uint16_t bits; };
static inline float widen(bfloat_t x) { return from_bits(uint32_t(x.bits) << 16); }
static inline float widen(half_t x) {
    const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
    const float value = from_bits(magnitude) * from_bits(0x77800000u);  // times 2^112
    const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0;  // infinity, NaN
    return from_bits(to_bits(value) | special | (uint32_t(x.bits & 0x8000) << 16));
}
