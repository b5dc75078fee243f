// Everything that is compiled once per instruction set, inside a namespace of its own.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "api.h"
#include "threads.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace steelyard {
namespace STEELYARD_ISA {
namespace {

#include "simd.inl"

#include "types.inl"

#include "gather.inl"

#include "scales.inl"

#include "range.inl"

#include "histogram.inl"

#include "range_costs.inl"

#include "search.inl"

#include "codes.inl"

#include "group_error.inl"

#include "lane_sums.inl"

#include "scale_bounds.inl"

#include "optimal.inl"

#include "pack.inl"

#include "tiles.inl"

#include "cholesky.inl"

#include "solutions.inl"

#include "gptq.inl"

#include "refine.inl"

#if VECTOR_BYTES > 16  // below that, torch's products are faster
#include "products.inl"
#else
constexpr void (*products)(const ProductProblem&) = nullptr;
#endif

}  // namespace
}  // namespace STEELYARD_ISA

const Table JOIN(STEELYARD_ISA, _table) = {
    TEXT(STEELYARD_ISA),    STEELYARD_ISA::range,       STEELYARD_ISA::qparams, STEELYARD_ISA::search,
    STEELYARD_ISA::optimal, STEELYARD_ISA::sum_squares, STEELYARD_ISA::pack,
    STEELYARD_ISA::cholesky, STEELYARD_ISA::columns, STEELYARD_ISA::gptq, STEELYARD_ISA::squared_lengths,
    STEELYARD_ISA::refine, STEELYARD_ISA::solve, STEELYARD_ISA::quadratic_forms,
    STEELYARD_ISA::weighted_squares, STEELYARD_ISA::products, nullptr,
    STEELYARD_ISA::histogram,  STEELYARD_ISA::range_costs,
};

}  // namespace steelyard
