// Numbers of 16 bits with 5 bits of exponent (IEEE 754 binary16), in which blocks of quantised weights keep their scales.
#pragma once

#include <cmath>

#include "vec.h"

namespace trellis {

inline float from_half(uint16_t half) {
    const uint32_t magnitude = half & 0x7FFF, sign = uint32_t(half & 0x8000) << 16;
    uint32_t bits = (magnitude << 13) + (112u << 23);
    if (magnitude >= 0x7C00) bits = 0x7F800000u | (magnitude & 0x3FF) << 13;  // infinities and NaN
    float value;
    std::memcpy(&value, &bits, 4);
    if (magnitude < 0x400) value = float(int(magnitude)) * 5.9604644775390625e-8f;  // 2^-24: those without a leading 1
    return sign ? -value : value;
}

// To nearest, ties to even. Beyond the range: the largest, since an infinite scale would make NaN of every weight.
inline uint16_t to_half(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float magnitude = std::fabs(x);
    if (!(magnitude < 65504.0f)) return sign | 0x7BFF;
    if (magnitude < 6.103515625e-5f) return sign | uint16_t(std::lrint(magnitude * 16777216.0f));
    uint32_t bits;
    std::memcpy(&bits, &magnitude, 4);
    bits += 0xFFF + ((bits >> 13) & 1);
    return sign | uint16_t((bits >> 13) - (112u << 10));
}

inline uint16_t load_half(const uint8_t* from) { return uint16_t(from[0] | from[1] << 8); }

// W halves, each the lower part of a word whose upper part is 0.
inline vf from_halves(vu halves) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
#else
    const vu magnitude = halves & 0x7FFFu, sign = (halves & 0x8000u) << 16;
    const vf normal = (vf)((magnitude << 13) + (112u << 23));
    const vf small = __builtin_convertvector((vi)magnitude, vf) * 5.9604644775390625e-8f;
    return (vf)((vu)(magnitude < 0x400u ? small : normal) | sign);
#endif
}

// W halves that lie one after the other.
inline vf load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__) && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    vu halves;
    for (int i = 0; i < W; ++i) halves[i] = from[i];
    return from_halves(halves);
#endif
}

}  // namespace trellis
