// The compiled half of steelyard.kernels.
//
// It is built for the oldest processor of its family and links to nothing but Python: what a
// processor can do beyond that is asked at run time, and one build serves every torch.

#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace {

std::vector<std::string> cpu_features() {
    std::vector<std::string> found;
#if defined(__x86_64__) && defined(__GNUC__)
    // The builtin takes only a literal, hence no loop over the names.
    if (__builtin_cpu_supports("avx2")) found.emplace_back("avx2");
    if (__builtin_cpu_supports("fma")) found.emplace_back("fma");
    if (__builtin_cpu_supports("avx512f")) found.emplace_back("avx512f");
    if (__builtin_cpu_supports("avx512bw")) found.emplace_back("avx512bw");
    if (__builtin_cpu_supports("avx512vl")) found.emplace_back("avx512vl");
#elif defined(__aarch64__)
    found.emplace_back("neon");  // part of the base architecture, so there is nothing to ask
#endif
    return found;
}

std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#elif defined(_MSC_VER)
    return "msvc " + std::to_string(_MSC_FULL_VER);
#else
    return "unknown";
#endif
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Compiled kernels; steelyard.kernels decides when they are used.";
    m.def("cpu_features", &cpu_features,
          "Return the vector instruction sets of this processor that a kernel could use.");
    m.def("compiler", &compiler, "Return the compiler and version that built this extension.");
}
