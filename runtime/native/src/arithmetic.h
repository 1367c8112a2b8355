// What attention computes with, for each format of the pool: words of 32 bits that hold one or two numbers.
//
//   PER_WORD   how many
//   words      W words of W * PER_WORD floats, scaled
//   keys       count elements of one key -> words
//   values     PER_WORD rows of values, count of each -> count words, in each those of one column
//   pack       PER_WORD vectors of weights -> one vector of words, for a product with `values`
//   pack_row   count weights of one query, in place: a word has PER_WORD of them, one after the other
//   step       sum += the products of two words, lane by lane
//   power      2^x as exact as the weights are kept; x <= 0
//   dot        W partial sums of the product of a key as it lies in the pool, and words of a query. count: of elements
//   columns    BLOCK columns of PER_WORD rows of values, as they lie, as `values` has them
#pragma once

#include "float16.h"
#include "format.h"
#include "heads.h"

namespace trellis {

template <class F>
inline void widen_row(const typename F::Element* from, int count, float* to) {
    int i = 0;
    for (; i + W <= count; i += W) store(to + i, F::widen(from + i));
    for (; i < count; ++i) to[i] = F::to_float(from[i]);
}

// In float32, whatever the pool keeps.
template <class F>
struct Arithmetic {
    using Element = typename F::Element;
    static constexpr int PER_WORD = 1;

    static vu words(const float* from, float scale) { return (vu)(load<vf>(from) * scale); }
    static void keys(const Element* from, int count, uint32_t* to) { widen_row<F>(from, count, reinterpret_cast<float*>(to)); }
    static void values(const Element* const* rows, int count, uint32_t* to) { keys(rows[0], count, to); }
    static vu pack(const vf (&weights)[1]) { return (vu)weights[0]; }
    static void pack_row(float*, int) {}
    static vf step(vf sum, vu a, vu b) { return sum + (vf)a * (vf)b; }
    static vf power(vf x) { return exp2(x); }

    static vf dot(const Element* key, const uint32_t* query, int count) {
        vf sum = F::widen(key) * load<vf>(query);
        for (int i = W; i < count; i += W) sum += F::widen(key + i) * load<vf>(query + i);
        return sum;
    }
    static void columns(const Element* const* rows, int column, vu& low, vu& high) {
        low = (vu)F::widen(rows[0] + column);
        high = (vu)F::widen(rows[0] + column + W);
    }
};

#if defined(TRELLIS_BF16)
// Pairs of bfloat16, whose products the processor adds up in float32.
template <>
struct Arithmetic<Bf16> {
    using Element = uint16_t;
    static constexpr int PER_WORD = 2;

    static vu words(const float* from, float scale) { return as_pairs(load<vf>(from) * scale, load<vf>(from + W) * scale); }
    static void keys(const Element* from, int count, uint32_t* to) {
        int i = 0;
        for (; i + BLOCK <= count; i += BLOCK) store(to + i / 2, load<vu>(from + i));
        for (; i < count; i += 2) to[i / 2] = from[i] | (i + 1 < count ? uint32_t(from[i + 1]) << 16 : 0);
    }
    static void values(const Element* const* rows, int count, uint32_t* to) {
        int i = 0;
        for (; i + BLOCK <= count; i += BLOCK) {
            vu low, high;
            columns(rows, i, low, high);
            store(to + i, low);
            store(to + i + W, high);
        }
        for (; i < count; ++i) to[i] = rows[0][i] | uint32_t(rows[1][i]) << 16;
    }
    // Halves of words from two vectors take turns.
    static vu pack(const vf (&weights)[2]) {
#if defined(__AVX512F__)
        const vu turns = (vu)lanes() * 0x10001u + (uint32_t(W) << 16);
        return (vu)_mm512_permutexvar_epi16((__m512i)turns, (__m512i)as_pairs(weights[0], weights[1]));
#else
        return (vu)interleave<false>((vh)as_pairs(weights[0], weights[0]), (vh)as_pairs(weights[1], weights[1]));
#endif
    }
    static void pack_row(float* weights, int count) {
        for (int i = 0; i < count; i += BLOCK) store(weights + i / 2, as_pairs(load<vf>(weights + i), load<vf>(weights + i + W)));
    }
    static vf step(vf sum, vu a, vu b) { return add_pairs(sum, a, b); }

    // A polynomial of the fraction above the next lower integer, within 8e-5; bfloat16 keeps 2e-3. Small weights become 0.
    static vf power(vf x) {
#if defined(__AVX512DQ__)
        const vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        vf p = splat(0.07802451f);
        p = p * r + 0.22606717f;
        p = p * r + 0.69583354f;
        p = p * r + 0.99992522f;
        return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
        return exp2(x);
#endif
    }

    static vf dot(const Element* key, const uint32_t* query, int count) {
        vf sum{};
        for (int i = 0; i < count; i += BLOCK) sum = step(sum, load<vu>(key + i), load<vu>(query + i / 2));
        return sum;
    }
    static void columns(const Element* const* rows, int column, vu& low, vu& high) {
        const vh first = load<vh>(rows[0] + column), second = load<vh>(rows[1] + column);
        low = (vu)interleave<false>(first, second);
        high = (vu)interleave<true>(first, second);
    }
};
#endif

}  // namespace trellis
