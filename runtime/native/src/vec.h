// Vectors of the widest registers that the instruction set has, in the compiler's own vector types.
// One source serves AVX-512, AVX2, SSE2 and NEON; what they lack is written out in few operations.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace trellis {

#if defined(__AVX512F__)
constexpr int W = 16;        // floats in a register
constexpr int MAX_ROWS = 12;  // rows of activations in one tile: 2 * 12 of 32 registers hold sums
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int MAX_ROWS = 6;
#else
constexpr int W = 4;
constexpr int MAX_ROWS = 6;
#endif

constexpr int BLOCK = 2 * W;  // outputs of a packed block of weights: two registers

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 4)));  // twice as many halves of words

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
}

template <class V>
inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof(V));
}

inline vf splat(float x) { return x - vf{}; }  // x - 0 is x, also for -0: no operation is left of it
inline vu splat_bits(uint32_t x) { return x + vu{}; }
#if defined(__AVX512F__)  // of the general form the compiler makes a comparison and a choice
inline vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
#endif

inline vi lanes() {
    vi v;
    for (int i = 0; i < W; ++i) v[i] = i;
    return v;
}

inline float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < W; ++i) total += v[i];
    return total;
#endif
}

inline float largest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// e^x with a relative error below 2e-7; 0 below -87. Polynomial of Cephes (Moshier), expf.
inline vf exp(vf x) {
    const vf kept = min(max(x, splat(-87.0f)), splat(88.0f));
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vf shifted = kept * 1.44269504f + magic;
    vf n = shifted - magic;
    vf r = kept - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi power = ((vi)shifted - 0x4B400000 + 127) << 23;
    return (vf)((vi)(p * (vf)power) & (x > splat(-87.0f)));
}

// 2^x, as above; 0 below -125. Polynomial: Chebyshev nodes on [-1/2, 1/2], error below 1e-7.
inline vf exp2(vf x) {
    const vf kept = min(max(x, splat(-125.0f)), splat(127.0f));
    const float magic = 12582912.0f;
    const vf shifted = kept + magic;
    const vf r = kept - (shifted - magic);
    vf p = splat(1.5370704815e-04f);
    p = p * r + 1.3399848291e-03f;
    p = p * r + 9.6183732514e-03f;
    p = p * r + 5.5503290352e-02f;
    p = p * r + 2.4022648462e-01f;
    p = p * r + 6.9314720558e-01f;
    p = p * r + 1.0f;
    const vi power = ((vi)shifted - 0x4B400000 + 127) << 23;
    return (vf)((vi)(p * (vf)power) & (x > splat(-125.0f)));
}

inline vf tanh(vf x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }
inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

// bfloat16 is the upper half of a float. Rounded to nearest, ties to even, as everywhere.
inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// W of them that lie one after the other.
inline vf load_bf16s(const uint16_t* from) {
    typedef uint16_t quarter __attribute__((vector_size(W * 2)));
    return (vf)(__builtin_convertvector(load<quarter>(from), vu) << 16);
}

#if defined(__clang__)
template <class V, int OFFSET, int... I>
inline V interleaved(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (OFFSET + I / 2 + I % 2 * int(sizeof...(I)))...);
}
#endif

// a0 b0 a1 b1 ... of the lower or the upper halves of two vectors with N elements.
template <bool UPPER, class V, int N = int(sizeof(V) / sizeof(V{}[0]))>
inline V interleave(V a, V b) {
    constexpr int offset = UPPER ? N / 2 : 0;
#if defined(__clang__)
    return interleaved<V, offset>(a, b, std::make_integer_sequence<int, N>());
#else
    V which;
    for (int i = 0; i < N; ++i) which[i] = i / 2 + offset + i % 2 * N;
    return __builtin_shuffle(a, b, which);
#endif
}

// W x W words, in registers. Interleaving rows i and i + W/2 rotates the bits of each word's place (row, column)
// by one; after log2(W) rounds row and column have changed places.
inline void transpose(vu (&rows)[W]) {
    for (int round = 1; round < W; round *= 2) {
        vu next[W];
        for (int i = 0; i < W / 2; ++i) {
            next[2 * i] = interleave<false>(rows[i], rows[i + W / 2]);
            next[2 * i + 1] = interleave<true>(rows[i], rows[i + W / 2]);
        }
        for (int i = 0; i < W; ++i) rows[i] = next[i];
    }
}

// The sums of W vectors, as one vector: the same rotation, but the two rows of each pair are added.
inline vf sums_of(vf (&rows)[W]) {
    for (int n = W / 2; n >= 1; n /= 2)
        for (int i = 0; i < n; ++i) {
            const vu a = (vu)rows[i], b = (vu)rows[i + n];
            rows[i] = (vf)interleave<false>(a, b) + (vf)interleave<true>(a, b);
        }
    return rows[0];
}

// BLOCK rows of `depth` words each become [depth][BLOCK].
inline void transpose_block(const uint32_t* const* rows, int depth, uint32_t* to) {
    for (int half = 0; half < 2; ++half) {
        const uint32_t* const* from = rows + half * W;
        int column = 0;
        for (; column + W <= depth; column += W) {
            vu square[W];
            for (int i = 0; i < W; ++i) square[i] = load<vu>(from[i] + column);
            transpose(square);
            for (int i = 0; i < W; ++i) store(to + (column + i) * BLOCK + half * W, square[i]);
        }
        for (; column < depth; ++column)
            for (int i = 0; i < W; ++i) to[column * BLOCK + half * W + i] = from[i][column];
    }
}

}  // namespace trellis
