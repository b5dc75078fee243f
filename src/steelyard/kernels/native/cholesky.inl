// The Cholesky factor of a matrix with its rows and columns in another order: U^T U = H, of which only
// the upper triangle is written.
//
// Rows are taken in blocks. A block first loses its products with the rows above it, a tile of
// columns at a time; then its diagonal part is factorised, and the rest divided by that.

constexpr int64_t CHOLESKY_ROWS = 96;
constexpr int64_t CHOLESKY_DEPTH = 256;  // rows above that are packed at a time

struct CholeskyBlock {
    float* matrix;
    int64_t size, first, rows;

    float* row(int64_t i) const { return matrix + i * size; }
    int64_t width(int64_t column) const { return std::min<int64_t>(TILE_WIDTH, size - column); }

    // left: (first, rows), the columns of the block in the rows above it
    void subtract_above(int64_t column, const float* left, float* packed, float* sums) const {
        std::fill(sums, sums + rows * TILE_WIDTH, 0.0f);
        for (int64_t from = 0; from < first; from += CHOLESKY_DEPTH) {
            const int64_t count = std::min(CHOLESKY_DEPTH, first - from);
            read_tile(row(from) + column, size, count, width(column), packed);
            add_to_tile(left + from * rows, 1, rows, packed, rows, count, sums);
        }
        for (int64_t i = 0; i < rows; ++i) {
            float* to = row(first + i) + column;
            for (int64_t c = 0; c < width(column); ++c) to[c] -= sums[i * TILE_WIDTH + c];
        }
    }

    // The diagonal part; false if it is not positive definite.
    bool factorise() const {
        for (int64_t i = 0; i < rows; ++i) {
            float* pivots = row(first + i) + first;
            const uint32_t bits = to_bits(pivots[i]);  // comparisons of floats know no NaN here
            if (bits == 0 || bits >= 0x7f800000u) return false;  // not above zero, or not finite
            const float root = std::sqrt(pivots[i]);
            for (int64_t c = i; c < rows; ++c) pivots[c] /= root;
            for (int64_t below = i + 1; below < rows; ++below) {
                const float factor = pivots[below];
                float* to = row(first + below) + first;
                for (int64_t c = below; c < rows; ++c) to[c] -= factor * pivots[c];
            }
        }
        return true;
    }

    // Columns right of the diagonal part, divided by its transpose from the left.
    void divide(int64_t column, float* tile, float* sums) const {
        read_tile(row(first) + column, size, rows, width(column), tile);
        for (int64_t from = 0; from < rows; from += TILE_SUMS) {
            const int64_t count = std::min<int64_t>(TILE_SUMS, rows - from);
            std::fill(sums, sums + count * TILE_WIDTH, 0.0f);
            add_to_tile(row(first) + first + from, 1, size, tile, count, from, sums);
            for (int64_t i = from; i < from + count; ++i) {
                float *to = tile + i * TILE_WIDTH, *sum = sums + (i - from) * TILE_WIDTH;
                for (int64_t k = from; k < i; ++k) {
                    const float factor = row(first + k)[first + i];
                    for (int c = 0; c < TILE_WIDTH; ++c) sum[c] += factor * tile[k * TILE_WIDTH + c];
                }
                const float pivot = row(first + i)[first + i];
                for (int c = 0; c < TILE_WIDTH; ++c) to[c] = (to[c] - sum[c]) / pivot;
            }
        }
        for (int64_t i = 0; i < rows; ++i) {
            std::copy(tile + i * TILE_WIDTH, tile + i * TILE_WIDTH + width(column), row(first + i) + column);
        }
    }
};

// The upper triangle of H / mean in the order of the problem, with more on its diagonal.
static void reorder(const CholeskyProblem& p) {
    for (int64_t i = 0; i < p.size; ++i) {
        const float* from = p.hessian + p.order[i] * p.size;
        float* to = p.upper + i * p.size;
        for (int64_t j = i; j < p.size; ++j) to[j] = from[p.order[j]] / p.mean;
        to[i] += p.added[i];
    }
}

static bool cholesky(const CholeskyProblem& p, int threads) {
    reorder(p);
    const int64_t size = p.size;
    std::vector<float> left(size * CHOLESKY_ROWS);
    for (int64_t first = 0; first < size; first += CHOLESKY_ROWS) {
        const CholeskyBlock block{p.upper, size, first, std::min(CHOLESKY_ROWS, size - first)};
        const int64_t last = first + block.rows;
        for (int64_t k = 0; k < first; ++k) {
            std::copy(block.row(k) + first, block.row(k) + last, left.data() + k * block.rows);
        }
        parallel_for((size - first + TILE_WIDTH - 1) / TILE_WIDTH, 4, threads, [&](int64_t t, int64_t end) {
            std::vector<float> packed(CHOLESKY_DEPTH * TILE_WIDTH), sums(CHOLESKY_ROWS * TILE_WIDTH);
            for (; t < end; ++t) {
                block.subtract_above(first + t * TILE_WIDTH, left.data(), packed.data(), sums.data());
            }
        });
        if (!block.factorise()) return false;
        parallel_for((size - last + TILE_WIDTH - 1) / TILE_WIDTH, 4, threads, [&](int64_t t, int64_t end) {
            std::vector<float> tile(CHOLESKY_ROWS * TILE_WIDTH), sums(TILE_SUMS * TILE_WIDTH);
            for (; t < end; ++t) block.divide(last + t * TILE_WIDTH, tile.data(), sums.data());
        });
    }
    return true;
}
