// Quantised weights, and the activations that they are multiplied with. Both are cut into groups of GROUP inputs.
//
// Activations: each group of a row has a scale, the largest magnitude / 127, and integers of 8 bits. A scale for a whole
// row would be simpler, but the few very large values that models have in some places would leave no bits for the rest:
// with SmolLM2-135M the perplexity rose by 4 % with scales of rows and by 0.3 % with scales of groups.
//
// Weights are integers without sign, and each group has halves that say what they stand for:
//   Q8   8 bits, (u - 128) * scale
//   Q4   4 bits, u * scale + minimum
// One scale for all inputs of an output would save 1/17 of the memory, but cost 1.3 % of that perplexity instead of 0.3 %.
// The products within a group are exact; scales and sums of groups are float32.
//
// A packed block is [groups][GROUP_WORDS], a group [SCALES words][WORDS][BLOCK]. A panel row is [groups][PANEL_GROUP]: the
// scale, then what the sum of the group's integers contributes (see each format), then these.
#pragma once

#include <algorithm>

#include "dots.h"
#include "half.h"
#include "memory.h"

namespace trellis {

constexpr int GROUP = 32;

struct Grouped {
    static constexpr int PANEL_GROUP = 2 + GROUP / 4 * QUAD;

    static int groups(int k) { return (k + GROUP - 1) / GROUP; }
    static int depth(int k) { return groups(k); }
    static int panel_depth(int k) { return groups(k) * PANEL_GROUP; }

    // contributed(scale, sum of the integers) -> the second word. The last group is filled up with zeros.
    template <class Contributed>
    static void pack_groups(const float* from, int k, uint32_t* to, Contributed&& contributed) {
        for (int at = 0; at < k; at += GROUP, to += PANEL_GROUP) {
            float rest[GROUP] = {};
            const float* x = from + at;
            if (k - at < GROUP) x = std::copy(x, from + k, rest) - (k - at);
            pack_group(x, to, contributed);
        }
    }

    // The products of two quads of weights, for the lower and the upper half of a block, with a quad of each row; `stride`
    // words from one row to the next.
    template <int ROWS>
    static inline void add_quads(const Quads& w0, const Quads& w1, const uint32_t* a, size_t stride, vi (&low)[ROWS],
                                 vi (&high)[ROWS]) {
        for (int r = 0; r < ROWS; ++r) {
            low[r] = dot(low[r], w0, a + r * stride);
            high[r] = dot(high[r], w1, a + r * stride);
        }
    }

private:
    template <class Contributed>
    static inline void pack_group(const float* x, uint32_t* to, Contributed&& contributed) {
        vf top{};
        for (int i = 0; i < GROUP; i += W) {
            const vf v = load<vf>(x + i);
            top = max(top, max(v, -v));
        }
        const float most = largest(top);
        const float scale = most / 127.0f, inverse = most > 1e-30f ? 127.0f / most : 0.0f;
        vi sums{};
        for (int i = 0; i < GROUP; i += W) {
            const vi v = rounded(load<vf>(x + i) * inverse);
            sums += v;
            put_quads(v, to + 2 + i / 4 * QUAD);
        }
        std::memcpy(to, &scale, 4);
        to[1] = contributed(scale, total_of(sums));
    }
};

// The sum of a group's products with u - 128 begins at -128 times the sum of its activations.
struct Q8 : Grouped {
    static constexpr int WORDS = GROUP / 4;
    static constexpr int SCALES = BLOCK / 2;  // halves [BLOCK]
    static constexpr int GROUP_WORDS = SCALES + WORDS * BLOCK;
    static constexpr int ZERO = 128;

    static void pack(const float* from, int k, uint32_t* to) {
        pack_groups(from, k, to, [](float, int total) { return uint32_t(-ZERO * total); });
    }
    static vi start(uint32_t contributed) { return (vi)splat_bits(contributed); }

    template <int ROWS>
    static inline void products(const uint32_t* w, const uint32_t* a, size_t stride, vi (&low)[ROWS], vi (&high)[ROWS]) {
#pragma GCC unroll 1  // more at once does not fit into the registers
        for (int j = 0; j < WORDS; ++j, w += BLOCK, a += QUAD)
            add_quads<ROWS>(Quads(load<vu>(w)), Quads(load<vu>(w + W)), a, stride, low, high);
    }

    // Integers of one output's group, in its lane.
    static void put_integers(const float* x, float inverse, uint32_t* words) {
        for (int j = 0; j < WORDS; ++j) {
            uint32_t word = 0;
            for (int i = 0; i < 4; ++i) {
                const int v = int(std::lrint(x[4 * j + i] * inverse));
                word |= uint32_t(std::min(127, std::max(-127, v)) + ZERO) << 8 * i;
            }
            words[j * BLOCK] = word;
        }
    }
    static int integer(const uint32_t* words, int i) { return int(words[i / 4 * BLOCK] >> i % 4 * 8 & 0xFF) - ZERO; }

    static float most_of(const float* x, int n) {
        float most = 0;
        for (int i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
        return most;
    }

    struct Scale {
        vf scale;
        Scale(const uint32_t* group, int half) : scale(load_halves(halves(group) + half * W)) {}
        vf add(vf sum, vi products, const uint32_t* a) const {
            return sum + __builtin_convertvector(products, vf) * splat(load<float>(a)) * scale;
        }
    };
    static const uint16_t* halves(const uint32_t* group) { return reinterpret_cast<const uint16_t*>(group); }
    static uint16_t* halves(uint32_t* group) { return reinterpret_cast<uint16_t*>(group); }

    static void put(const float* x, int groups, uint32_t* block, int lane) {
        for (int g = 0; g < groups; ++g, block += GROUP_WORDS, x += GROUP) {
            const uint16_t half = to_half(most_of(x, GROUP) / 127.0f);
            const float scale = from_half(half);
            halves(block)[lane] = half;
            put_integers(x, scale > 0 ? 1.0f / scale : 0.0f, block + SCALES + lane);
        }
    }

    static void decode(const uint32_t* block, int lane, int k, float* to) {
        for (int i = 0; i < k; ++i) {
            const uint32_t* group = block + size_t(i / GROUP) * GROUP_WORDS;
            to[i] = float(integer(group + SCALES + lane, i % GROUP)) * from_half(halves(group)[lane]);
        }
    }
};

// Byte i of a group's 16 holds input i in its lower half and input i + 16 in its upper, as in GGUF's Q4_1.
struct Q4 : Grouped {
    static constexpr int WORDS = GROUP / 8;
    static constexpr int SCALES = BLOCK;  // halves: [BLOCK] scales, [BLOCK] minima
    static constexpr int GROUP_WORDS = SCALES + WORDS * BLOCK;

    // A minimum counts as often as the activations of its group sum up to.
    static void pack(const float* from, int k, uint32_t* to) {
        pack_groups(from, k, to, [](float scale, int total) {
            const float sum = scale * float(total);
            return load<uint32_t>(&sum);
        });
    }
    static vi start(uint32_t) { return vi{}; }

    template <int ROWS>
    static inline void products(const uint32_t* w, const uint32_t* a, size_t stride, vi (&low)[ROWS], vi (&high)[ROWS]) {
#pragma GCC unroll 1
        for (int j = 0; j < WORDS; ++j, w += BLOCK, a += QUAD) {
            const vu w0 = load<vu>(w), w1 = load<vu>(w + W), mask = splat_bits(0x0F0F0F0F);
            add_quads<ROWS>(Quads(w0 & mask), Quads(w1 & mask), a, stride, low, high);
            add_quads<ROWS>(Quads((w0 >> 4) & mask), Quads((w1 >> 4) & mask), a + WORDS * QUAD, stride, low, high);
        }
    }

    struct Scale {
        vf scale, minimum;
        Scale(const uint32_t* group, int half)
            : scale(load_halves(halves(group) + half * W)), minimum(load_halves(halves(group) + BLOCK + half * W)) {}
        vf add(vf sum, vi products, const uint32_t* a) const {
            sum += minimum * splat(load<float>(a + 1));
            return sum + __builtin_convertvector(products, vf) * splat(load<float>(a)) * scale;
        }
    };
    static const uint16_t* halves(const uint32_t* group) { return reinterpret_cast<const uint16_t*>(group); }

    static void put_group(const uint8_t* bytes, uint16_t scale, uint16_t minimum, uint32_t* group, int lane) {
        uint16_t* scales = reinterpret_cast<uint16_t*>(group);
        scales[lane] = scale;
        scales[BLOCK + lane] = minimum;
        for (int j = 0; j < WORDS; ++j) group[SCALES + j * BLOCK + lane] = load<uint32_t>(bytes + 4 * j);
    }

    static void decode(const uint32_t* block, int lane, int k, float* to) {
        for (int i = 0; i < k; ++i) {
            const uint32_t* group = block + size_t(i / GROUP) * GROUP_WORDS;
            const int place = i % GROUP, byte = place % 16;
            const uint32_t word = group[SCALES + byte / 4 * BLOCK + lane] >> byte % 4 * 8;
            const float u = float(place < 16 ? word & 15 : word >> 4 & 15);
            to[i] = u * from_half(halves(group)[lane]) + from_half(halves(group)[BLOCK + lane]);
        }
    }

    static void put(const float* x, int groups, uint32_t* block, int lane);  // in blocks.h
};

// Rows of a tile: so many rows' sums of integers fit into the registers; those of floats are put aside meanwhile.
#if defined(__AVX512F__)
constexpr int GROUP_ROWS = 8;
#else
constexpr int GROUP_ROWS = 4;
#endif

// a: rows of a panel, `stride` words apart. sums: [ROWS][BLOCK]. The rest as in src/tile.h.
template <class Q, int ROWS>
void group_tile(const uint32_t* w, const uint32_t* a, size_t stride, int groups, float* sums, Ahead ahead) {
    vf low[ROWS] = {}, high[ROWS] = {};
    const int each = ahead.at ? ahead.bytes / groups + 1 : 0;
    for (int g = 0, fetched = 0; g < groups; ++g, w += Q::GROUP_WORDS, a += Q::PANEL_GROUP) {
        for (; fetched < each * (g + 1); fetched += 64) Ahead::fetch(ahead.at + fetched, ahead.far);
        vi products0[ROWS], products1[ROWS];
        for (int r = 0; r < ROWS; ++r) products0[r] = products1[r] = Q::start(a[r * stride + 1]);
        Q::template products<ROWS>(w + Q::SCALES, a + 2, stride, products0, products1);
        const typename Q::Scale scale0(w, 0), scale1(w, 1);
        for (int r = 0; r < ROWS; ++r) {
            low[r] = scale0.add(low[r], products0[r], a + r * stride);
            high[r] = scale1.add(high[r], products1[r], a + r * stride);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        store(sums + r * BLOCK, low[r]);
        store(sums + r * BLOCK + W, high[r]);
    }
}

}  // namespace trellis
