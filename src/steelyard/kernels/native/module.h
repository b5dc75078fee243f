// The parts of the extension's interface that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace steelyard {

void bind_attention(nanobind::module_& m);
void bind_checksum(nanobind::module_& m);
void bind_gptq(nanobind::module_& m);  // the kernels of GPTQ, and of its Hessians
void bind_histogram(nanobind::module_& m);

}  // namespace steelyard
