// Products of inputs, summed over tokens: slabs of x^T x, or of left^T right (kernels/hessian.py).
//
// Tokens are taken in blocks. The columns of a block are packed into panels, in which one step of
// all columns is contiguous: one token in fp32, or two in bf16 where the processor has a product of
// pairs. A tile, some rows of the result by the columns of a panel, is summed in registers from zero
// and added to its slab once per block. So every entry is the sum over blocks of sums over steps, in
// the order of the tokens, wherever it lies in a tile and whichever thread adds it.

constexpr int TILE_ROWS = LANES == 16 ? 8 : 4;
constexpr int TILE_VECTORS = 2;
constexpr int PANEL = TILE_VECTORS * LANES;
constexpr int64_t STEPS = 128;  // of a block, so that a panel of it fits into the nearest cache
static_assert(PANEL % TILE_ROWS == 0, "the rows of a tile lie in one panel");

// One token per step, in fp32.
struct Singles {
    static constexpr int64_t TOKENS = 1;

    template <class T>
    static void pack(const T* x, int64_t stride, int64_t tokens, int64_t columns, float* to) {
        for (int64_t t = 0; t < tokens; ++t, to += PANEL) {
            for (int64_t c = 0; c < columns; ++c) to[c] = widen(x[t * stride + c]);
            std::fill(to + columns, to + PANEL, 0.0f);
        }
    }

    static vf add(vf sum, const float* a, vf b) { return sum + *a * b; }
};

#if defined(__AVX512BF16__)
// Two tokens per step. Products of bf16 are exact in fp32; the instruction rounds their sum to
// nearest, and takes what is below 2^-126 for zero.
struct Pairs {
    static constexpr int64_t TOKENS = 2;

    static void pack(const bfloat_t* x, int64_t stride, int64_t tokens, int64_t columns, float* to) {
        static constexpr bfloat_t NONE[PANEL] = {};
        uint32_t cells[PANEL] = {};
        for (int64_t t = 0; t < tokens; t += 2, to += PANEL) {
            const bfloat_t *first = x + t * stride, *second = t + 1 < tokens ? first + stride : NONE;
            for (int64_t c = 0; c < columns; ++c) {
                cells[c] = first[c].bits | uint32_t(second[c].bits) << 16;
            }
            std::memcpy(to, cells, sizeof cells);
        }
    }

    static vf add(vf sum, const float* a, vf b) {
        int32_t pair;
        std::memcpy(&pair, a, sizeof pair);
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
    }
};
#else
using Pairs = Singles;
#endif

struct alignas(64) CacheLine { float values[16]; };

// Columns of a matrix that are packed, a block of tokens at a time.
template <class Step, class T>
struct Panels {
    const T* x;
    int64_t stride, columns, first;  // first: number of the first panel
    std::vector<CacheLine> memory;
    float* data;

    Panels(const void* x_, int64_t stride_, int64_t from, int64_t to)
        : x(static_cast<const T*>(x_)), stride(stride_), columns(to), first(from / PANEL) {
        const int64_t count = (columns + PANEL - 1) / PANEL - first;
        memory.resize(count * STEPS * PANEL / 16);
        data = reinterpret_cast<float*>(memory.data());
    }

    float* panel(int64_t number) const { return data + (number - first) * STEPS * PANEL; }

    void pack(int64_t token, int64_t tokens) const {
        for (int64_t from = first * PANEL; from < columns; from += PANEL) {
            Step::pack(x + token * stride + from, stride, tokens,
                       std::min<int64_t>(PANEL, columns - from), panel(from / PANEL));
        }
    }
};

// Adds a tile of the product, from row and column on, to a slab; writes it to a fresh one.
template <class Step>
static void add_tile(const float* a, const float* b, int64_t steps, const Slab& slab, int64_t row,
                     int64_t column, int64_t columns, bool fresh) {
    const int64_t width = columns - slab.column;
    float* to = slab.data + (row - slab.row) * width + (column - slab.column);
    const bool whole = row >= slab.row && row + TILE_ROWS <= slab.row + slab.rows &&
                       column >= slab.column && column + PANEL <= columns;
    if (whole) {
        for (int r = 0; r < TILE_ROWS; ++r) {
            for (int c = 0; c < PANEL; c += 16) __builtin_prefetch(to + r * width + c, 1);
        }
    }
    vf sums[TILE_ROWS][TILE_VECTORS] = {};
    for (int64_t k = 0; k < steps; ++k, a += PANEL, b += PANEL) {
        vf right[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; ++v) right[v] = load(b + v * LANES);
        for (int r = 0; r < TILE_ROWS; ++r) {
            for (int v = 0; v < TILE_VECTORS; ++v) sums[r][v] = Step::add(sums[r][v], a + r, right[v]);
        }
    }
    if (whole) {
        for (int r = 0; r < TILE_ROWS; ++r) {
            for (int v = 0; v < TILE_VECTORS; ++v) {
                vf* place = reinterpret_cast<vf*>(to + r * width + v * LANES);
                *place = fresh ? sums[r][v] : *place + sums[r][v];
            }
        }
        return;
    }
    float spilled[TILE_ROWS][PANEL];
    std::memcpy(spilled, sums, sizeof sums);
    for (int64_t r = 0; r < TILE_ROWS; ++r) {
        if (row + r < slab.row || row + r >= slab.row + slab.rows) continue;
        for (int64_t c = 0; c < PANEL; ++c) {
            if (column + c < slab.column || column + c >= columns) continue;
            to[r * width + c] = fresh ? spilled[r][c] : to[r * width + c] + spilled[r][c];
        }
    }
}

template <class Step, class T>
static void add_products(const ProductProblem& p) {
    if (p.count == 0) return;
    int64_t from = std::numeric_limits<int64_t>::max(), to = 0, column = p.columns;
    for (int64_t s = 0; s < p.count; ++s) {
        from = std::min(from, p.slabs[s].row);
        to = std::max(to, p.slabs[s].row + p.slabs[s].rows);
        column = std::min(column, p.slabs[s].column);
    }
    for (int64_t s = 0; p.fresh && p.tokens == 0 && s < p.count; ++s) {
        const Slab& slab = p.slabs[s];
        std::fill(slab.data, slab.data + slab.rows * (p.columns - slab.column), 0.0f);
    }
    const bool symmetric = p.left == nullptr;
    const Panels<Step, T> right(p.right, p.right_stride, symmetric ? from : column, p.columns);
    const Panels<Step, T> own(p.left, p.left_stride, symmetric ? to : from, to);
    const Panels<Step, T>& left = symmetric ? right : own;
    const int64_t block = STEPS * Step::TOKENS;
    for (int64_t token = 0; token < p.tokens; token += block) {
        const int64_t tokens = std::min(block, p.tokens - token);
        const int64_t steps = (tokens + Step::TOKENS - 1) / Step::TOKENS;
        right.pack(token, tokens);
        if (!symmetric) left.pack(token, tokens);
        for (int64_t s = 0; s < p.count; ++s) {
            const Slab& slab = p.slabs[s];
            for (int64_t n = slab.column / PANEL; n * PANEL < p.columns; ++n) {
                // below the diagonal, a symmetric slab has nothing
                const int64_t end = symmetric ? std::min(slab.row + slab.rows, (n + 1) * PANEL)
                                              : slab.row + slab.rows;
                for (int64_t row = slab.row / TILE_ROWS * TILE_ROWS; row < end; row += TILE_ROWS) {
                    add_tile<Step>(left.panel(row / PANEL) + row % PANEL, right.panel(n), steps, slab,
                                   row, n * PANEL, p.columns, p.fresh && token == 0);
                }
            }
        }
    }
}

static void products(const ProductProblem& p) {
    switch (p.type) {
        case Type::f32: add_products<Singles, float>(p); break;
        case Type::f16: add_products<Singles, half_t>(p); break;
        case Type::bf16: add_products<Pairs, bfloat_t>(p); break;
    }
}
