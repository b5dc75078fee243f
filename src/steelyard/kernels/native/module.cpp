// The compiled half of steelyard.kernels: the functions that Python calls. Each checks its arguments
// and runs the build of its kernel that Python names.
//
// It links to nothing but Python.

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

using namespace steelyard;

namespace {

void range(const Tensor& values, Floats low, Floats high, const std::string& isa, int threads) {
    const View view = view_of(values);
    require_size(low, view.groups(), "low");
    require_size(high, view.groups(), "high");
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.range(view, low.data(), high.data(), threads);
}

void qparams(ConstFloats min_vals, ConstFloats max_vals, const Format& format, MutableTensor scale,
             std::optional<Floats> zero_point, const std::string& isa, int threads) {
    QparamsProblem p{};
    p.count = int64_t(min_vals.size());
    require_size(max_vals, p.count, "max_vals");
    require_size(scale, p.count, "scale");
    if (zero_point) require_size(*zero_point, p.count, "zero_point");
    p.min_vals = min_vals.data();
    p.max_vals = max_vals.data();
    p.format = format;
    p.scale_type = type_of(scale);
    p.scale = scale.data();
    p.zero_point = zero_point ? zero_point->data() : nullptr;
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.qparams(p, threads);
}

void describe(Problem& p, const Tensor& values, const Format& format, const ConstFloats& min_vals,
              const ConstFloats& max_vals, const std::optional<Tensor>& weights) {
    p.values = view_of(values);
    p.format = format;
    p.weights = weights_of(weights, p.values, p.weight_stride);
    require_size(min_vals, p.values.groups(), "min_vals");
    require_size(max_vals, p.values.groups(), "max_vals");
    p.min_vals = min_vals.data();
    p.max_vals = max_vals.data();
}

void search(const Tensor& values, const Format& format, ConstFloats min_vals, ConstFloats max_vals,
            const std::vector<float>& factors, float norm, int patience,
            const std::optional<Tensor>& weights, Floats best_min, Floats best_max,
            const std::string& isa, int threads) {
    SearchProblem p{};
    describe(p, values, format, min_vals, max_vals, weights);
    require_size(best_min, p.values.groups(), "best_min");
    require_size(best_max, p.values.groups(), "best_max");
    p.factors = factors.data();
    p.num_factors = int(factors.size());
    p.norm = norm;
    p.patience = patience;
    p.best_min = best_min.data();
    p.best_max = best_max.data();
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.search(p, threads);
}

void optimal(const Tensor& values, const Format& format, ConstFloats min_vals, ConstFloats max_vals,
             const std::optional<Tensor>& weights, float norm, bool negative, Floats scale,
             std::optional<Floats> zero_point, const std::string& isa, int threads) {
    OptimalProblem p{};
    describe(p, values, format, min_vals, max_vals, weights);
    require_size(scale, p.values.groups(), "scale");
    if (zero_point) require_size(*zero_point, p.values.groups(), "zero_point");
    p.norm = norm;
    p.negative = negative;
    p.scale = scale.data();
    p.zero_point = zero_point ? zero_point->data() : nullptr;
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.optimal(p, threads);
}

void sum_squares(const Tensor& values, Floats sums, const std::string& isa, int threads) {
    const View view = view_of(values);  // (tokens, 1, 1, 1, columns)
    if (view.size[1] != 1 || view.size[2] != 1 || view.size[3] != 1) {
        throw std::invalid_argument("values must be tokens by columns");
    }
    require_size(sums, view.size[4], "sums");
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.sum_squares(view, sums.data(), threads);
}

void pack(const Tensor& weight, ConstFloats scale, std::optional<ConstFloats> zero_point,
          const Format& format, int64_t block_rows, int64_t block_columns, int num_bits, int layout,
          bool round_quotient, std::optional<Bytes> out, std::optional<Doubles> errors,
          const std::string& isa, int threads) {
    require_matrix(weight, "weight");
    if (out) require_matrix(*out, "out");
    PackProblem p{};
    p.data = weight.data();
    p.type = type_of(weight);
    p.rows = int64_t(weight.shape(0));
    p.columns = int64_t(weight.shape(1));
    p.row_stride = weight.stride(0);
    p.column_stride = weight.stride(1);
    p.block_rows = block_rows;
    p.block_columns = block_columns;
    const int64_t blocks = ((p.rows + block_rows - 1) / block_rows) *
                           ((p.columns + block_columns - 1) / block_columns);
    require_size(scale, blocks, "scale");
    if (zero_point) require_size(*zero_point, blocks, "zero_point");
    p.scale = scale.data();
    p.zero_point = zero_point ? zero_point->data() : nullptr;
    p.format = format;
    p.num_bits = num_bits;
    p.layout = Layout(layout);
    p.round_quotient = round_quotient;
    if (errors) require_size(*errors, p.rows, "errors");
    p.errors = errors ? errors->data() : nullptr;
    p.out = out ? out->data() : nullptr;
    p.out_row_bytes = out ? int64_t(out->shape(1)) : 0;
    const int64_t bits = p.layout == Layout::bytes ? 8 : (p.layout == Layout::nibbles ? 4 : num_bits);
    if (out && (int64_t(out->shape(0)) != p.rows || p.out_row_bytes * 8 < p.columns * bits)) {
        throw std::invalid_argument("out is too small for the packed weight");
    }
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.pack(p, threads);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Compiled kernels; steelyard.kernels decides when they are used.";
    nb::class_<Format>(m, "Format", "A quantized type and how its scales are stored.")
        .def(
            "__init__",
            [](Format* self, bool is_int, bool symmetric, float qmin, float qmax, int mantissa,
               int min_exponent, int scale, std::optional<float> global_scale, int mx_offset,
               uint32_t mx_round_bit) {
                new (self) Format{is_int,
                                  symmetric,
                                  qmin,
                                  qmax,
                                  mantissa,
                                  min_exponent,
                                  ScaleType(scale),
                                  global_scale.has_value(),
                                  global_scale.value_or(1.0f),
                                  mx_offset,
                                  mx_round_bit};
            },
            nb::kw_only(), nb::arg("is_int"), nb::arg("symmetric"), nb::arg("qmin"), nb::arg("qmax"),
            nb::arg("mantissa"), nb::arg("min_exponent"), nb::arg("scale"),
            nb::arg("global_scale").none(), nb::arg("mx_offset"), nb::arg("mx_round_bit"));
    m.def("range", &range, nb::arg("values"), nb::arg("low"), nb::arg("high"), nb::arg("isa"),
          nb::arg("threads"));
    m.def("qparams", &qparams, nb::arg("min_vals"), nb::arg("max_vals"), nb::arg("format"),
          nb::arg("scale"), nb::arg("zero_point").none(), nb::arg("isa"), nb::arg("threads"));
    m.def("search", &search, nb::arg("values"), nb::arg("format"), nb::arg("min_vals"),
          nb::arg("max_vals"), nb::arg("factors"), nb::arg("norm"), nb::arg("patience"),
          nb::arg("weights").none(), nb::arg("best_min"), nb::arg("best_max"), nb::arg("isa"),
          nb::arg("threads"));
    m.def("optimal", &optimal, nb::arg("values"), nb::arg("format"), nb::arg("min_vals"),
          nb::arg("max_vals"), nb::arg("weights").none(), nb::arg("norm"), nb::arg("negative"),
          nb::arg("scale"), nb::arg("zero_point").none(), nb::arg("isa"), nb::arg("threads"));
    m.def("sum_squares", &sum_squares, nb::arg("values"), nb::arg("sums"), nb::arg("isa"),
          nb::arg("threads"));
    m.def("pack", &pack, nb::arg("weight"), nb::arg("scale"), nb::arg("zero_point").none(),
          nb::arg("format"), nb::arg("block_rows"), nb::arg("block_columns"), nb::arg("num_bits"),
          nb::arg("layout"), nb::arg("round_quotient"), nb::arg("out").none(),
          nb::arg("errors").none(), nb::arg("isa"), nb::arg("threads"));
    bind_attention(m);
    bind_checksum(m);
    bind_gptq(m);
    bind_histogram(m);
    m.def("instruction_sets", &instruction_sets,
          "Return the builds of the kernels that this processor runs, best first.");
    m.def("cpu_features", &cpu_features,
          "Return the vector instruction sets of this processor that a kernel could use.");
    m.def("compiler", &compiler, "Return the compiler and version that built this extension.");
}
