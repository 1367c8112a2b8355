// The one kernel of all products: a block of weights times a tile of a panel.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "format.h"
#include "groups.h"

namespace trellis {

// Rows of activations, in tiles of up to `most` rows of about equal size: a tile is [depth][rows] words, so that
// the kernel reads it front to back.
struct Panel {
    uint32_t* data;
    int rows;
    int depth;  // words of a row
    int tile;   // rows of every tile but the last

    Panel() : data(nullptr), rows(0), depth(0), tile(1) {}
    Panel(uint32_t* data, int rows, int depth, int most = MAX_ROWS) : data(data), rows(rows), depth(depth) {
        const int tiles = (rows + most - 1) / most;
        tile = tiles ? (rows + tiles - 1) / tiles : 1;
    }

    int tiles() const { return (rows + tile - 1) / tile; }
    int tile_rows(int t) const { return rows - t * tile < tile ? rows - t * tile : tile; }
    const uint32_t* tile_data(int t) const { return data + size_t(t) * tile * depth; }

    void put(int row, const uint32_t* words) const {
        const int t = row / tile, height = tile_rows(t);
        uint32_t* to = data + size_t(t) * tile * depth + row - t * tile;
        for (int i = 0; i < depth; ++i, to += height) *to = words[i];
    }
};

// What to fetch into the caches meanwhile: `bytes` from `at` on, spread over the tile.
struct Ahead {
    const char* at = nullptr;
    int bytes = 0;
};

// sums: [ROWS][BLOCK]. With few rows several sets of sums hide the latency of the additions. A format with a CHUNK
// begins new sums after so many words of depth and adds them up, which loses less than one long sum. ALIKE: one set always,
// so that a row's sums do not depend on how many others are in its tile.
template <class F, int ROWS, bool FETCH, bool ALIKE>
void tile(const uint32_t* w, const uint32_t* a, int depth, float* sums, Ahead ahead) {
    constexpr int SETS = ALIKE ? 1 : ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;
    const int each = FETCH ? ahead.bytes / depth : 0;
    const char* at = ahead.at;
    for (int begin = 0; begin < depth; begin += F::CHUNK) {
        const int end = std::min(depth, begin + F::CHUNK);
        vf part[SETS][ROWS][2] = {};
        int i = begin;
        for (; i + SETS <= end; i += SETS) {
            for (int s = 0; s < SETS; ++s) {
                F::template step<ROWS>(part[s], load<vu>(w), load<vu>(w + W), a);
                w += BLOCK;
                a += F::PANEL_WORDS * ROWS;
                if (FETCH) {
                    __builtin_prefetch(at, 0, 3);
                    if (BLOCK * 4 > 64 && each > 64) __builtin_prefetch(at + 64, 0, 3);
                    at += each;
                }
            }
        }
        for (; i < end; ++i, w += BLOCK, a += F::PANEL_WORDS * ROWS)
            F::template step<ROWS>(part[0], load<vu>(w), load<vu>(w + W), a);
        for (int r = 0; r < ROWS; ++r)
            for (int half = 0; half < 2; ++half) {
                vf total = part[0][r][half];
                for (int s = 1; s < SETS; ++s) total += part[s][r][half];
                float* to = sums + r * BLOCK + half * W;
                store(to, begin ? load<vf>(to) + total : total);
            }
    }
}

template <class Q, int ROWS, bool FETCH>
void tile_of_groups(const uint32_t* w, const uint32_t* a, int groups, float* sums, Ahead ahead) {
    group_tile<Q, ROWS>(w, a, groups, sums, FETCH ? ahead.at : nullptr, ahead.bytes);
}

using Tile = void (*)(const uint32_t*, const uint32_t*, int, float*, Ahead);

template <class F, int ROWS, bool FETCH, bool ALIKE>
constexpr Tile tile_of() {
    if constexpr (std::is_base_of_v<Grouped, F>)
        return tile_of_groups<F, ROWS, FETCH>;
    else
        return tile<F, ROWS, FETCH, ALIKE && (ROWS <= 3)>;  // the taller ones are alike anyway
}

template <class F, bool FETCH, bool ALIKE, int... I>
constexpr std::array<Tile, sizeof...(I)> tiles_of(std::integer_sequence<int, I...>) {
    return {tile_of<F, I + 1, FETCH, ALIKE>()...};
}

// Rows of the largest tile.
template <class F>
constexpr int most_rows = std::is_base_of_v<Grouped, F> ? GROUP_ROWS : MAX_ROWS;

// The kernel for a number of rows, 1 .. most_rows.
template <class F, bool FETCH>
inline Tile tile_for(int rows, bool alike) {
    static constexpr auto table = tiles_of<F, FETCH, false>(std::make_integer_sequence<int, most_rows<F>>());
    static constexpr auto table_alike = tiles_of<F, FETCH, true>(std::make_integer_sequence<int, most_rows<F>>());
    return alike ? table_alike[rows - 1] : table[rows - 1];
}

}  // namespace trellis
