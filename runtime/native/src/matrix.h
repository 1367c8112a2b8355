// Packed weights and their products with panels of activations.
#pragma once

#include <stdexcept>
#include <vector>

#include "amx.h"
#include "blocks.h"
#include "memory.h"
#include "threads.h"
#include "tile.h"

namespace trellis {

// What a matrix is made of: the decoder's own format, or one of src/groups.h.
enum class Kept : int { OWN = 0, Q8 = 1, Q4 = 2 };

// act(format), with a value of the format's type. F: the decoder's own.
template <class F, class Do>
void in_format(Kept kept, Do&& act) {
    switch (kept) {
        case Kept::OWN: return act(F());
        case Kept::Q8: return act(Q8());
        case Kept::Q4: return act(Q4());
    }
}

// outputs x inputs, packed in blocks of BLOCK outputs: [blocks][depth][BLOCK] words, so that a product reads it once,
// front to back. A paired matrix is two of the same shape: each block has W outputs of the first, and the same W of the
// second, so that what combines both (the gate of an MLP) finds them in two registers.
struct Matrix {
    uint32_t* data = nullptr;
    float* bias = nullptr;  // [blocks][BLOCK], or null
    int outputs = 0;        // of a paired matrix: of each of the two
    int inputs = 0;
    int depth = 0;
    size_t words = 0;  // of a block
    bool paired = false;
    Kept kept = Kept::OWN;

    int per_block() const { return paired ? W : BLOCK; }
    int blocks() const { return (outputs + per_block() - 1) / per_block(); }
    size_t block_words() const { return words; }
    const uint32_t* block(int b) const { return data + b * words; }

    // Which row of the source lane j of block b is; -1 for padding. The second of a pair follows the first.
    int source_row(int b, int j) const {
        const int n = b * per_block() + (paired ? j % W : j);
        if (n >= outputs) return -1;
        return paired && j >= W ? outputs + n : n;
    }
};

inline void to_floats(const void* from, Source kind, size_t at, int n, float* to) {
    if (kind == Source::F32) {
        std::memcpy(to, static_cast<const float*>(from) + at, size_t(n) * 4);
    } else {
        const uint16_t* values = static_cast<const uint16_t*>(from) + at;
        for (int i = 0; i < n; ++i) to[i] = from_bf16(values[i]);
    }
}

// rows: row-major [outputs or 2 * outputs][inputs]. Threads take blocks.
template <class F>
void pack_matrix(Team& team, Arena& arena, Matrix& m, const void* rows, Source kind, const float* bias) {
    m.depth = F::depth(m.inputs);
    m.words = size_t(m.depth) * BLOCK;
    m.data = arena.take<uint32_t>(m.blocks() * m.block_words());
    if (bias) m.bias = arena.take<float>(size_t(m.blocks()) * BLOCK);
    const size_t scratch = size_t(m.depth) * BLOCK + m.inputs;
    std::vector<uint32_t> room(scratch * team.threads());
    team.run(1, [&](int me) {
        uint32_t* words = room.data() + scratch * me;
        float* values = reinterpret_cast<float*>(words + size_t(m.depth) * BLOCK);
        team.each(me, m.blocks(), [&](int b) {
            const uint32_t* lanes[BLOCK];
            for (int j = 0; j < BLOCK; ++j) {
                uint32_t* lane = words + size_t(j) * m.depth;
                lanes[j] = lane;
                const int row = m.source_row(b, j);
                if (m.bias) m.bias[b * BLOCK + j] = row < 0 ? 0.0f : bias[row];
                if (row < 0) {
                    std::memset(lane, 0, size_t(m.depth) * 4);
                    continue;
                }
                to_floats(rows, kind, size_t(row) * m.inputs, m.inputs, values);
                F::encode(values, m.inputs, lane);
            }
            transpose_block(lanes, m.depth, m.data + b * m.block_words());
        });
    });
}

// As pack_matrix, for the formats of groups.h. rows: floats, or blocks that the format can take as they are.
template <class Q>
void pack_groups(Team& team, Arena& arena, Matrix& m, const void* rows, Source kind, const float* bias) {
    const int groups = Q::groups(m.inputs);
    m.depth = groups;
    m.words = size_t(groups) * Q::GROUP_WORDS;
    m.data = arena.take<uint32_t>(m.blocks() * m.words);
    if (bias) m.bias = arena.take<float>(size_t(m.blocks()) * BLOCK);
    if (is_blocks(kind) && !fits(Q(), kind)) throw std::invalid_argument("blocks of another format");
    std::vector<float> room(size_t(groups) * GROUP * team.threads());
    team.run(1, [&](int me) {
        float* values = room.data() + size_t(groups) * GROUP * me;
        team.each(me, m.blocks(), [&](int b) {
            for (int j = 0; j < BLOCK; ++j) {
                const int row = m.source_row(b, j);
                if (m.bias) m.bias[b * BLOCK + j] = row < 0 ? 0.0f : bias[row];
                if (row < 0) continue;  // the arena's memory is zero, and so are products with it
                uint32_t* block = m.data + b * m.words;
                if (is_blocks(kind)) {
                    const size_t at = row * row_bytes(kind, m.inputs);
                    put_blocks(Q(), static_cast<const uint8_t*>(rows) + at, kind, groups, block, j);
                } else {
                    to_floats(rows, kind, size_t(row) * m.inputs, m.inputs, values);
                    Q::put(values, groups, block, j);
                }
            }
        });
    });
}

// F: the decoder's own format; m.kept says whether the matrix is in it.
template <class F>
void pack_as_kept(Team& team, Arena& arena, Matrix& m, const void* rows, Source kind, const float* bias) {
    in_format<F>(m.kept, [&](auto format) {
        using G = decltype(format);
        if constexpr (std::is_base_of_v<Grouped, G>)
            pack_groups<G>(team, arena, m, rows, kind, bias);
        else
            pack_matrix<G>(team, arena, m, rows, kind, bias);
    });
}

// One row of the matrix as it was given: the embedding of a token, where the head is tied to it.
template <class F>
void unpack_row(const Matrix& m, int row, float* to) {
    const uint32_t* block = m.block(row / BLOCK);
    if constexpr (std::is_base_of_v<Grouped, F>)
        F::decode(block, row % BLOCK, m.inputs, to);
    else
        F::decode(block + row % BLOCK, BLOCK, m.inputs, to);
}

// Bytes ahead of what a block's only tile reads. Up to so many rows reading is all that takes time, and weights go straight to
// the first cache; with more rows they would push the panel out of it before they are used. Of these distances and caches
// the others took up to 1.4 times as long for 8 rows, with one thread of a Zen 4 (both formats).
constexpr int NEAR_BYTES = 4096, FAR_BYTES = 16384;
template <class F>
constexpr int near_rows = std::is_base_of_v<Grouped, F> ? 3 : 4;

// What the tiles first .. last - 1 of a block fetch while tile t is computed.
template <class F>
Ahead ahead_of(const Matrix& m, int b, int rows, int t, int first, int last) {
    const char* block = reinterpret_cast<const char*>(m.block(b));
    const int bytes = int(m.block_words() * 4);
    if (last - first == 1) {
        const bool far = rows > near_rows<F>;
        return {block + std::min(far ? FAR_BYTES : NEAR_BYTES, bytes), bytes, far};
    }
    const int share = bytes / (last - first);
    return {block + bytes + size_t(t - first) * share, share, std::is_base_of_v<Grouped, F>};
}

// All outputs for all rows of the panel. write(first_row, rows, block, sums) gets the sums [rows][BLOCK] of a tile.
// alike: see src/tile.h. A block is fetched from memory once: all tiles use it while it is in the cache, and fetch the next one meanwhile.
template <class F, class Write>
void multiply(Team& team, int me, const Matrix& m, const Panel& a, Write&& write, bool alike = false) {
    if constexpr (has_tiles<F>)
        if (a.for_tiles) return multiply_by_tiles<F>(team, me, m, a, write);
    const int tiles = a.tiles(), blocks = m.blocks();
    const int groups = std::min(tiles, std::max(1, 4 * team.threads() / blocks));
    alignas(64) float sums[MAX_ROWS * BLOCK];
    team.each(me, blocks * groups, [&](int unit) {
        const int b = unit / groups, group = unit % groups;
        const int first = tiles * group / groups, last = tiles * (group + 1) / groups;
        for (int t = first; t < last; ++t) {
            const int rows = a.tile_rows(t);
            const Ahead ahead = ahead_of<F>(m, b, rows, t, first, last);
            tile_for<F, true>(rows, alike)(m.block(b), a.tile_data(t), m.depth, sums, ahead);
            write(t * a.tile, rows, b, sums);
        }
    });
}

// What products do with their sums. Rows of `to` are `stride` floats apart.
struct Into {
    const Matrix& m;
    float* to;
    size_t stride;
    bool add;  // to what is there

    void operator()(int row, int rows, int block, const float* sums) const {
        const int n = block * BLOCK, width = std::min(BLOCK, m.outputs - n);
        for (int r = 0; r < rows; ++r) {
            float* out = to + (row + r) * stride + n;
            const float* from = sums + r * BLOCK;
            if (width == BLOCK) {
                for (int half = 0; half < BLOCK; half += W) {
                    vf v = load<vf>(from + half);
                    if (m.bias) v += load<vf>(m.bias + n + half);
                    if (add) v += load<vf>(out + half);
                    store(out + half, v);
                }
            } else {
                for (int j = 0; j < width; ++j)
                    out[j] = from[j] + (m.bias ? m.bias[n + j] : 0.0f) + (add ? out[j] : 0.0f);
            }
        }
    }
};

// silu(first) * second of a paired matrix.
struct Gated {
    const Matrix& m;
    float* to;
    size_t stride;

    void operator()(int row, int rows, int block, const float* sums) const {
        const int n = block * W, width = std::min(W, m.outputs - n);
        for (int r = 0; r < rows; ++r) {
            vf gate = load<vf>(sums + r * BLOCK), up = load<vf>(sums + r * BLOCK + W);
            if (m.bias) {
                gate += load<vf>(m.bias + block * BLOCK);
                up += load<vf>(m.bias + block * BLOCK + W);
            }
            const vf value = silu(gate) * up;
            float* out = to + (row + r) * stride + n;
            if (width == W)
                store(out, value);
            else
                for (int j = 0; j < width; ++j) out[j] = value[j];
        }
    }
};

}  // namespace trellis
