// Products of 8-bit integers, summed in 32 bits: exact, hence the same on every instruction set.
#pragma once

#include <cmath>

#include "vec.h"

namespace trellis {

// To the nearest integer, ties to even.
inline vi rounded(vf x) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (vi)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (vi)_mm_cvtps_epi32((__m128)x);
#else
    vi out;
    for (int i = 0; i < W; ++i) out[i] = int(std::lrint(x[i]));
    return out;
#endif
}

inline int total_of(vi v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int total = 0;
    for (int i = 0; i < W; ++i) total += v[i];
    return total;
#endif
}

// Four weights (bytes, 0 .. 255) in each lane. `dot` adds to each lane's sum their products with four activations
// (-127 .. 127), which are the same for all lanes and which QUAD words of a panel hold.
// `put_quads` writes W activations.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)

constexpr int QUAD = 1;

struct Quads {
    vu bytes;
    explicit Quads(vu word) : bytes(word) {}
};

inline vi dot(vi sum, const Quads& w, const uint32_t* a) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w.bytes, (__m512i)splat_bits(*a));
#else
    return (vi)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w.bytes, (int8x16_t)splat_bits(*a));
#endif
}

inline void put_quads(vi values, uint32_t* to) {
#if defined(__AVX512VNNI__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)values));
#else
    static_assert(W == 4, "a register of integers is one word of bytes");
    const vu bytes = (vu)values & 0xFFu;
    *to = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24;
#endif
}

#else

// No such instruction: products of pairs of 16-bit integers. Those of 8 bits in pairs would not be exact: they saturate.
constexpr int QUAD = 2;  // activations 0 and 2, then 1 and 3

struct Quads {
    vu even, odd;
    explicit Quads(vu word) : even(word & 0x00FF00FFu), odd((word >> 8) & 0x00FF00FFu) {}
};

inline vi dot_pairs(vi sum, vu w, uint32_t a) {
#if defined(__AVX512BW__)
    return sum + (vi)_mm512_madd_epi16((__m512i)w, (__m512i)splat_bits(a));
#elif defined(__AVX2__)
    return sum + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)splat_bits(a));
#elif defined(__SSE2__)
    return sum + (vi)_mm_madd_epi16((__m128i)w, (__m128i)splat_bits(a));
#else
    return sum + (vi)(w & 0xFFFFu) * int(int16_t(a)) + (vi)(w >> 16) * int(int16_t(a >> 16));
#endif
}

inline vi dot(vi sum, const Quads& w, const uint32_t* a) {
    return dot_pairs(dot_pairs(sum, w.even, a[0]), w.odd, a[1]);
}

inline void put_quads(vi values, uint32_t* to) {
    for (int i = 0; i < W; i += 4, to += 2)
        for (int odd = 0; odd < 2; ++odd)
            to[odd] = uint16_t(values[i + odd]) | uint32_t(uint16_t(values[i + odd + 2])) << 16;
}

#endif

}  // namespace trellis
