// The interface between the Python binding and the builds for each instruction set.
//
// A kernel is written once, in the *.inl files, and compiled once per instruction set inside a
// namespace of its own. Each build fills one Table; instruction_sets.h picks one at run time.
#pragma once

#include <cstdint>

namespace steelyard {

enum class Type : int { f32 = 0, f16 = 1, bf16 = 2 };

// Observed values, read in place: element (n, q1, q2, h, w) lies at data + sum of index * stride.
// A group, which shares one quantization parameter, is all (n, h, w) of one (q1, q2).
struct View {
    const void* data;
    Type type;
    int64_t size[5];
    int64_t stride[5];

    int64_t groups() const { return size[1] * size[2]; }
    int64_t group_size() const { return size[0] * size[3] * size[4]; }
    int64_t group_offset(int64_t g) const {
        if (size[1] == 1) return g * stride[2];  // the usual case, without a division
        return (g / size[2]) * stride[1] + (g % size[2]) * stride[2];
    }
};

// How a scale is stored; the numbers are shared with kernels/compiled.py.
enum class ScaleType : int { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, e8m0 = 4 };

// A quantized type: integers, or floats with few mantissa bits.
struct Format {
    bool is_int;
    bool symmetric;
    float qmin, qmax;
    int mantissa;      // floats only
    int min_exponent;  // floats only: exponent of the smallest normal number
    ScaleType scale;
    bool has_global;
    float global_scale;
    int mx_offset;          // e8m0 only: floor(log2(qmax))
    uint32_t mx_round_bit;  // e8m0 only: added to the bits of the absmax before truncation
};

// Groups of values, their ranges, and how they are quantized.
struct Problem {
    View values;
    Format format;
    const float* min_vals;  // per group
    const float* max_vals;
    const float* weights;      // importance, or null
    int64_t weight_stride[5];  // over (n, q1, q2, h, w)
};

struct SearchProblem : Problem {
    const float* factors;
    int num_factors;
    float norm;
    int patience;  // steps without any improvement after which the search ends; 0: never
    float* best_min;  // may be min_vals itself, and best_max max_vals
    float* best_max;
};

struct OptimalProblem : Problem {
    float norm;     // power of the errors
    bool negative;  // symmetric integers: scales below zero are candidates too
    float* scale;   // stored value, per group
    float* zero_point;
};

struct QparamsProblem {
    const float* min_vals;
    const float* max_vals;
    int64_t count;
    Format format;
    Type scale_type;  // of the result
    void* scale;
    float* zero_point;  // null for symmetric types
};

enum class Layout : int { packed32 = 0, bytes = 1, nibbles = 2 };

struct PackProblem {
    const void* data;  // (rows, columns)
    Type type;
    int64_t rows, columns, row_stride, column_stride;
    int64_t block_rows, block_columns;  // rows and columns that share one parameter
    const float* scale;                 // (ceil(rows / block_rows), ceil(columns / block_columns))
    const float* zero_point;            // as scale, or null
    Format format;
    int num_bits;
    Layout layout;
    bool round_quotient;  // round each step to the tensor's type, as compressed-tensors does
    uint8_t* out;  // null where only the errors are wanted
    int64_t out_row_bytes;
    double* errors;  // squared error per row, or null
};

// Factorises H / mean + diag(added), with rows and columns in an order.
struct CholeskyProblem {
    int64_t size;
    const float* hessian;  // (size, size)
    const int64_t* order;  // (size,)
    float mean;
    const float* added;  // (size,), in the order
    float* upper;        // (size, size), of which the upper triangle is written
};

// A weight as GPTQ takes it: (columns, rows) in an order, fp32.
struct ColumnsProblem {
    int64_t rows, columns;
    const void* weight;  // (rows, columns)
    Type type;
    const int64_t* place;  // (columns,), of each column in the order
    float* ordered;        // (columns, rows)
};

// The last column is rounded first. Matrices are (columns, rows): a column of the weight is contiguous.
struct GptqProblem {
    int64_t rows, columns;
    Type type;  // of the weight; values are rounded to it
    Format format;
    const float* weight;
    const float* upper;  // (columns, columns), U with U^T U = H, its lower triangle undefined; null
                         // rounds to nearest, in which case there are no values either
    bool round_quotient;  // as in PackProblem
    bool tight;           // check that each value packs to its own code
    const float* added;  // (columns,), what was added to the Hessian's diagonal
    const float* scale;  // (groups, rows), divided by the global scale
    const float* zero_point;  // as scale, or null
    const int64_t* group;     // (columns,)
    float* values;
    float* errors;   // may be null, unless values is
    double* losses;  // (rows,), added to
};

// The squared lengths of U e, or of its first entries.
struct LengthsProblem {
    int64_t rows, columns, entries;
    const float* upper;   // as in GptqProblem
    const float* errors;  // (columns, rows)
    double* lengths;      // (rows,)
};

// Replaces vectors x, the columns of a matrix, by (U^T U)^-1 x.
struct SolveProblem {
    int64_t rows, columns;
    const float* upper;  // as in GptqProblem
    bool both;           // else U^-1 x
    float* values;       // (columns, rows)
};

// Sums over the entries of each of some vectors.
struct VectorsProblem {
    int64_t rows, columns;
    const float* vectors;  // (columns, rows)
    const float* weights;  // (columns,), or a symmetric matrix whose upper triangle is read
    double* sums;          // (rows,)
};

// One round over columns after GPTQ, in blocks of whole groups, or of columns without scales that move.
struct RefineProblem {
    int64_t rows, columns;
    int64_t first, last, block;  // columns to refine, and how many between two large products
    Type type;
    Format format;         // of the codes, and of the scales as they are stored
    const float* hessian;  // (columns, columns)
    const float* target;   // (columns, rows)
    bool round_quotient, tight;  // as in GptqProblem
    bool fit;                    // whether scales move
    float* scale;                // (groups, rows), divided by the global scale
    const float* zero_point;     // as scale, or null
    const int64_t* group;        // (columns,)
    float* values;               // (columns, rows)
};

// Rows of a matrix, from one of its columns to the last.
struct Slab {
    float* data;  // (rows, columns - column), contiguous
    int64_t row, rows, column;
};

// Adds left^T right to slabs, with tokens as the rows of both. Without `left`, it adds right^T right, on
// and above the diagonal only.
struct ProductProblem {
    const void* left;
    const void* right;
    Type type;  // of both
    int64_t tokens, columns, left_stride, right_stride;
    const Slab* slabs;
    int64_t count;
    bool fresh;  // slabs hold nothing yet: the product is written, not added
};

// Vectors of heads: element (batch, head, token, i) lies at data + sum of index * stride; i has stride 1.
struct Heads {
    const void* data;
    int64_t stride[3];
};

// Attention of queries to a range of keys each; heads share keys in order, as many each.
struct AttentionProblem {
    int64_t batches, heads, key_heads, queries, keys, width, value_width;  // width: even
    Type type;  // of all; f32 or bf16
    Heads query, key, value;
    const int64_t* first;  // (queries,), or (batches, queries): keys from `first` to before `last`
    const int64_t* last;
    bool ranges_per_batch;
    float scale;   // of scores
    void* output;  // (batches, queries, heads, value_width), contiguous
};

constexpr int BINS = 2048;  // of a histogram, half of them on each side of zero

// Histograms, and the parameters to judge for each; kernels/range_costs.py defines the costs.
struct RangeCosts {
    const int64_t* counts;  // (rows, BINS)
    int64_t rows, candidates;
    Format format;
    const double* unit;  // (rows, candidates), scale over the width of a bin
    const double* zero_point;
    double norm;  // power of the errors
    const int64_t* first;  // the edges that end the range, for the divergence; null: errors
    const int64_t* last;
    double* costs;
};

struct Table {
    const char* name;
    void (*range)(const View&, float* low, float* high, int threads);
    void (*qparams)(const QparamsProblem&, int threads);
    void (*search)(const SearchProblem&, int threads);
    void (*optimal)(const OptimalProblem&, int threads);
    void (*sum_squares)(const View&, float* sums, int threads);
    void (*pack)(const PackProblem&, int threads);
    bool (*cholesky)(const CholeskyProblem&, int threads);
    void (*columns)(const ColumnsProblem&, int threads);
    void (*gptq)(const GptqProblem&, int threads);
    void (*squared_lengths)(const LengthsProblem&, int threads);
    void (*refine)(const RefineProblem&, int threads);
    void (*solve)(const SolveProblem&, int threads);
    void (*quadratic_forms)(const VectorsProblem&, int threads);
    void (*weighted_squares)(const VectorsProblem&, int threads);
    void (*products)(const ProductProblem&);  // null: none
    void (*attention)(const AttentionProblem&, int threads);  // null: none
    void (*histogram)(const View&, const int64_t* rows, int64_t count, int64_t* histogram, int threads);
    void (*range_costs)(const RangeCosts&, int threads);
};

extern const Table baseline_table;
#if defined(__x86_64__)
extern const Table avx2_table;
extern const Table avx512_table;
// need avx512_bf16
void products_of_pairs(const ProductProblem&);
void attention_of_pairs(const AttentionProblem&, int threads);
#endif

}  // namespace steelyard
