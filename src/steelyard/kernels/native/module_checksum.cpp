// CRC-32 of bytes, as zlib's, by carry-less products.
//
// A CRC is the remainder of the message, a polynomial over GF(2), modulo P of degree 32. So any part
// of the message may be replaced by another with the same remainder: 16 bytes that stand D bits
// before the end of the part are multiplied by x^D modulo P and added to the bytes there. Four
// accumulators fold 64 bytes at a time; what is left are 16 bytes and the rest of the message, which
// go through the definition, byte by byte.
//
// Bits are reflected: the lowest of a byte is its highest power. Of 16 bytes, the first eight then
// are the higher half, and a product of two reflected numbers is off by one bit, hence the shift.

#include <cstdint>
#include <cstring>
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "module.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define STEELYARD_FOLDS 1
#include <immintrin.h>
#else
#define STEELYARD_FOLDS 0
#endif

namespace nb = nanobind;

namespace steelyard {

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr uint32_t POLYNOMIAL = 0xedb88320u;
constexpr size_t AT_ONCE = 64;

#if STEELYARD_FOLDS

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? POLYNOMIAL : 0); }

// x^n modulo P, as a factor of a product
constexpr uint64_t power(int n) {
    uint32_t found = 1u << 31;
    for (int i = 0; i < n; ++i) found = times_x(found);
    return uint64_t(found) << 1;
}

uint32_t by_definition(uint32_t crc, const uint8_t* bytes, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
    }
    return crc;
}

__attribute__((target("pclmul,sse2"))) inline __m128i folded(__m128i part, __m128i powers, __m128i onto) {
    const __m128i high = _mm_clmulepi64_si128(part, powers, 0x00);
    const __m128i low = _mm_clmulepi64_si128(part, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(high, low), onto);
}

__attribute__((target("pclmul,sse2"))) inline __m128i read(const uint8_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// crc: the register, which zlib inverts before and after; count is at least AT_ONCE
__attribute__((target("pclmul,sse2"))) uint32_t by_folding(uint32_t crc, const uint8_t* bytes, size_t count) {
    const __m128i far = _mm_set_epi64x(int64_t(power(512 - 32)), int64_t(power(512 + 32)));
    const __m128i near = _mm_set_epi64x(int64_t(power(128 - 32)), int64_t(power(128 + 32)));
    __m128i parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = read(bytes + 16 * i);
    parts[0] = _mm_xor_si128(parts[0], _mm_cvtsi32_si128(int32_t(crc)));
    size_t at = AT_ONCE;
    for (; at + AT_ONCE <= count; at += AT_ONCE) {
        for (int i = 0; i < 4; ++i) parts[i] = folded(parts[i], far, read(bytes + at + 16 * i));
    }
    for (int i = 1; i < 4; ++i) parts[i] = folded(parts[i - 1], near, parts[i]);
    uint8_t last[16];
    std::memcpy(last, &parts[3], sizeof last);
    return by_definition(by_definition(0, last, sizeof last), bytes + at, count - at);
}

#endif

std::optional<uint32_t> crc32(const Bytes& bytes, uint32_t crc) {
#if STEELYARD_FOLDS
    if (bytes.size() < AT_ONCE || !__builtin_cpu_supports("pclmul")) return std::nullopt;
    nb::gil_scoped_release release;
    return ~by_folding(~crc, bytes.data(), bytes.size());
#else
    (void)bytes, (void)crc;
    return std::nullopt;
#endif
}

}  // namespace

void bind_checksum(nb::module_& m) {
    m.def("crc32", &crc32, nb::arg("bytes"), nb::arg("crc"),
          "Return zlib's CRC-32 of bytes that follow those with a given one; None for few bytes, or where this "
          "processor has no carry-less products.");
}

}  // namespace steelyard
