// The function of attention that Python calls.

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "api.h"
#include "arguments.h"
#include "instruction_sets.h"
#include "module.h"

namespace steelyard {

namespace {

using Mask = nb::ndarray<const bool, nb::ndim<3>, nb::device::cpu>;

Heads heads_of(const Tensor& x, const char* name) {
    if (x.ndim() != 4 || x.stride(3) != 1) {
        throw std::invalid_argument(std::string(name) + " must be (batches, heads, tokens, width), width contiguous");
    }
    return {x.data(), {x.stride(0), x.stride(1), x.stride(2)}};
}

// Which keys each query sees; false if they are no single range.
bool find_ranges(const Mask& mask, std::vector<int64_t>& first, std::vector<int64_t>& last) {
    const size_t keys = mask.shape(2);
    for (size_t i = 0; i < first.size(); ++i) {
        const auto batch = int64_t(i / mask.shape(1)), query = int64_t(i % mask.shape(1));
        const bool* row = mask.data() + batch * mask.stride(0) + query * mask.stride(1);
        const void* seen = std::memchr(row, 1, keys);
        if (seen == nullptr) return false;  // undefined: the average of nothing
        const bool* from = static_cast<const bool*>(seen);
        const void* end = std::memchr(from, 0, keys - (from - row));
        const bool* to = end == nullptr ? row + keys : static_cast<const bool*>(end);
        if (std::memchr(to, 1, keys - (to - row)) != nullptr) return false;
        first[i] = from - row;
        last[i] = to - row;
    }
    return true;
}

// mask: (1 or batches, queries, keys); without it, causal: a query sees keys up to its own place
bool attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Mask>& mask,
               bool causal, double scale, MutableTensor output, const std::string& isa, int threads) {
    AttentionProblem p{};
    p.query = heads_of(query, "query");
    p.key = heads_of(key, "key");
    p.value = heads_of(value, "value");
    p.batches = int64_t(query.shape(0));
    p.heads = int64_t(query.shape(1));
    p.queries = int64_t(query.shape(2));
    p.width = int64_t(query.shape(3));
    p.key_heads = int64_t(key.shape(1));
    p.keys = int64_t(key.shape(2));
    p.value_width = int64_t(value.shape(3));
    p.type = type_of(query);
    p.scale = float(scale);
    if (p.type == Type::f16) throw std::invalid_argument("query must be fp32 or bf16");
    if (type_of(key) != p.type || type_of(value) != p.type || type_of(output) != p.type) {
        throw std::invalid_argument("query, key, value and output must have one type");
    }
    if (p.width % 2 != 0) throw std::invalid_argument("the width of heads must be even");
    if (!(scale > 0)) throw std::invalid_argument("the scale must be positive");
    if (p.key_heads == 0 || p.heads % p.key_heads != 0) {
        throw std::invalid_argument("heads must share keys, as many each");
    }
    require_size(key, p.batches * p.key_heads * p.keys * p.width, "key");
    require_size(value, p.batches * p.key_heads * p.keys * p.value_width, "value");
    require_size(output, p.batches * p.queries * p.heads * p.value_width, "output");
    const int64_t batches = mask ? int64_t(mask->shape(0)) : 1;
    if (batches != 1 && batches != p.batches) throw std::invalid_argument("mask must have one batch, or all");
    std::vector<int64_t> first(batches * p.queries), last(first.size(), p.keys);
    if (mask) {
        require_size(*mask, batches * p.queries * p.keys, "mask");
        if (mask->stride(2) != 1) throw std::invalid_argument("mask must be contiguous over keys");
        if (!find_ranges(*mask, first, last)) return false;
    } else if (causal) {
        for (int64_t i = 0; i < p.queries; ++i) last[i] = std::min(p.keys, i + 1);
    }
    p.first = first.data();
    p.last = last.data();
    p.ranges_per_batch = batches > 1;
    p.output = output.data();
    const Table& table = require_table(isa);
    if (table.attention == nullptr) throw std::invalid_argument(isa + " has no attention");
    nb::gil_scoped_release release;
    table.attention(p, threads);
    return true;
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("attention", &attention, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("mask").none(),
          nb::arg("causal"), nb::arg("scale"), nb::arg("output"), nb::arg("isa"), nb::arg("threads"));
}

}  // namespace steelyard
