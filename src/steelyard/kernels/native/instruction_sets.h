// Which builds of the kernels this processor runs, and what built them.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "api.h"

namespace steelyard {

inline const Table* table_for(const std::string& name) {
#if defined(__x86_64__) && defined(__GNUC__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (name == "avx512" && avx512) return &avx512_table;
    if (name == "avx512_bf16" && avx512 && __builtin_cpu_supports("avx512bf16")) {
        static const Table table = [] {
            Table same = avx512_table;
            same.name = "avx512_bf16";
            same.products = products_of_pairs;
            same.attention = attention_of_pairs;
            return same;
        }();
        return &table;
    }
    if (name == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return &avx2_table;
    }
#endif
    return name == "baseline" ? &baseline_table : nullptr;
}

inline const Table& require_table(const std::string& name) {
    const Table* table = table_for(name);
    if (table == nullptr) throw std::invalid_argument("this processor cannot run " + name);
    return *table;
}

// Instruction sets that this processor runs, best first.
inline std::vector<std::string> instruction_sets() {
    std::vector<std::string> usable;
    for (const char* name : {"avx512_bf16", "avx512", "avx2", "baseline"}) {
        if (table_for(name) != nullptr) usable.emplace_back(name);
    }
    return usable;
}

inline std::vector<std::string> cpu_features() {
    std::vector<std::string> found;
#if defined(__x86_64__) && defined(__GNUC__)
    // The builtin takes only a literal, hence no loop over the names.
    if (__builtin_cpu_supports("avx2")) found.emplace_back("avx2");
    if (__builtin_cpu_supports("fma")) found.emplace_back("fma");
    if (__builtin_cpu_supports("avx512f")) found.emplace_back("avx512f");
    if (__builtin_cpu_supports("avx512bw")) found.emplace_back("avx512bw");
    if (__builtin_cpu_supports("avx512vl")) found.emplace_back("avx512vl");
    if (__builtin_cpu_supports("avx512bf16")) found.emplace_back("avx512_bf16");
#elif defined(__aarch64__)
    found.emplace_back("neon");  // part of the base architecture, so there is nothing to ask
#endif
    return found;
}

inline std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

}  // namespace steelyard
