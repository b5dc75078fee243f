// Reads a group, whatever its type and strides, into contiguous floats.

template <class T>
static inline void widen_row(const T* from, int64_t stride, int64_t n, float* to) {
    if (stride == 1) {
        for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i]);
    } else {
        for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i * stride]);
    }
}

static inline void widen_row(const void* data, Type type, int64_t offset, int64_t stride, int64_t n,
                             float* to) {
    switch (type) {
        case Type::f32: widen_row(static_cast<const float*>(data) + offset, stride, n, to); break;
        case Type::f16: widen_row(static_cast<const half_t*>(data) + offset, stride, n, to); break;
        case Type::bf16: widen_row(static_cast<const bfloat_t*>(data) + offset, stride, n, to); break;
    }
}

// Elements [begin, end) of group g, counted over (n, h, w), into `to`.
static void gather(const View& v, int64_t g, int64_t begin, int64_t end, float* to) {
    const int64_t width = v.size[4];
    const int64_t base = v.group_offset(g);
    if (v.size[0] == 1 && v.size[3] == 1) {
        widen_row(v.data, v.type, base + begin * v.stride[4], v.stride[4], end - begin, to);
        return;
    }
    while (begin < end) {
        const int64_t row = begin / width, column = begin % width;
        const int64_t n = row / v.size[3], h = row % v.size[3];
        const int64_t count = std::min(width - column, end - begin);
        const int64_t offset = base + n * v.stride[0] + h * v.stride[3] + column * v.stride[4];
        widen_row(v.data, v.type, offset, v.stride[4], count, to);
        to += count;
        begin += count;
    }
}

static View weight_view(const View& values, const float* weights, const int64_t* strides) {
    View view = values;
    view.data = weights;
    view.type = Type::f32;
    std::copy(strides, strides + 5, view.stride);
    return view;
}

// One group's values (and weights) as the searches need them: padded with zeros to whole vectors,
// and scaled near 1 by a power of two where their magnitude would overflow or underflow.
struct Group {
    std::vector<float> x, w;
    int64_t padded = 0;
    double unit = 1.0;  // the factor multiplied in

    void fill(const View& values, const View* weights, int64_t g, int64_t begin, int64_t end,
              float absmax) {
        const int64_t count = end - begin;
        padded = (count + LANES - 1) / LANES * LANES;
        x.resize(padded);
        gather(values, g, begin, end, x.data());
        std::fill(x.begin() + count, x.end(), 0.0f);
        unit = 1.0;
        if (absmax > 0 && (absmax < 1e-20f || absmax > 1e20f)) {
            unit = std::ldexp(1.0, -std::ilogb(absmax));
            for (int64_t i = 0; i < count; ++i) x[i] = float(x[i] * unit);
        }
        if (weights != nullptr) {
            w.resize(padded);
            gather(*weights, g, begin, end, w.data());
            std::fill(w.begin() + count, w.end(), 0.0f);
        }
    }
};
