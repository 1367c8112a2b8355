// How numbers lie in packed weights, in panels of activations and in the pool of keys and values.
//
// A format is one struct. What the rest asks of it:
//   depth(k)        words (of 32 bits) of one output's k inputs; a packed block is [depth][BLOCK] words
//   panel_depth(k)  words of one row of activations in a panel
//   encode          k floats -> depth words, as weights and keys have them
//   decode          back, for the lookup of embeddings
//   pack            k floats -> panel_depth words, as activations
//   step<ROWS>      one word of depth: adds to ROWS x BLOCK sums the products of BLOCK weights and ROWS activations
//   CHUNK           see tile.h
//   Element         of the pool; to_element, to_float: from and to a float; widen: W of them that lie one after the other
// A format whose blocks carry scales keeps them in words of its own within the block, and uses them in its own tile.
#pragma once

#include "vec.h"

namespace trellis {

struct F32 {
    using Element = float;
    static constexpr int CHUNK = 64;
    static constexpr int PANEL_WORDS = 1;  // words of a panel row for each word of depth
    static int depth(int k) { return k; }
    static int panel_depth(int k) { return k; }
    static Element to_element(float x) { return x; }
    static float to_float(Element x) { return x; }
    static vf widen(const Element* from) { return load<vf>(from); }

    static void encode(const float* from, int k, uint32_t* to) { std::memcpy(to, from, size_t(k) * 4); }
    static void pack(const float* from, int k, uint32_t* to) { std::memcpy(to, from, size_t(k) * 4); }
    static void decode(const uint32_t* from, int stride, int k, float* to) {
        for (int i = 0; i < k; ++i) std::memcpy(to + i, from + size_t(i) * stride, 4);
    }

    template <int ROWS>
    static inline void step(vf (&sums)[ROWS][2], vu words0, vu words1, const uint32_t* a) {
        const vf w0 = (vf)words0, w1 = (vf)words1;
        for (int r = 0; r < ROWS; ++r) {
            const vf x = splat(load<float>(a + r));
            sums[r][0] += w0 * x;
            sums[r][1] += w1 * x;
        }
    }
};

#if defined(__AVX512BF16__)
#define TRELLIS_BF16
// Adds to each lane the products of its two pairs of bfloat16; two registers of floats as pairs, in order.
inline vf add_pairs(vf sum, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
inline vu as_pairs(vf low, vf high) { return (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TRELLIS_BF16
inline vf add_pairs(vf sum, vu a, vu b) { return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b); }
inline vu as_pairs(vf low, vf high) {
    return (vu)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
}
#endif

// A word holds the values of two inputs, the even one below. Sums are in float32.
struct Bf16 {
    using Element = uint16_t;
    static constexpr int CHUNK = 1 << 30;
    static int depth(int k) { return (k + 1) / 2; }
    static Element to_element(float x) { return to_bf16(x); }
    static float to_float(Element x) { return from_bf16(x); }
    static vf widen(const Element* from) { return load_bf16s(from); }

    static void encode(const float* from, int k, uint32_t* to) {
        for (int i = 0; i < k / 2; ++i)
            to[i] = to_bf16(from[2 * i]) | uint32_t(to_bf16(from[2 * i + 1])) << 16;
        if (k % 2) to[k / 2] = to_bf16(from[k - 1]);
    }

    static void decode(const uint32_t* from, int stride, int k, float* to) {
        for (int i = 0; i < k; ++i) to[i] = from_bf16(uint16_t(from[size_t(i / 2) * stride] >> (i % 2 * 16)));
    }

#if defined(TRELLIS_BF16)
    static constexpr int PANEL_WORDS = 1;
    static int panel_depth(int k) { return depth(k); }
    static void pack(const float* from, int k, uint32_t* to) {
        int i = 0;
        for (; i + BLOCK <= k; i += BLOCK) store(to + i / 2, as_pairs(load<vf>(from + i), load<vf>(from + i + W)));
        if (i < k) encode(from + i, k - i, to + i / 2);
    }

    template <int ROWS>
    static inline void step(vf (&sums)[ROWS][2], vu words0, vu words1, const uint32_t* a) {
        for (int r = 0; r < ROWS; ++r) {
            const vu x = splat_bits(a[r]);
            sums[r][0] = add_pairs(sums[r][0], words0, x);
            sums[r][1] = add_pairs(sums[r][1], words1, x);
        }
    }
#else
    // No products in bfloat16: weights become float32 in registers, activations are float32 from the start.
    static constexpr int PANEL_WORDS = 2;
    static int panel_depth(int k) { return 2 * depth(k); }
    static void pack(const float* from, int k, uint32_t* to) {
        std::memcpy(to, from, size_t(k) * 4);
        if (k % 2) to[k] = 0;
    }

    template <int ROWS>
    static inline void step(vf (&sums)[ROWS][2], vu w0, vu w1, const uint32_t* a) {
        const vf even0 = (vf)(w0 << 16), even1 = (vf)(w1 << 16);
        for (int r = 0; r < ROWS; ++r) {
            const vf x = splat(load<float>(a + r));
            sums[r][0] += even0 * x;
            sums[r][1] += even1 * x;
        }
        const vf odd0 = (vf)(w0 & 0xFFFF0000u), odd1 = (vf)(w1 & 0xFFFF0000u);
        for (int r = 0; r < ROWS; ++r) {
            const vf x = splat(load<float>(a + ROWS + r));
            sums[r][0] += odd0 * x;
            sums[r][1] += odd1 * x;
        }
    }
#endif
};

}  // namespace trellis
