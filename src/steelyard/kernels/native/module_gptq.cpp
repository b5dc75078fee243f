// The kernels of GPTQ, and of its Hessians, as Python calls them.

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "api.h"
#include "arguments.h"
#include "instruction_sets.h"
#include "module.h"

namespace steelyard {
namespace {

void gptq_block(ConstFloats weight, std::optional<ConstFloats> lower, std::optional<ConstFloats> sums,
                ConstFloats added, ConstFloats scale, std::optional<ConstFloats> zero_point,
                Indices group, const Format& format, int type, bool round_quotient, bool tight,
                std::optional<Floats> values, Floats errors, Doubles losses, const std::string& isa,
                int threads) {
    if (lower.has_value() != sums.has_value() || lower.has_value() != values.has_value()) {
        throw std::invalid_argument("lower, sums and values go together");
    }
    require_matrix(weight, "weight");
    require_matrix(scale, "scale");
    if (type < 0 || type > int(Type::bf16)) throw std::invalid_argument("no such type");
    GptqProblem p{};
    p.columns = int64_t(weight.shape(0));
    p.rows = int64_t(weight.shape(1));
    const int64_t size = p.columns * p.rows, groups = int64_t(scale.shape(0));
    if (lower) require_size(*lower, p.columns * p.columns, "lower");
    if (sums) require_size(*sums, size, "sums");
    if (values) require_size(*values, size, "values");
    require_size(added, p.columns, "added");
    require_size(scale, groups * p.rows, "scale");
    if (zero_point) require_size(*zero_point, groups * p.rows, "zero_point");
    require_groups(group, p.columns, groups);
    require_size(errors, size, "errors");
    require_size(losses, p.rows, "losses");
    p.type = Type(type);
    p.format = format;
    p.weight = weight.data();
    p.lower = lower ? lower->data() : nullptr;
    p.round_quotient = round_quotient;
    p.tight = tight;
    p.sums = sums ? sums->data() : nullptr;
    p.added = added.data();
    p.scale = scale.data();
    p.zero_point = zero_point ? zero_point->data() : nullptr;
    p.group = group.data();
    p.values = values ? values->data() : nullptr;
    p.errors = errors.data();
    p.losses = losses.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.gptq_block(p, threads);
}

void refine_block(ConstFloats hessian, ConstFloats sums, Floats scale,
                  std::optional<ConstFloats> zero_point, Indices group, const Format& format, int type,
                  bool round_quotient, bool tight, bool fit, Floats values, Floats errors,
                  const std::string& isa, int threads) {
    require_matrix(values, "values");
    require_matrix(scale, "scale");
    if (type < 0 || type > int(Type::bf16)) throw std::invalid_argument("no such type");
    RefineProblem p{};
    p.columns = int64_t(values.shape(0));
    p.rows = int64_t(values.shape(1));
    const int64_t groups = int64_t(scale.shape(0));
    require_size(hessian, p.columns * p.columns, "hessian");
    require_size(sums, p.columns * p.rows, "sums");
    require_size(errors, p.columns * p.rows, "errors");
    require_size(scale, groups * p.rows, "scale");
    if (zero_point) require_size(*zero_point, groups * p.rows, "zero_point");
    require_groups(group, p.columns, groups);
    p.type = Type(type);
    p.format = format;
    p.hessian = hessian.data();
    p.sums = sums.data();
    p.round_quotient = round_quotient;
    p.tight = tight;
    p.fit = fit;
    p.scale = scale.data();
    p.zero_point = zero_point ? zero_point->data() : nullptr;
    p.group = group.data();
    p.values = values.data();
    p.errors = errors.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.refine_block(p, threads);
}

void require_rows(const Tensor& x, const char* name) {
    require_matrix(x, name);
    if (x.shape(0) > 0 && x.shape(1) > 1 && x.stride(1) != 1) {
        throw std::invalid_argument(std::string(name) + " must have contiguous rows");
    }
}

// left: without it, right^T right on and above the diagonal; rows: the first row of each slab
void products(const std::optional<Tensor>& left, const Tensor& right, std::vector<Floats> slabs,
              const std::vector<int64_t>& rows, const std::string& isa) {
    require_rows(right, "right");
    ProductProblem p{};
    p.tokens = int64_t(right.shape(0));
    p.columns = int64_t(right.shape(1));
    p.right = right.data();
    p.right_stride = right.stride(0);
    p.type = type_of(right);
    int64_t most = p.columns;
    if (left) {
        require_rows(*left, "left");
        most = int64_t(left->shape(1));
        require_size(*left, p.tokens * most, "left");
        if (type_of(*left) != p.type) throw std::invalid_argument("left and right must have one type");
        p.left = left->data();
        p.left_stride = left->stride(0);
    }
    if (rows.size() != slabs.size()) throw std::invalid_argument("each slab needs its first row");
    std::vector<Slab> described;
    for (size_t i = 0; i < slabs.size(); ++i) {
        require_matrix(slabs[i], "a slab");
        const int64_t count = int64_t(slabs[i].shape(0)), column = left ? 0 : rows[i];
        if (rows[i] < 0 || rows[i] + count > most) throw std::invalid_argument("no such rows");
        require_size(slabs[i], count * (p.columns - column), "a slab");
        described.push_back({slabs[i].data(), rows[i], count, column});
    }
    p.slabs = described.data();
    p.count = int64_t(described.size());
    const Table& table = require_table(isa);
    if (table.products == nullptr) throw std::invalid_argument(isa + " has no product of matrices");
    nb::gil_scoped_release release;
    table.products(p);
}

}  // namespace

void bind_gptq(nb::module_& m) {
    m.def("gptq_block", &gptq_block, nb::arg("weight"), nb::arg("lower").none(),
          nb::arg("sums").none(), nb::arg("added"), nb::arg("scale"), nb::arg("zero_point").none(),
          nb::arg("group"), nb::arg("format"), nb::arg("type"), nb::arg("round_quotient"),
          nb::arg("tight"), nb::arg("values").none(), nb::arg("errors"), nb::arg("losses"),
          nb::arg("isa"), nb::arg("threads"));
    m.def("refine_block", &refine_block, nb::arg("hessian"), nb::arg("sums"), nb::arg("scale"),
          nb::arg("zero_point").none(), nb::arg("group"), nb::arg("format"), nb::arg("type"),
          nb::arg("round_quotient"), nb::arg("tight"), nb::arg("fit"), nb::arg("values"),
          nb::arg("errors"), nb::arg("isa"), nb::arg("threads"));
    m.def("products", &products, nb::arg("left").none(), nb::arg("right"), nb::arg("slabs"),
          nb::arg("rows"), nb::arg("isa"));
}

}  // namespace steelyard
