// How numbers lie in packed weights, in panels of activations and in the pool of keys and values.
//
// A format is one struct. What the rest asks of it:
//   depth(k)        words (of 32 bits) of one output's k inputs; a packed block is [depth][BLOCK] words
//   panel_depth(k)  words of one row of activations in a panel
//   encode          k floats -> depth words, as weights and keys have them
//   decode          back, for the lookup of embeddings
//   pack            k floats -> panel_depth words, as activations; pack_block: BLOCK of them, in registers
//   step<ROWS>      one word of depth: adds to ROWS x BLOCK sums the products of BLOCK weights and ROWS activations
//   CHUNK           see tile.h
//   DIRECT          whether it has dot and values, with which a few queries read keys and values as they lie:
//   dot             W partial sums of the product of a key and a packed row of BLOCKS * BLOCK
//   values          the words of BLOCK columns of values that stand at one word of depth
//   Element, to_element: of the pool
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

    static void encode(const float* from, int k, uint32_t* to) { std::memcpy(to, from, size_t(k) * 4); }
    static inline void pack_block(vf low, vf high, uint32_t* to) {
        store(to, low);
        store(to + W, high);
    }
    static void pack(const float* from, int k, uint32_t* to) { std::memcpy(to, from, size_t(k) * 4); }
    static void decode(const uint32_t* from, int stride, int k, float* to) {
        for (int i = 0; i < k; ++i) std::memcpy(to + i, from + size_t(i) * stride, 4);
    }

    static constexpr bool DIRECT = true;
    template <int BLOCKS>
    static inline vf dot(const float* key, const uint32_t* a) {
        vf total = load<vf>(key) * load<vf>(a);
        for (int i = 1; i < 2 * BLOCKS; ++i) total += load<vf>(key + i * W) * load<vf>(a + i * W);
        return total;
    }
    static inline void values(const float* const* rows, int i, int column, vu& w0, vu& w1) {
        w0 = load<vu>(rows[i] + column);
        w1 = load<vu>(rows[i] + column + W);
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

    // Rows of values [n][width], as weights of n inputs: [n][BLOCK] for the outputs from `column` on.
    static void pack_values(const float* const* rows, int n, int column, int width, uint32_t* to) {
        for (int i = 0; i < n; ++i, to += BLOCK) {
            if (width >= BLOCK) {
                std::memcpy(to, rows[i] + column, BLOCK * 4);
            } else {
                std::memcpy(to, rows[i] + column, size_t(width) * 4);
                std::memset(to + width, 0, size_t(BLOCK - width) * 4);
            }
        }
    }
};

// A word holds the values of two inputs, the even one below. Sums are in float32.
struct Bf16 {
    using Element = uint16_t;
    static constexpr int CHUNK = 1 << 30;
    static int depth(int k) { return (k + 1) / 2; }
    static Element to_element(float x) { return to_bf16(x); }

    static void encode(const float* from, int k, uint32_t* to) {
        for (int i = 0; i < k / 2; ++i)
            to[i] = to_bf16(from[2 * i]) | uint32_t(to_bf16(from[2 * i + 1])) << 16;
        if (k % 2) to[k / 2] = to_bf16(from[k - 1]);
    }

    static void decode(const uint32_t* from, int stride, int k, float* to) {
        for (int i = 0; i < k; ++i) to[i] = from_bf16(uint16_t(from[size_t(i / 2) * stride] >> (i % 2 * 16)));
    }

#if defined(__AVX512BF16__)
    static constexpr int PANEL_WORDS = 1;
    static int panel_depth(int k) { return depth(k); }
    static inline void pack_block(vf low, vf high, uint32_t* to) {
        store(to, (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
    static void pack(const float* from, int k, uint32_t* to) {
        int i = 0;
        for (; i + BLOCK <= k; i += BLOCK) pack_block(load<vf>(from + i), load<vf>(from + i + W), to + i / 2);
        if (i < k) encode(from + i, k - i, to + i / 2);
    }

    static constexpr bool DIRECT = true;
    template <int BLOCKS>
    static inline vf dot(const uint16_t* key, const uint32_t* a) {
        __m512 total = _mm512_setzero_ps();
        for (int i = 0; i < BLOCKS; ++i)
            total = _mm512_dpbf16_ps(total, (__m512bh)load<vu>(key + i * BLOCK), (__m512bh)load<vu>(a + i * W));
        return (vf)total;
    }

    template <int ROWS>
    static inline void step(vf (&sums)[ROWS][2], vu words0, vu words1, const uint32_t* a) {
        const __m512bh w0 = (__m512bh)words0, w1 = (__m512bh)words1;
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh x = (__m512bh)splat_bits(a[r]);
            sums[r][0] = (vf)_mm512_dpbf16_ps((__m512)sums[r][0], w0, x);
            sums[r][1] = (vf)_mm512_dpbf16_ps((__m512)sums[r][1], w1, x);
        }
    }
#else
    // No products in bfloat16: weights become float32 in registers, activations are float32 from the start.
    static constexpr int PANEL_WORDS = 2;
    static int panel_depth(int k) { return 2 * depth(k); }
    static inline void pack_block(vf low, vf high, uint32_t* to) {
        store(to, low);
        store(to + W, high);
    }
    static void pack(const float* from, int k, uint32_t* to) {
        std::memcpy(to, from, size_t(k) * 4);
        if (k % 2) to[k] = 0;
    }

    static constexpr bool DIRECT = false;
    template <int BLOCKS>
    static inline vf dot(const uint16_t*, const uint32_t*) {
        return vf{};
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

    static inline void values(const uint16_t* const* rows, int i, int column, vu& w0, vu& w1) {
        const vh low = load<vh>(rows[2 * i] + column), high = load<vh>(rows[2 * i + 1] + column);
        w0 = (vu)interleave<false>(low, high);
        w1 = (vu)interleave<true>(low, high);
    }

    // n is even; see F32.
    static void pack_values(const uint16_t* const* rows, int n, int column, int width, uint32_t* to) {
        for (int i = 0; i < n; i += 2, to += BLOCK) {
            const uint16_t *low = rows[i] + column, *high = rows[i + 1] + column;
            if (width >= BLOCK) {
                vu w0, w1;
                values(rows, i / 2, column, w0, w1);
                store(to, w0);
                store(to + W, w1);
            } else {
                for (int j = 0; j < BLOCK; ++j) to[j] = j < width ? low[j] | uint32_t(high[j]) << 16 : 0;
            }
        }
    }
};

}  // namespace trellis
