// The format float16: weights, keys and values of 16 bits with 5 of exponent, and products in float32.
#pragma once

#include "format.h"
#include "half.h"

namespace trellis {

// A word holds the values of two inputs, the even one below, as in Bf16. Numbers beyond 65504 become that.
struct F16 {
    using Element = uint16_t;
    static constexpr int CHUNK = 64;
    static constexpr int PANEL_WORDS = 2;
    static int depth(int k) { return (k + 1) / 2; }
    static int panel_depth(int k) { return 2 * depth(k); }
    static Element to_element(float x) { return to_half(x); }
    static float to_float(Element x) { return from_half(x); }
    static vf widen(const Element* from) { return load_halves(from); }

    static void encode(const float* from, int k, uint32_t* to) {
        for (int i = 0; i < k / 2; ++i) to[i] = to_half(from[2 * i]) | uint32_t(to_half(from[2 * i + 1])) << 16;
        if (k % 2) to[k / 2] = to_half(from[k - 1]);
    }

    static void decode(const uint32_t* from, int stride, int k, float* to) {
        for (int i = 0; i < k; ++i) to[i] = from_half(uint16_t(from[size_t(i / 2) * stride] >> (i % 2 * 16)));
    }

    static void pack(const float* from, int k, uint32_t* to) {
        std::memcpy(to, from, size_t(k) * 4);
        if (k % 2) to[k] = 0;
    }

    template <int ROWS>
    static inline void step(vf (&sums)[ROWS][2], vu w0, vu w1, const uint32_t* a) {
        add<ROWS>(sums, from_halves(w0 & 0xFFFFu), from_halves(w1 & 0xFFFFu), a);
        add<ROWS>(sums, from_halves(w0 >> 16), from_halves(w1 >> 16), a + ROWS);
    }

private:
    template <int ROWS>
    static inline void add(vf (&sums)[ROWS][2], vf w0, vf w1, const uint32_t* a) {
        for (int r = 0; r < ROWS; ++r) {
            const vf x = splat(load<float>(a + r));
            sums[r][0] += w0 * x;
            sums[r][1] += w1 * x;
        }
    }
};

}  // namespace trellis
