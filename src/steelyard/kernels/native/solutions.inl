// Solutions with a Cholesky factor, H = U^T U, and sums over the entries of vectors.
//
// Vectors are columns of a matrix; a tile of them goes through the rows of U in panels, whose part above
// the diagonal is copied to be contiguous.

constexpr int SOLVE_PANEL = 24;
constexpr int64_t SOLVE_TILES = 4;  // that share the copy of a panel
static_assert(SOLVE_PANEL % TILE_SUMS == 0, "rows are summed as many at a time");

struct SolveTile {
    const SolveProblem& p;
    int64_t row, n;
    std::vector<float> values;  // (columns, TILE_WIDTH)

    SolveTile(const SolveProblem& problem, int64_t at)
        : p(problem), row(at), n(std::min<int64_t>(TILE_WIDTH, p.rows - at)), values(p.columns * TILE_WIDTH) {
        read_tile(p.values + row, p.rows, p.columns, n, values.data());
    }

    float* at(int64_t i) { return values.data() + i * TILE_WIDTH; }

    static void subtract(float* sum, float factor, const float* from) {
        for (int c = 0; c < TILE_WIDTH; ++c) sum[c] += factor * from[c];
    }

    void divide(int64_t i, const float* sum) {
        const float pivot = p.upper[i * p.columns + i];
        for (int c = 0; c < TILE_WIDTH; ++c) at(i)[c] = (at(i)[c] - sum[c]) / pivot;
    }

    // Rows of U^T y = x; above: (first, last - first), the part of U above them
    void forward(int64_t first, int64_t last, const float* above) {
        float sums[SOLVE_PANEL * TILE_WIDTH] = {};
        add_to_tile(above, 1, last - first, at(0), last - first, first, sums);
        for (int64_t i = first; i < last; ++i) {
            float* sum = sums + (i - first) * TILE_WIDTH;
            for (int64_t k = first; k < i; ++k) subtract(sum, p.upper[k * p.columns + i], at(k));
            divide(i, sum);
        }
    }

    // Rows of U y = x
    void backward(int64_t first, int64_t last) {
        float sums[SOLVE_PANEL * TILE_WIDTH] = {};
        add_to_tile(p.upper + first * p.columns + last, p.columns, 1, at(last), last - first,
                    p.columns - last, sums);
        for (int64_t i = last - 1; i >= first; --i) {
            float* sum = sums + (i - first) * TILE_WIDTH;
            for (int64_t k = i + 1; k < last; ++k) subtract(sum, p.upper[i * p.columns + k], at(k));
            divide(i, sum);
        }
    }

    void write() {
        for (int64_t i = 0; i < p.columns; ++i) std::copy(at(i), at(i) + n, p.values + i * p.rows + row);
    }
};

static void solve(const SolveProblem& p, int threads) {
    const int64_t count = (p.rows + TILE_WIDTH - 1) / TILE_WIDTH;
    const int64_t together = std::min(SOLVE_TILES, (count + threads - 1) / threads);
    parallel_for(count, together, threads, [&](int64_t begin, int64_t end) {
        std::vector<SolveTile> tiles;
        for (int64_t t = begin; t < end; ++t) tiles.emplace_back(p, t * TILE_WIDTH);
        std::vector<float> above(p.both ? p.columns * SOLVE_PANEL : 0);
        for (int64_t first = 0; p.both && first < p.columns; first += SOLVE_PANEL) {
            const int64_t last = std::min<int64_t>(first + SOLVE_PANEL, p.columns);
            for (int64_t k = 0; k < first; ++k) {
                const float* from = p.upper + k * p.columns;
                std::copy(from + first, from + last, above.data() + k * (last - first));
            }
            for (SolveTile& tile : tiles) tile.forward(first, last, above.data());
        }
        for (int64_t last = p.columns; last > 0; last -= SOLVE_PANEL) {
            const int64_t first = std::max<int64_t>(last - SOLVE_PANEL, 0);
            for (SolveTile& tile : tiles) tile.backward(first, last);
        }
        for (SolveTile& tile : tiles) tile.write();
    });
}

// x^T S x of some columns x: the products above the diagonal count twice.
static void quadratic_forms(const VectorsProblem& p, int threads) {
    const int64_t tiles = (p.rows + TILE_WIDTH - 1) / TILE_WIDTH;
    parallel_for(tiles, 1, threads, [&](int64_t t, int64_t) {
        const int64_t row = t * TILE_WIDTH, n = std::min<int64_t>(TILE_WIDTH, p.rows - row);
        std::vector<float> vectors(p.columns * TILE_WIDTH);
        read_tile(p.vectors + row, p.rows, p.columns, n, vectors.data());
        double totals[TILE_WIDTH] = {};
        for (int64_t first = 0; first < p.columns; first += SOLVE_PANEL) {
            const int64_t last = std::min<int64_t>(first + SOLVE_PANEL, p.columns);
            float sums[SOLVE_PANEL * TILE_WIDTH] = {};
            add_to_tile(p.weights + first * p.columns + last, p.columns, 1, vectors.data() + last * TILE_WIDTH,
                        last - first, p.columns - last, sums);
            for (int64_t j = first; j < last; ++j) {
                float* sum = sums + (j - first) * TILE_WIDTH;
                const float *own = vectors.data() + j * TILE_WIDTH, *line = p.weights + j * p.columns;
                for (int64_t k = j + 1; k < last; ++k) {
                    SolveTile::subtract(sum, line[k], vectors.data() + k * TILE_WIDTH);
                }
                for (int c = 0; c < TILE_WIDTH; ++c) {
                    totals[c] += double(own[c]) * (2.0 * double(sum[c]) + double(line[j] * own[c]));
                }
            }
        }
        std::copy(totals, totals + n, p.sums + row);
    });
}

// The sum of the squares of some columns x, each entry with its weight.
static void weighted_squares(const VectorsProblem& p, int threads) {
    const int64_t tiles = (p.rows + TILE_WIDTH - 1) / TILE_WIDTH;
    parallel_for(tiles, 1, threads, [&](int64_t t, int64_t) {
        const int64_t row = t * TILE_WIDTH, n = std::min<int64_t>(TILE_WIDTH, p.rows - row);
        double totals[TILE_WIDTH] = {};
        for (int64_t j = 0; j < p.columns; ++j) {
            const float *x = p.vectors + j * p.rows + row, weight = p.weights[j];
            for (int64_t k = 0; k < n; ++k) totals[k] += double(x[k] * x[k] * weight);
        }
        std::copy(totals, totals + n, p.sums + row);
    });
}
