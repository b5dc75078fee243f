// The kernels that products of bf16 pairs are worth a build for; all others are those of AVX-512.
#if defined(__x86_64__)
#define VECTOR_BYTES 64
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "api.h"
#include "threads.h"

namespace steelyard {
namespace avx512_bf16 {
namespace {

#include "simd.inl"

#include "types.inl"

#include "products.inl"

#include "attention.inl"

}  // namespace
}  // namespace avx512_bf16

void products_of_pairs(const ProductProblem& p) { avx512_bf16::products(p); }

void attention_of_pairs(const AttentionProblem& p, int threads) { avx512_bf16::attention(p, threads); }

}  // namespace steelyard
#endif
