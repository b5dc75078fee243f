// Checks the tensors that Python passes, and turns them into views.
//
// Tensors come through DLPack and are read without a copy. A mismatch throws
// std::invalid_argument, which Python sees as a ValueError.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "api.h"

namespace steelyard {

namespace nb = nanobind;

using Tensor = nb::ndarray<nb::ro, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::device::cpu, nb::c_contig>;
using ConstFloats = nb::ndarray<const float, nb::device::cpu, nb::c_contig>;
using Doubles = nb::ndarray<double, nb::device::cpu, nb::c_contig>;
using MutableTensor = nb::ndarray<nb::device::cpu, nb::c_contig>;
using Indices = nb::ndarray<const int64_t, nb::device::cpu, nb::c_contig>;
using ConstDoubles = nb::ndarray<const double, nb::device::cpu, nb::c_contig>;
using Counts = nb::ndarray<int64_t, nb::device::cpu, nb::c_contig>;
using Bytes = nb::ndarray<uint8_t, nb::device::cpu, nb::c_contig>;

template <class Array>
Type type_of(const Array& x) {
    if (x.dtype() == nb::dtype<float>()) return Type::f32;
    const auto code = nb::dlpack::dtype_code(x.dtype().code);
    if (x.dtype().bits == 16 && code == nb::dlpack::dtype_code::Float) return Type::f16;
    if (x.dtype().bits == 16 && code == nb::dlpack::dtype_code::Bfloat) return Type::bf16;
    throw std::invalid_argument("values must be fp32, fp16 or bf16");
}

inline View view_of(const Tensor& x) {
    if (x.ndim() != 5) throw std::invalid_argument("values must have five dimensions");
    View view{x.data(), type_of(x), {}, {}};
    for (int i = 0; i < 5; ++i) {
        view.size[i] = int64_t(x.shape(i));
        view.stride[i] = x.stride(i);
        if (view.size[i] == 0) throw std::invalid_argument("values must not be empty");
    }
    return view;
}

template <class Array>
void require_size(const Array& array, int64_t size, const char* name) {
    if (int64_t(array.size()) != size) {
        throw std::invalid_argument(std::string(name) + " must hold " + std::to_string(size) +
                                    " values, not " + std::to_string(array.size()));
    }
}

template <class Array>
void require_matrix(const Array& array, const char* name) {
    if (array.ndim() != 2) {
        throw std::invalid_argument(std::string(name) + " must have two dimensions, not " +
                                    std::to_string(array.ndim()));
    }
}

inline void require_groups(const Indices& group, int64_t columns, int64_t groups) {
    require_size(group, columns, "group");
    for (int64_t j = 0; j < columns; ++j) {
        if (group.data()[j] < 0 || group.data()[j] >= groups) {
            throw std::invalid_argument("a column's group has no scale");
        }
    }
}

// Importance broadcasts over the values: a dimension of size 1 does not advance.
inline const float* weights_of(const std::optional<Tensor>& weights, const View& values,
                               int64_t* stride) {
    if (!weights) return nullptr;
    const View view = view_of(*weights);
    if (view.type != Type::f32) throw std::invalid_argument("importance must be fp32");
    for (int i = 0; i < 5; ++i) {
        if (view.size[i] != 1 && view.size[i] != values.size[i]) {
            throw std::invalid_argument("importance must broadcast to the values");
        }
        stride[i] = view.size[i] == 1 ? 0 : view.stride[i];
    }
    return static_cast<const float*>(view.data);
}

}  // namespace steelyard
