// The one kernel of all products: a block of weights times a tile of a panel.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "format.h"
#include "groups.h"
#include "memory.h"

namespace trellis {

// Rows of activations, in tiles of up to `most` rows of about equal size: a tile is [depth][rows] words, so that
// the kernel reads it front to back. Or, for quantised weights and for src/amx.h, by rows.
struct Panel {
    uint32_t* data;
    int rows;
    int depth;     // words of a row
    int tile;      // rows of every tile but the last
    bool by_rows;  // [rows][stride] words
    bool for_tiles = false;  // multiplied as src/amx.h does it

    Panel() : data(nullptr), rows(0), depth(0), tile(1), by_rows(false) {}
    Panel(uint32_t* data, int rows, int depth, int most = MAX_ROWS, bool by_rows = false)
        : data(data), rows(rows), depth(depth), by_rows(by_rows) {
        const int tiles = (rows + most - 1) / most;
        tile = tiles ? (rows + tiles - 1) / tiles : 1;
    }

    int tiles() const { return (rows + tile - 1) / tile; }
    int tile_rows(int t) const { return rows - t * tile < tile ? rows - t * tile : tile; }
    const uint32_t* tile_data(int t) const { return by_rows ? row(t * tile) : data + size_t(t) * tile * depth; }

    // Words from one row to the next. Rows that are multiples of 1 KB apart would share few of the cache's places.
    static constexpr int PADDING = 16;
    static int stride_of(int depth) { return depth % 256 == 0 ? depth + PADDING : depth; }
    int stride() const { return stride_of(depth); }
    uint32_t* row(int r) const { return data + size_t(r) * stride(); }

    void put(int row, const uint32_t* words) const {
        const int t = row / tile, height = tile_rows(t);
        uint32_t* to = data + size_t(t) * tile * depth + row - t * tile;
        for (int i = 0; i < depth; ++i, to += height) *to = words[i];
    }
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
                    Ahead::fetch(at, ahead.far);
                    if (BLOCK * 4 > 64 && each > 64) Ahead::fetch(at + 64, ahead.far);
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
    const size_t stride = Panel::stride_of(groups * Q::PANEL_GROUP);
    group_tile<Q, ROWS>(w, a, stride, groups, sums, FETCH ? ahead : Ahead{});
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

// for_tiles: see by_tiles in src/amx.h. data: rows * (panel_depth + PADDING) words.
template <class F>
Panel panel_of(uint32_t* data, int rows, int inputs, bool for_tiles) {
    Panel panel(data, rows, F::panel_depth(inputs), most_rows<F>, for_tiles || std::is_base_of_v<Grouped, F>);
    panel.for_tiles = for_tiles;
    return panel;
}

// scratch: panel_depth words.
template <class F>
void put_row(const Panel& panel, int row, const float* from, int inputs, uint32_t* scratch) {
    if (panel.by_rows) return F::pack(from, inputs, panel.row(row));
    F::pack(from, inputs, scratch);
    panel.put(row, scratch);
}

// The kernel for a number of rows, 1 .. most_rows.
template <class F, bool FETCH>
inline Tile tile_for(int rows, bool alike) {
    static constexpr auto table = tiles_of<F, FETCH, false>(std::make_integer_sequence<int, most_rows<F>>());
    static constexpr auto table_alike = tiles_of<F, FETCH, true>(std::make_integer_sequence<int, most_rows<F>>());
    return alike ? table_alike[rows - 1] : table[rows - 1];
}

}  // namespace trellis
