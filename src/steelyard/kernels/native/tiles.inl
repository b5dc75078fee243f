// Products of a few rows of a matrix with a tile: some vectors of every one of its rows.
//
// All sums are held in registers. They run over STRETCH terms at a time, in order, and the sums of
// stretches are added in order: a result depends neither on threads nor on the width of vectors.

constexpr int STRIP_VECTORS = 4;
constexpr int TILE_WIDTH = STRIP_VECTORS * LANES;
constexpr int TILE_SUMS = LANES == 16 ? 6 : 3;  // rows at once, as far as there are registers
constexpr int PANEL_SUMS = 4 * TILE_SUMS;       // rows that read a stretch of the tile while it is near
constexpr int64_t STRETCH = 128;

// Adds to `to`, (ROWS, TILE_WIDTH), the product of a[r * row_step + k * step] and b[k * TILE_WIDTH].
template <int ROWS>
static inline void add_rows(const float* a, int64_t row_step, int64_t step, const float* b,
                            int64_t count, float* to) {
    vf sums[ROWS][STRIP_VECTORS] = {};
    for (int64_t k = 0; k < count; ++k) {
        vf right[STRIP_VECTORS];
        for (int v = 0; v < STRIP_VECTORS; ++v) right[v] = load(b + k * TILE_WIDTH + v * LANES);
        for (int r = 0; r < ROWS; ++r) {
            const float left = a[r * row_step + k * step];
            for (int v = 0; v < STRIP_VECTORS; ++v) sums[r][v] += left * right[v];
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int v = 0; v < STRIP_VECTORS; ++v) {
            vf* place = reinterpret_cast<vf*>(to + r * TILE_WIDTH + v * LANES);
            *place = *place + sums[r][v];
        }
    }
}

// As add_rows, for any number of rows and terms.
static void add_to_tile(const float* a, int64_t row_step, int64_t step, const float* b, int64_t rows,
                        int64_t count, float* to) {
    for (int64_t from = 0; from < count; from += STRETCH) {
        const int64_t terms = std::min(STRETCH, count - from);
        const float *left = a + from * step, *right = b + from * TILE_WIDTH;
        int64_t r = 0;
        for (; r + TILE_SUMS <= rows; r += TILE_SUMS) {
            add_rows<TILE_SUMS>(left + r * row_step, row_step, step, right, terms, to + r * TILE_WIDTH);
        }
        for (; r < rows; ++r) {
            add_rows<1>(left + r * row_step, row_step, step, right, terms, to + r * TILE_WIDTH);
        }
    }
}

// Copies columns of some rows of a matrix, (count, stride), into a tile and fills it up with zeros.
static void read_tile(const float* from, int64_t stride, int64_t count, int64_t width, float* to) {
    for (int64_t i = 0; i < count; ++i, from += stride, to += TILE_WIDTH) {
        std::memcpy(to, from, size_t(width) * sizeof(float));
        std::fill(to + width, to + TILE_WIDTH, 0.0f);
    }
}

// The squared lengths of the first `entries` entries of U e for the columns e of a matrix.
static void squared_lengths(const LengthsProblem& p, int threads) {
    const int64_t tiles = (p.rows + TILE_WIDTH - 1) / TILE_WIDTH;
    parallel_for(tiles, 1, threads, [&](int64_t begin, int64_t end) {
        std::vector<float> errors(p.columns * TILE_WIDTH);
        for (int64_t t = begin; t < end; ++t) {
            const int64_t row = t * TILE_WIDTH, n = std::min<int64_t>(TILE_WIDTH, p.rows - row);
            read_tile(p.errors + row, p.rows, p.columns, n, errors.data());
            double totals[TILE_WIDTH] = {};
            for (int64_t first = 0; first < p.entries; first += PANEL_SUMS) {
                const int64_t last = std::min<int64_t>(first + PANEL_SUMS, p.entries);
                float sums[PANEL_SUMS * TILE_WIDTH] = {};
                add_to_tile(p.upper + first * p.columns + last, p.columns, 1,
                            errors.data() + last * TILE_WIDTH, last - first, p.columns - last, sums);
                for (int64_t j = first; j < last; ++j) {
                    float* sum = sums + (j - first) * TILE_WIDTH;
                    for (int64_t k = j; k < last; ++k) {
                        const float factor = p.upper[j * p.columns + k];
                        for (int c = 0; c < TILE_WIDTH; ++c) sum[c] += factor * errors[k * TILE_WIDTH + c];
                    }
                    for (int c = 0; c < TILE_WIDTH; ++c) totals[c] += double(sum[c]) * double(sum[c]);
                }
            }
            std::copy(totals, totals + n, p.lengths + row);
        }
    });
}
