// The kernels of GPTQ, and of its Hessians, as Python calls them.

#include <algorithm>
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

bool cholesky(ConstFloats hessian, Indices order, float mean, ConstFloats added, Floats upper,
              const std::string& isa, int threads) {
    require_matrix(hessian, "hessian");
    CholeskyProblem p{};
    p.size = int64_t(hessian.shape(0));
    require_size(hessian, p.size * p.size, "hessian");
    require_size(upper, p.size * p.size, "upper");
    require_size(added, p.size, "added");
    require_groups(order, p.size, p.size);
    p.hessian = hessian.data();
    p.order = order.data();
    p.mean = mean;
    p.added = added.data();
    p.upper = upper.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    return table.cholesky(p, threads);
}

void columns(const Tensor& weight, Indices place, Floats ordered, const std::string& isa, int threads) {
    require_matrix(weight, "weight");
    ColumnsProblem p{};
    p.rows = int64_t(weight.shape(0));
    p.columns = int64_t(weight.shape(1));
    if (weight.stride(1) != 1 || weight.stride(0) != p.columns) {
        throw std::invalid_argument("weight must be contiguous");
    }
    require_groups(place, p.columns, p.columns);
    require_size(ordered, p.rows * p.columns, "ordered");
    p.weight = weight.data();
    p.type = type_of(weight);
    p.place = place.data();
    p.ordered = ordered.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.columns(p, threads);
}

void squared_lengths(ConstFloats upper, ConstFloats errors, int64_t entries, Doubles lengths,
                     const std::string& isa, int threads) {
    require_matrix(errors, "errors");
    LengthsProblem p{};
    p.columns = int64_t(errors.shape(0));
    p.rows = int64_t(errors.shape(1));
    require_size(upper, p.columns * p.columns, "upper");
    require_size(lengths, p.rows, "lengths");
    if (entries < 0 || entries > p.columns) throw std::invalid_argument("no such entries");
    p.entries = entries;
    p.upper = upper.data();
    p.errors = errors.data();
    p.lengths = lengths.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.squared_lengths(p, threads);
}

void solve(ConstFloats upper, Floats values, bool both, const std::string& isa, int threads) {
    require_matrix(values, "values");
    SolveProblem p{};
    p.columns = int64_t(values.shape(0));
    p.rows = int64_t(values.shape(1));
    require_size(upper, p.columns * p.columns, "upper");
    p.upper = upper.data();
    p.both = both;
    p.values = values.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.solve(p, threads);
}

// weights: a symmetric matrix, or one weight for each entry
void vector_sums(ConstFloats vectors, ConstFloats weights, Doubles sums, const std::string& isa,
                 int threads) {
    require_matrix(vectors, "vectors");
    VectorsProblem p{};
    p.columns = int64_t(vectors.shape(0));
    p.rows = int64_t(vectors.shape(1));
    const bool is_matrix = weights.ndim() == 2;
    require_size(weights, is_matrix ? p.columns * p.columns : p.columns, "weights");
    require_size(sums, p.rows, "sums");
    p.vectors = vectors.data();
    p.weights = weights.data();
    p.sums = sums.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    is_matrix ? table.quadratic_forms(p, threads) : table.weighted_squares(p, threads);
}

void gptq(ConstFloats weight, std::optional<ConstFloats> upper, ConstFloats added, ConstFloats scale,
          std::optional<ConstFloats> zero_point, Indices group, const Format& format, int type,
          bool round_quotient, bool tight, std::optional<Floats> values, std::optional<Floats> errors,
          Doubles losses, const std::string& isa, int threads) {
    if (upper.has_value() != values.has_value() || (!values && !errors)) {
        throw std::invalid_argument("upper and values go together, and errors without them");
    }
    require_matrix(weight, "weight");
    require_matrix(scale, "scale");
    if (type < 0 || type > int(Type::bf16)) throw std::invalid_argument("no such type");
    GptqProblem p{};
    p.columns = int64_t(weight.shape(0));
    p.rows = int64_t(weight.shape(1));
    const int64_t size = p.columns * p.rows, groups = int64_t(scale.shape(0));
    if (upper) require_size(*upper, p.columns * p.columns, "upper");
    if (values) require_size(*values, size, "values");
    require_size(added, p.columns, "added");
    require_size(scale, groups * p.rows, "scale");
    if (zero_point) require_size(*zero_point, groups * p.rows, "zero_point");
    require_groups(group, p.columns, groups);
    if (errors) require_size(*errors, size, "errors");
    require_size(losses, p.rows, "losses");
    p.type = Type(type);
    p.format = format;
    p.weight = weight.data();
    p.upper = upper ? upper->data() : nullptr;
    p.round_quotient = round_quotient;
    p.tight = tight;
    p.added = added.data();
    p.scale = scale.data();
    p.zero_point = zero_point ? zero_point->data() : nullptr;
    p.group = group.data();
    p.values = values ? values->data() : nullptr;
    p.errors = errors ? errors->data() : nullptr;
    p.losses = losses.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.gptq(p, threads);
}

void refine(ConstFloats hessian, ConstFloats target, Floats scale, std::optional<ConstFloats> zero_point,
            Indices group, int64_t first, int64_t last, int64_t block, const Format& format, int type,
            bool round_quotient, bool tight, bool fit, Floats values, const std::string& isa, int threads) {
    require_matrix(values, "values");
    require_matrix(scale, "scale");
    if (type < 0 || type > int(Type::bf16)) throw std::invalid_argument("no such type");
    RefineProblem p{};
    p.columns = int64_t(values.shape(0));
    p.rows = int64_t(values.shape(1));
    const int64_t groups = int64_t(scale.shape(0));
    require_size(hessian, p.columns * p.columns, "hessian");
    require_size(target, p.columns * p.rows, "target");
    if (block < 1) throw std::invalid_argument("a block must have columns");
    if (first < 0 || first > last || last > p.columns) throw std::invalid_argument("no such columns");
    require_size(scale, groups * p.rows, "scale");
    if (zero_point) require_size(*zero_point, groups * p.rows, "zero_point");
    require_groups(group, p.columns, groups);
    p.type = Type(type);
    p.format = format;
    p.hessian = hessian.data();
    p.target = target.data();
    p.first = first;
    p.last = last;
    p.block = std::min(block, p.columns);
    p.round_quotient = round_quotient;
    p.tight = tight;
    p.fit = fit;
    p.scale = scale.data();
    p.zero_point = zero_point ? zero_point->data() : nullptr;
    p.group = group.data();
    p.values = values.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.refine(p, threads);
}

void require_rows(const Tensor& x, const char* name) {
    require_matrix(x, name);
    if (x.shape(0) > 0 && x.shape(1) > 1 && x.stride(1) != 1) {
        throw std::invalid_argument(std::string(name) + " must have contiguous rows");
    }
}

// left: without it, right^T right on and above the diagonal; rows: the first row of each slab;
// fresh: slabs hold nothing yet
void products(const std::optional<Tensor>& left, const Tensor& right, std::vector<Floats> slabs,
              const std::vector<int64_t>& rows, bool fresh, const std::string& isa) {
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
    p.fresh = fresh;
    const Table& table = require_table(isa);
    if (table.products == nullptr) throw std::invalid_argument(isa + " has no product of matrices");
    nb::gil_scoped_release release;
    table.products(p);
}

}  // namespace

void bind_gptq(nb::module_& m) {
    m.def("cholesky", &cholesky, nb::arg("hessian"), nb::arg("order"), nb::arg("mean"), nb::arg("added"),
          nb::arg("upper"), nb::arg("isa"), nb::arg("threads"));
    m.def("columns", &columns, nb::arg("weight"), nb::arg("place"), nb::arg("ordered"), nb::arg("isa"),
          nb::arg("threads"));
    m.def("squared_lengths", &squared_lengths, nb::arg("upper"), nb::arg("errors"), nb::arg("entries"),
          nb::arg("lengths"), nb::arg("isa"), nb::arg("threads"));
    m.def("gptq", &gptq, nb::arg("weight"), nb::arg("upper").none(), nb::arg("added"), nb::arg("scale"),
          nb::arg("zero_point").none(), nb::arg("group"), nb::arg("format"), nb::arg("type"),
          nb::arg("round_quotient"), nb::arg("tight"), nb::arg("values").none(),
          nb::arg("errors").none(), nb::arg("losses"), nb::arg("isa"), nb::arg("threads"));
    m.def("refine", &refine, nb::arg("hessian"), nb::arg("target"), nb::arg("scale"),
          nb::arg("zero_point").none(), nb::arg("group"), nb::arg("first"), nb::arg("last"),
          nb::arg("block"), nb::arg("format"), nb::arg("type"), nb::arg("round_quotient"),
          nb::arg("tight"), nb::arg("fit"), nb::arg("values"), nb::arg("isa"), nb::arg("threads"));
    m.def("solve", &solve, nb::arg("upper"), nb::arg("values"), nb::arg("both"), nb::arg("isa"),
          nb::arg("threads"));
    m.def("vector_sums", &vector_sums, nb::arg("vectors"), nb::arg("weights"), nb::arg("sums"),
          nb::arg("isa"), nb::arg("threads"));
    m.def("products", &products, nb::arg("left").none(), nb::arg("right"), nb::arg("slabs"),
          nb::arg("rows"), nb::arg("fresh"), nb::arg("isa"));
}

}  // namespace steelyard
