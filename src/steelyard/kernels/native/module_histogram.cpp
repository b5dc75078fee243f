// The functions of histograms that Python calls.

#include <optional>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "api.h"
#include "arguments.h"
#include "instruction_sets.h"
#include "module.h"

namespace steelyard {

namespace {

void histogram(const Tensor& values, std::optional<Indices> rows, Counts counts, const std::string& isa,
               int threads) {
    const View view = view_of(values);
    for (size_t i = 0; rows && i < rows->size(); ++i) {
        if (rows->data()[i] < 0 || rows->data()[i] >= view.size[0]) {
            throw std::invalid_argument("rows must be numbers of observations");
        }
    }
    require_size(counts, view.groups() * (1 + BINS), "counts");
    for (int64_t g = 0; g < view.groups(); ++g) {
        const int64_t exponent = counts.data()[g * (1 + BINS)];
        if (exponent < -116 || exponent > 118) {
            throw std::invalid_argument("the width of bins must be 2^-116 to 2^118");
        }
    }
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.histogram(view, rows ? rows->data() : nullptr, rows ? int64_t(rows->size()) : 0, counts.data(),
                    threads);
}

void range_costs(Indices counts, const Format& format, ConstDoubles unit, ConstDoubles zero_point,
                 std::optional<Indices> first, std::optional<Indices> last, double norm, Doubles costs,
                 const std::string& isa, int threads) {
    require_matrix(counts, "counts");
    require_matrix(unit, "unit");
    RangeCosts p{};
    p.rows = int64_t(unit.shape(0));
    p.candidates = int64_t(unit.shape(1));
    require_size(counts, p.rows * BINS, "counts");
    require_size(zero_point, p.rows * p.candidates, "zero_point");
    require_size(costs, p.rows * p.candidates, "costs");
    p.counts = counts.data();
    p.format = format;
    p.norm = norm;
    p.unit = unit.data();
    p.zero_point = zero_point.data();
    p.costs = costs.data();
    if (first && last) {
        require_size(*first, p.rows * p.candidates, "first");
        require_size(*last, p.rows * p.candidates, "last");
        p.first = first->data();
        p.last = last->data();
        for (int64_t i = 0; i < p.rows * p.candidates; ++i) {
            if (p.first[i] < -BINS / 2 || p.last[i] > BINS / 2 || p.first[i] >= p.last[i]) {
                throw std::invalid_argument("a range must end at two edges, in order");
            }
        }
    }
    const Table& table = require_table(isa);
    nb::gil_scoped_release release;
    table.range_costs(p, threads);
}

}  // namespace

void bind_histogram(nb::module_& m) {
    m.def("histogram", &histogram, nb::arg("values"), nb::arg("rows").none(), nb::arg("counts"), nb::arg("isa"),
          nb::arg("threads"));
    m.def("range_costs", &range_costs, nb::arg("counts"), nb::arg("format"), nb::arg("unit"),
          nb::arg("zero_point"), nb::arg("first").none(), nb::arg("last").none(), nb::arg("norm"), nb::arg("costs"),
          nb::arg("isa"), nb::arg("threads"));
}

}  // namespace steelyard
