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
// (-127 .. 127), which are the same for all lanes and which QUAD words of a panel hold, `rows` words apart.
#if defined(__AVX512VNNI__)

constexpr int QUAD = 1;

struct Quads {
    vu bytes;
    explicit Quads(vu word) : bytes(word) {}
};

inline vi dot(vi sum, const Quads& w, const uint32_t* a, int) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w.bytes, (__m512i)splat_bits(*a));
}

inline void put_quad(const int8_t* from, uint32_t* to) { std::memcpy(to, from, 4); }

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

inline vi dot(vi sum, const Quads& w, const uint32_t* a, int rows) {
    return dot_pairs(dot_pairs(sum, w.even, a[0]), w.odd, a[rows]);
}

inline void put_quad(const int8_t* from, uint32_t* to) {
    to[0] = uint16_t(from[0]) | uint32_t(uint16_t(from[2])) << 16;
    to[1] = uint16_t(from[1]) | uint32_t(uint16_t(from[3])) << 16;
}

#endif

}  // namespace trellis
