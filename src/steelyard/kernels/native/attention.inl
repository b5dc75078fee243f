// Attention with products of bf16 pairs (kernels/masked_attention.py): softmax(scale q k^T) v.
//
// Scores, their exponentials and all sums are in fp32; what is multiplied by the values is rounded to
// bf16. A query sees one range of keys. Keys that no query of a block sees are skipped. Keys and values
// are packed into panels as in products.inl: a pair along the width for the scores, a pair of keys for
// the output. So each sum has one order, whichever thread computes it.

constexpr int64_t QUERIES = 32;  // of a block
constexpr int64_t TILE = 8;      // queries whose sums are in registers at a time

// 2^x for x <= 0, or close above it.
static inline vf exp2_of(vf x) {
    constexpr float C[6] = {1.0f,          0.693147182f,   0.240226462f,
                            0.0555032815f, 0.00961817323f, 0.00134204037f};
    const vf whole = round_int(x), f = x - whole;
    vf q = splat(C[5]);
    for (int i = 4; i >= 0; --i) q = q * f + C[i];
    return (vf)_mm512_scalef_ps((__m512)q, (__m512)whole);
}

static inline __mmask16 before(int64_t lanes) {
    return lanes >= LANES ? __mmask16(0xffff) : lanes <= 0 ? __mmask16(0) : __mmask16((1u << lanes) - 1);
}

static uint16_t bf16_bits(const bfloat_t& x) { return x.bits; }
static uint16_t bf16_bits(float x) {
    return uint16_t(_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0));
}

static void store_row(float* to, vf x, __mmask16 lanes) { _mm512_mask_storeu_ps(to, lanes, (__m512)x); }
static void store_row(bfloat_t* to, vf x, __mmask16 lanes) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}

// sums[r] += the pairs of row r times the pairs of a panel.
static inline void add_pairs(vf (&sums)[TILE][TILE_VECTORS], const uint32_t* rows, int64_t stride,
                             const uint32_t* panel, int64_t pairs) {
    for (int64_t k = 0; k < pairs; ++k, panel += PANEL) {
        vf right[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; ++v) {
            right[v] = load(reinterpret_cast<const float*>(panel) + v * LANES);
        }
        for (int r = 0; r < TILE; ++r) {
            const __m512bh left = (__m512bh)_mm512_set1_epi32(int32_t(rows[r * stride + k]));
            for (int v = 0; v < TILE_VECTORS; ++v) {
                sums[r][v] = (vf)_mm512_dpbf16_ps((__m512)sums[r][v], left, (__m512bh)right[v]);
            }
        }
    }
}

template <class T>
struct Attention {
    const AttentionProblem& p;
    const int64_t pairs = p.width / 2, panels = (p.keys + PANEL - 1) / PANEL;
    const int64_t key_pairs = panels * PANEL / 2, value_panels = (p.value_width + PANEL - 1) / PANEL;
    const int64_t heads = p.batches * p.key_heads;
    std::vector<uint32_t> keys, values;

    explicit Attention(const AttentionProblem& problem) : p(problem) {
        keys.resize(heads * panels * pairs * PANEL);
        values.resize(heads * value_panels * key_pairs * PANEL);
    }

    static const T* row(const Heads& x, int64_t batch, int64_t head, int64_t token) {
        return static_cast<const T*>(x.data) + batch * x.stride[0] + head * x.stride[1] + token * x.stride[2];
    }

    void pack(int64_t item) {
        const int64_t batch = item / p.key_heads, head = item % p.key_heads;
        uint32_t* to = keys.data() + item * panels * pairs * PANEL;
        for (int64_t t = 0; t < p.keys; ++t) {
            const T* from = row(p.key, batch, head, t);
            uint32_t* place = to + t / PANEL * pairs * PANEL + t % PANEL;
            for (int64_t k = 0; k < pairs; ++k) {
                place[k * PANEL] = bf16_bits(from[2 * k]) | uint32_t(bf16_bits(from[2 * k + 1])) << 16;
            }
        }
        to = values.data() + item * value_panels * key_pairs * PANEL;
        for (int64_t t = 0; t < p.keys; t += 2) {
            const T* first = row(p.value, batch, head, t);
            const T* second = t + 1 < p.keys ? row(p.value, batch, head, t + 1) : nullptr;
            for (int64_t c = 0; c < p.value_width; ++c) {
                const uint32_t high = second == nullptr ? 0 : bf16_bits(second[c]);
                to[(c / PANEL * key_pairs + t / 2) * PANEL + c % PANEL] = bf16_bits(first[c]) | high << 16;
            }
        }
    }

    // Of one block of queries.
    struct Block {
        std::vector<uint32_t> query, weights;  // pairs, of the width and of keys
        std::vector<float> scores;
        int64_t first[QUERIES], last[QUERIES];
        float total[QUERIES];
    };

    Block block() const {
        return {std::vector<uint32_t>(QUERIES * pairs), std::vector<uint32_t>(QUERIES * key_pairs),
                std::vector<float>(QUERIES * panels * PANEL), {}, {}, {}};
    }

    // Replaces the scores of a query by its weights; keys from `from` to `to` are multiplied later.
    void softmax(Block& b, int64_t r, int64_t from, int64_t to) const {
        const float* score = b.scores.data() + r * panels * PANEL;
        auto* weight = reinterpret_cast<uint16_t*>(b.weights.data() + r * key_pairs);
        const float factor = p.scale * 1.44269504f;
        const auto seen = [&](int64_t t) { return __mmask16(before(b.last[r] - t) & ~before(b.first[r] - t)); };
        __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::max());
        for (int64_t t = from; t < to; t += LANES) {
            most = _mm512_mask_max_ps(most, seen(t), most, _mm512_loadu_ps(score + t));
        }
        const vf shift = splat(_mm512_reduce_max_ps(most) * factor);
        vf total = {};
        for (int64_t t = from; t < to; t += LANES) {
            const vf e = exp2_of(load(score + t) * factor - shift);
            const __m512 kept = _mm512_maskz_mov_ps(seen(t), (__m512)e);
            total = total + (vf)kept;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight + t), (__m256i)_mm512_cvtneps_pbh(kept));
        }
        b.total[r] = sum(total);
    }

    void operator()(Block& b, int64_t batch, int64_t head, int64_t start) const {
        const int64_t count = std::min(QUERIES, p.queries - start);
        const int64_t item = batch * p.key_heads + head / (p.heads / p.key_heads);
        int64_t first = p.keys, last = 0;
        std::fill(b.query.begin(), b.query.end(), 0);
        for (int64_t r = 0; r < QUERIES; ++r) {
            b.first[r] = b.last[r] = 0;
            if (r >= count) continue;
            const T* from = row(p.query, batch, head, start + r);
            for (int64_t k = 0; k < pairs; ++k) {
                b.query[r * pairs + k] = bf16_bits(from[2 * k]) | uint32_t(bf16_bits(from[2 * k + 1])) << 16;
            }
            const int64_t place = (p.ranges_per_batch ? batch * p.queries : 0) + start + r;
            b.first[r] = p.first[place];
            b.last[r] = p.last[place];
            first = std::min(first, b.first[r]);
            last = std::max(last, b.last[r]);
        }
        const int64_t from = first / PANEL, to = (last + PANEL - 1) / PANEL;
        for (int64_t n = from; n < to; ++n) {
            const uint32_t* panel = keys.data() + (item * panels + n) * pairs * PANEL;
            for (int64_t r = 0; r < QUERIES; r += TILE) {
                vf sums[TILE][TILE_VECTORS] = {};
                add_pairs(sums, b.query.data() + r * pairs, pairs, panel, pairs);
                for (int i = 0; i < TILE; ++i) {
                    std::memcpy(b.scores.data() + ((r + i) * panels + n) * PANEL, sums[i], sizeof sums[i]);
                }
            }
        }
        for (int64_t r = 0; r < QUERIES; ++r) softmax(b, r, from * PANEL, to * PANEL);
        const int64_t skipped = from * PANEL / 2, used = (last + 1) / 2 - skipped;
        for (int64_t c = 0; c < value_panels; ++c) {
            const uint32_t* panel = values.data() + ((item * value_panels + c) * key_pairs + skipped) * PANEL;
            for (int64_t r = 0; r < QUERIES; r += TILE) {
                vf sums[TILE][TILE_VECTORS] = {};
                add_pairs(sums, b.weights.data() + r * key_pairs + skipped, key_pairs, panel, used);
                for (int64_t i = r; i < std::min(r + TILE, count); ++i) {
                    T* place = static_cast<T*>(p.output) +
                               ((batch * p.queries + start + i) * p.heads + head) * p.value_width + c * PANEL;
                    for (int v = 0; v < TILE_VECTORS; ++v) {
                        const __mmask16 lanes = before(p.value_width - c * PANEL - v * LANES);
                        store_row(place + v * LANES, sums[i - r][v] / b.total[i], lanes);
                    }
                }
            }
        }
    }
};

template <class T>
static void attend(const AttentionProblem& p, int threads) {
    Attention<T> attention(p);
    parallel_for(attention.heads, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) attention.pack(item);
    });
    constexpr int64_t GRAIN = 8;  // blocks, which share buffers
    const int64_t blocks = (p.queries + QUERIES - 1) / QUERIES;
    parallel_for(p.batches * p.heads * blocks, GRAIN, threads, [&](int64_t begin, int64_t end) {
        auto block = attention.block();
        for (int64_t i = begin; i < end; ++i) {
            const int64_t head = i / blocks;
            attention(block, head / p.heads, head % p.heads, i % blocks * QUERIES);
        }
    });
}

static void attention(const AttentionProblem& p, int threads) {
    p.type == Type::f32 ? attend<float>(p, threads) : attend<bfloat_t>(p, threads);
}
