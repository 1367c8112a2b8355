// What all of attention is told: the heads, and one layer's tensors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vec.h"

namespace trellis {

struct HeadShape {
    int heads, kv_heads, head_dim;
    float scale;
    float soft_cap;  // 0: none
    int ratio() const { return heads / kv_heads; }
    int width() const { return heads * head_dim; }
};

constexpr float LOG2_E = 1.44269504f;
constexpr int KEYS = 64;  // keys in a block: their scores are known before any of them gets its weight

// Scores below all that occur, and finite, so that no infinities meet: the largest score of a query before it has seen a
// key, and that of a key it must not see, which is lower still and so gets the weight 0.
constexpr float NOTHING_SEEN = -1e20f, HIDDEN = -1e30f;

// Queries are scaled so that scores, after their cap if there is one, are logarithms of base 2: powers of 2 are the quicker ones.
struct Scaling {
    float queries;  // what they are multiplied by
    float cap;      // 0: none

    explicit Scaling(const HeadShape& s)
        : queries(s.soft_cap > 0 ? s.scale / s.soft_cap : s.scale * LOG2_E), cap(s.soft_cap * LOG2_E) {}
    vf capped(vf score) const { return tanh(score) * cap; }
};

// queries: [rows] with `stride` floats from one to the next, heads one after the other. keys, values: [slots, kv_heads,
// head_dim]. out: [rows, heads * head_dim]. window: 0 for none.
template <class Element>
struct AttentionLayer {
    const float* queries;
    size_t stride;
    const Element *keys, *values;
    int window;
    float* out;
};

// Asks for memory that will be read soon. As a macro's body would be: a function of nothing but prefetches has no effect that
// GCC knows of, and calls of it are dropped.
template <class Element>
__attribute__((always_inline)) inline void fetch(const Element* from, int count) {
    for (int i = 0; i < count; i += int(64 / sizeof(Element))) __builtin_prefetch(from + i, 0, 2);
}

}  // namespace trellis
