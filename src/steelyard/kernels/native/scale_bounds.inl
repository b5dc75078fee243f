// Which scales of an interval can be the best of a group: symmetric integers, the norms 2 and 3.
//
// At a scale c, a value of magnitude y (in units of c) has the code k and the difference d = y - k.
// As long as no value changes its code, the error at the scale c (1 + z) is the sum of
// weight * |d - z k|^norm, of which
//     norm 2:  |d - z k|^2  = d^2 - 2 d k z + k^2 z^2
//     norm 3:  |d - z k|^3 >= |d|^3 - 3 d |d| k z + 3/2 |d| k^2 z^2
// A change of code gains. Where all scales of a block reach to z = t, a value may get a lower code above
// c if e = (1 + t) (k - 1/2) - y > 0, and a higher one below c if e = y - (1 - t) (k + 1/2) > 0. That is
// by how far it may get beyond the middle of two codes, h from both, and it gains at most
//     norm 2:  (h + e)^2 - (h - e)^2 = 4 h e, for e <= 2 h
//     norm 3:  (6 h^2 + 2 e^2) e
// e is convex in t and zero at t = 0, so at z it is at most z / t of that. The sums of all these terms
// give a quadratic function of z below the error of every scale of the block, from one pass over the
// group. Scales where it is above the error of some scale cannot win.
//
// With both signs allowed, the codes -8..7 of a scale s and those of -s lie on the grid -8..8 of s. One
// pass with that grid bounds the errors of both, and sums up what the missing code costs either.
//
// A lane holds a scale, and values are taken one after another: lane_sums.inl.

static constexpr float REACH = 0.4f;   // of a code, by which values may move within a block
static constexpr int EVALUATED = 64;    // so few codes are tried without another round of blocks
static constexpr float WIDEST = 0x1p20f;  // last scale over the first
static constexpr float FAR_UP = 1.8f;   // from this multiple of the lowest scale on, blocks are wider

struct ScaleRange {  // codes from first to last; sign 0: scales of both signs
    int sign, first, last;
};

struct Contender {
    int sign, code;
    double error;
};

class ScaleBounds {
  public:
    std::vector<Contender> contenders;  // codes that can be the best, and their errors
    double size = 0;                    // the error if all were rounded to zero

    ScaleBounds(const Codes& codes_, const Rounding& r, bool w, bool cubed)
        : codes(codes_), rounding(r), largest(std::max(r.qmax, -r.qmin)), cubes(cubed), weighted(w) {
#define STEELYARD_LANES(NORM, WEIGHTED) \
    sum_both = lane_sums<NORM, WEIGHTED, true>; \
    sum_one = lane_sums<NORM, WEIGHTED, false>; \
    evaluate_lanes = lane_errors<NORM, WEIGHTED>; \
    group_size = size_of<NORM, WEIGHTED>;
        if (cubed && w) { STEELYARD_LANES(3, true) }
        else if (cubed) { STEELYARD_LANES(3, false) }
        else if (w) { STEELYARD_LANES(2, true) }
        else { STEELYARD_LANES(2, false) }
#undef STEELYARD_LANES
    }

    // Finds the contenders within the intervals, each of one sign, of which some have an error of at
    // most `bound`, in units of the values. Errors of contenders are in units of the lowest scale.
    // There are none where fp32 does not reach so far.
    void search(const Group& group, float absmax, const std::vector<ScaleRange>& intervals, double bound) {
        ranges = intervals;
        bool both = intervals.size() == 2;
        if (both) {
            const ScaleRange &a = intervals[0], &b = intervals[1];
            ranges.assign(1, {0, std::min(a.first, b.first), std::max(a.last, b.last)});
        }
        contenders.clear();
        list_values();
        if (values.back() > WIDEST * values[0]) return;
        split_group.fill(group, weighted, 0.99f * rounding.qmax * values[0]);
        size = group_size(group, unit);
        if (bound < NO_LIMIT) bound = bound / raised(values[0]) + 1e-7 * size;
        int count = count_of(ranges), before = 2 * count;
        while (both || (count > EVALUATED && 4 * count < 3 * before)) {
            split(count);
            bound = narrow(absmax, both, bound);
            before = count;
            count = count_of(ranges);
            both = false;
        }
        evaluate(intervals);
    }

  private:
    const Codes& codes;
    const Rounding& rounding;
    const float largest;
    const bool cubes, weighted;
    SplitGroup split_group;
    int base = 0;    // the first code of `values`
    float unit = 0;  // one over its scale
    std::vector<float> values;
    void (*sum_one)(const SplitGroup&, const Rounding&, const LaneScales&, LaneSums*);
    void (*sum_both)(const SplitGroup&, const Rounding&, const LaneScales&, LaneSums*);
    void (*evaluate_lanes)(const SplitGroup&, const Rounding&, const float*, double*);
    double (*group_size)(const Group&, float);
    std::vector<ScaleRange> ranges, blocks;
    std::vector<LaneScales> scales;
    std::vector<LaneSums> sums;
    std::vector<float> inverse, costs;
    std::vector<double> errors;

    static int count_of(const std::vector<ScaleRange>& of) {
        int count = 0;
        for (const ScaleRange& each : of) count += each.last - each.first + 1;
        return count;
    }

    float value(int code) const { return values[code - base]; }

    void list_values() {
        int last = 0;
        base = codes.last;
        for (const ScaleRange& each : ranges) {
            base = std::min(base, each.first);
            last = std::max(last, each.last);
        }
        values.resize(last - base + 1);
        if (codes.type == ScaleType::f16) {
            for (int code = base; code <= last; ++code) values[code - base] = codes.value(code);
        } else {
            for (int code = base; code <= last; ++code) values[code - base] = from_bits(uint32_t(code) << 16);
        }
        unit = 1 / values[0];
    }

    // The code of s, or the one that `added` bits make of it.
    int code_at(float s, int added) const {
        const int bits = int(to_bits(std::max(s, 0.0f)));
        if (codes.type != ScaleType::f16) return (bits + added) >> 16;
        return ((bits + (added >> 3)) >> 13) - (112 << 10);
    }

    static int center(const ScaleRange& block) { return block.first + (block.last - block.first) / 2; }

    double raised(double scale) const { return cubes ? scale * scale * scale : scale * scale; }
    vf raised(vf scale) const { return cubes ? scale * scale * scale : scale * scale; }

    // Splits the ranges into blocks: a multiple of 16, and so many that most values keep their code
    // within a block. Where scales are far too large, blocks twice as wide are excluded as well.
    void split(int count) {
        const float apart = codes.type == ScaleType::f16 ? 1 / 1400.0f : 1 / 175.0f;  // on average
        const float far = FAR_UP * values[0];
        float steps = count;
        for (const ScaleRange& each : ranges) {
            steps -= 0.5f * std::max(0, each.last - std::max(each.first, code_at(far, 0)));
        }
        const size_t lanes = (size_t(steps * apart * (largest + 0.5f) / (2 * REACH)) / 16 + 1) * 16;
        for (int size = int(steps / lanes) + 1;; ++size) {
            blocks.clear();
            for (const ScaleRange& each : ranges) {
                for (int first = each.first; first <= each.last;) {
                    const int wide = value(first) >= far ? 2 * size : size;
                    blocks.push_back({each.sign, first, std::min(each.last, first + wide - 1)});
                    first += wide;
                }
            }
            if (blocks.size() <= lanes || size >= count) return;
        }
    }

    // Replaces ranges by the parts of blocks that are not excluded; returns the new bound.
    double narrow(float absmax, bool both, double bound) {
        const size_t vectors = (blocks.size() + LANES - 1) / LANES;
        scales.resize(vectors);
        sums.resize(vectors);
        for (size_t v = 0; v < vectors; ++v) {
            LaneScales& at = scales[v];
            for (int lane = 0; lane < LANES; ++lane) {
                const ScaleRange& b = blocks[std::min(v * LANES + lane, blocks.size() - 1)];
                at.scale[lane] = value(center(b));
                at.inverse[lane] = b.sign < 0 ? -1.0f : 1.0f;
                at.above[lane] = value(b.last);
                at.below[lane] = value(b.first);
            }
            const vf c = load(at.scale);
            put(at.inverse, load(at.inverse) / c);
            put(at.above, (load(at.above) - c) / c);
            put(at.below, (c - load(at.below)) / c);
            (both ? sum_both : sum_one)(split_group, rounding, at, &sums[v]);
            const vf least = load(sums[v].error) + vmin(load(sums[v].positive), load(sums[v].negative));
            float in_units[LANES];
            put(in_units, least * raised(c * unit));
            for (const float each : in_units) bound = std::min(bound, each + 1e-7 * size);
        }
        const float limit = float(bound * (1 + 1e-4));
        ranges.clear();
        for (int sign : {1, -1}) {
            if (sign < 0 && !both) break;
            list_costs(both ? sign : 0);
            for (size_t v = 0; v < vectors; ++v) {
                const vf lowest = load(scales[v].scale) * (1.0f - load(scales[v].below));
                float low[2][LANES], high[2][LANES];
                for (int side = 0; side < 2; ++side) {
                    const vf cost = load(costs.data() + v * LANES + side);
                    const vf allowed = limit - (absmax < (2 * largest - 1) * lowest ? cost : vf{});
                    open(scales[v], sums[v], allowed, side, low[side], high[side]);
                }
                float widest[LANES];
                put(widest, vmax(load(high[0]) - load(low[0]), load(high[1]) - load(low[1])));
                for (int lane = 0; lane < LANES && v * LANES + lane < blocks.size(); ++lane) {
                    if (widest[lane] < 0) continue;
                    const ScaleRange& b = blocks[v * LANES + lane];
                    const int of = both ? sign : b.sign;
                    keep(of, b.first, center(b), low[0][lane], high[0][lane]);
                    keep(of, center(b) + 1, b.last, low[1][lane], high[1][lane]);
                }
            }
        }
        return bound;
    }

    // Fills `costs`, per lane, with what a sign loses by the code that it lacks. It loses more the smaller
    // the scale, as long as no value is beyond 2 largest - 1: at smaller scales of the block at least
    // that, at larger ones at least that of the next block.
    void list_costs(int sign) {
        costs.assign(scales.size() * LANES + 1, 0.0f);
        for (size_t v = 0; sign != 0 && v < scales.size(); ++v) {
            const vf cost = vmax(load(sign > 0 ? sums[v].positive : sums[v].negative), vf{});
            put(costs.data() + v * LANES, cost * raised(load(scales[v].scale) * unit));
        }
    }

    // From where to where the scales of a block are not excluded that are below (side 0) or above the
    // one of its lane.
    void open(const LaneScales& at, const LaneSums& of, vf limit, int side, float* low, float* high) const {
        const float norm = cubes ? 3.0f : 2.0f;
        const vf c = load(at.scale), t = load(side == 0 ? at.below : at.above), zero = {};
        const vf h = side == 0 ? splat(0.5f) : 0.5f + 0.5f * t, e = t * (largest + 0.5f);
        const vf gain = cubes ? 6.0f * h * h + 2.0f * e * e : 4.0f * h;
        const vf gained = gain * load(side == 0 ? of.below : of.above) / vmax(t, splat(1e-20f));
        // the error at z is at least `limit` more than beyond - slope z + curvature z^2
        const vf beyond = load(of.error) - limit / raised(c * unit);
        const vf slope = gained + (side == 0 ? -norm : norm) * load(of.slope);
        const vf curvature = load(of.curvature) * (cubes ? 1.5f : 1.0f);
        const vf square = slope * slope - 4.0f * curvature * beyond, tiny = splat(1e-30f);
        float roots[LANES];
        put(roots, vmax(square, zero));
        for (float& each : roots) each = std::sqrt(each);
        const vf root = load(roots);
        // neither solution may lose its digits
        const vf first = 2.0f * beyond / vmax(slope + root, tiny);
        const vf last = (slope > zero ? slope + root : -2.0f * beyond) /
                        vmax(slope > zero ? 2.0f * curvature : root - slope, tiny);
        const vf none = beyond > zero ? vmax(-square, -slope) : splat(-1.0f);
        vf from = beyond > zero ? first * (1 - 1e-5f) - 1e-6f : splat(-1e-6f);
        vf to = vmin(last, splat(2.0f)) * (1 + 1e-5f) + 1e-6f;
        from = none > zero ? splat(1.0f) : from;
        to = none > zero ? splat(-1.0f) : to;
        if (!cubes) {  // no value may get beyond a whole code
            const vf far = e + t - 1.0f;
            from = far > zero ? splat(-2.0f) : from;
            to = far > zero ? splat(2.0f) : to;
        }
        put(low, side == 0 ? c - c * to : c + c * from);
        put(high, side == 0 ? c - c * from : c + c * to);
    }

    // Adds the codes from first to last whose scales are within [low, high].
    void keep(int sign, int first, int last, float low, float high) {
        if (low > high || first > last) return;
        if (codes.type != ScaleType::f16 || low >= 0x1p-14f) {  // no subnormal fp16
            first = std::max(first, code_at(low, 0xffff));
            last = std::min(last, code_at(high, 0));
            if (first > last) return;
        }
        if (!ranges.empty() && ranges.back().sign == sign && ranges.back().last == first - 1) {
            ranges.back().last = last;
        } else {
            ranges.push_back({sign, first, last});
        }
    }

    void evaluate(const std::vector<ScaleRange>& intervals) {
        size_t count = 0;
        contenders.resize(intervals.size() * count_of(ranges));
        inverse.resize(contenders.size() + LANES);
        for (const ScaleRange& in : intervals) {
            for (const ScaleRange& each : ranges) {
                if (each.sign != 0 && each.sign != in.sign) continue;
                const int last = std::min(each.last, in.last);
                for (int code = std::max(each.first, in.first); code <= last; ++code) {
                    contenders[count] = {in.sign, code, 0.0};
                    inverse[count++] = in.sign / value(code);
                }
            }
        }
        contenders.resize(count);
        std::fill(inverse.begin() + count, inverse.end(), 1.0f);
        errors.resize(count + LANES);
        for (size_t i = 0; i < count; i += LANES) {
            evaluate_lanes(split_group, rounding, inverse.data() + i, errors.data() + i);
        }
        for (size_t i = 0; i < count; ++i) {
            contenders[i].error = errors[i] * raised(double(value(contenders[i].code) * unit));
        }
    }
};
