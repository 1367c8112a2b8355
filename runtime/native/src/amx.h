// Products by tiles (Intel AMX): eight registers of up to 16 rows of 64 bytes, and a unit that multiplies two of them.
//
// Packed weights serve as they are: 16 words of depth by half a block of outputs, BLOCK words from row to row, are the
// second factor of a tile product, pairs of bfloat16 or quads of bytes in a word. The first factor is a panel by rows.
// Two tiles of activations and two of weights make four tiles of sums, so that each of the four is used twice.
//
// Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS, TDPBSUD and others.
#pragma once

#include <algorithm>

#include "threads.h"
#include "tile.h"

#if (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)) || defined(TRELLIS_EMULATE_TILES)
#define TRELLIS_TILES
#endif

namespace trellis {

// Whether there are tile products of a format.
#if defined(TRELLIS_TILES)
template <class F>
constexpr bool has_tiles = std::is_same_v<F, Bf16> || std::is_base_of_v<Grouped, F>;
static_assert(Bf16::PANEL_WORDS == 1 && QUAD == 1, "activations of tiles are pairs of bfloat16 and quads of bytes");
#else
template <class F>
constexpr bool has_tiles = false;
#endif

// Reading bounds a product of few rows: a core gets 10 GB/s, which is about 40 cycles for the 128 bytes of a block's word of
// depth, and a row's two vector products in bfloat16 take 2 of them. Tiles are the quicker of both from a few rows on.
constexpr int FEWEST_TILE_ROWS = 4;

// Whether a product of so many rows is one by tiles, and its panel by rows. Sums in bfloat16 are added in another order by
// tiles, so where rows must be alike, all are. Products of groups are the same bits either way; vectors take them in one pass
// up to GROUP_ROWS rows, in less time than it takes to read them.
template <class F>
constexpr bool by_tiles(int rows, bool alike) {
    if constexpr (!has_tiles<F>)
        return false;
    else if constexpr (std::is_same_v<F, Bf16>)
        return rows >= (alike ? 1 : FEWEST_TILE_ROWS);
    else
        return rows > GROUP_ROWS;
}

template <class F, class Weights, class Write>
void multiply_by_tiles(Team& team, int me, const Weights& m, const Panel& a, Write&& write);

constexpr int TILE_ROWS = 16;
constexpr int TILE_WORDS = 16;  // of a row; the sums of one product stand in TILE_ROWS x TILE_WORDS

// A block of weights [depth][BLOCK] times two whole tiles of activations, whose rows are `stride` words apart: sums
// [2 * TILE_ROWS][BLOCK]. Tiles must be set up.
template <class F>
void multiply_two_tiles(const uint32_t* w, const uint32_t* a, int stride, int depth, float* sums);

#if !defined(TRELLIS_TILES)

class Tiles {
public:
    Tiles(int, int) {}
};

#else

// Words of depth in one tile product: a group has fewer, as its sums have a scale of their own.
template <class F>
constexpr int tile_depth = std::is_base_of_v<Grouped, F> ? GROUP / 4 : TILE_WORDS;

// The shapes of the eight tiles, while it lives: 0 .. 3 sums, 4 and 5 activations, 6 and 7 weights.
class Tiles {
public:
    // rows: of activations. depth: words of them in a product.
    Tiles(int rows, int depth) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 8; ++i) {
            shapes.row_bytes[i] = uint16_t(4 * (i == 4 || i == 5 ? depth : TILE_WORDS));
            shapes.rows[i] = uint8_t(i < 6 ? rows : depth);
        }
        // The intrinsic tells gcc that it reads the first 8 bytes only: without this the rest would not be written.
        asm volatile("" : : "r"(&shapes) : "memory");
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// Loads of tiles do not tell gcc that they read memory. What was written before must be there.
inline void settle() { asm volatile("" : : : "memory"); }

// What a tile product reads: rows of activations `stride` words apart, the second tile of them at a[1]; `words` of weights
// or groups; what to fetch meanwhile. It writes sums [1 or 2 tiles][TILE_ROWS][BLOCK].
struct TileWork {
    const uint32_t* w;
    const uint32_t* a[2];
    int rows;  // of a tile
    int stride;
    int depth;
    float* sums;
    Ahead ahead;
};

// Fetches what is due after `done` of `all` steps.
class Fetcher {
public:
    Fetcher(Ahead ahead, int steps) : at_(ahead.at), end_(ahead.at + ahead.bytes), each_(ahead.bytes / std::max(1, steps) + 1) {}
    void step() {
        due_ += each_;
        for (; at_ < end_ && due_ > 0; at_ += 64, due_ -= 64) __builtin_prefetch(at_, 0, 3);
    }

private:
    const char *at_, *end_;
    int each_, due_ = 0;
};

// What is left of a depth that is no multiple of a tile's.
inline void add_rest(const TileWork& t, int tiles, int from) {
    for (int r = 0; r < tiles * t.rows; ++r) {
        const int half = r / t.rows, row = r % t.rows;
        const uint32_t* a = t.a[half] + size_t(row) * t.stride;
        float* sums = t.sums + (half * TILE_ROWS + row) * BLOCK;
        vf part[1][2] = {{load<vf>(sums), load<vf>(sums + W)}};
        for (int i = from; i < t.depth; ++i)
            Bf16::step<1>(part, load<vu>(t.w + size_t(i) * BLOCK), load<vu>(t.w + size_t(i) * BLOCK + W), a + i);
        store(sums, part[0][0]);
        store(sums + W, part[0][1]);
    }
}

template <bool TWO>
void multiply_tiles(Bf16, const TileWork& t) {
    const int whole = t.depth / TILE_WORDS * TILE_WORDS, a_bytes = 4 * t.stride, w_bytes = 4 * BLOCK;
    Fetcher fetcher(t.ahead, t.depth / TILE_WORDS);
    settle();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < whole; i += TILE_WORDS) {
        const uint32_t* w = t.w + size_t(i) * BLOCK;
        _tile_loadd(6, w, w_bytes);
        _tile_loadd(4, t.a[0] + i, a_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + W, w_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TWO) {
            _tile_loadd(5, t.a[1] + i, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        fetcher.step();
    }
    _tile_stored(0, t.sums, w_bytes);
    _tile_stored(1, t.sums + W, w_bytes);
    if constexpr (TWO) {
        _tile_stored(2, t.sums + TILE_ROWS * BLOCK, w_bytes);
        _tile_stored(3, t.sums + TILE_ROWS * BLOCK + W, w_bytes);
    }
    if (whole < t.depth) add_rest(t, TWO ? 2 : 1, whole);
}

// A group's weights as bytes, [GROUP / 4][BLOCK] words: as they are kept, or written to `room`.
inline const uint32_t* group_bytes(Q8, const uint32_t* w, uint32_t*) { return w + Q8::SCALES; }

inline const uint32_t* group_bytes(Q4, const uint32_t* w, uint32_t* room) {
    const vu mask = splat_bits(0x0F0F0F0F);
    for (int i = 0; i < Q4::WORDS * BLOCK; i += W) {
        const vu nibbles = load<vu>(w + Q4::SCALES + i);
        store(room + i, nibbles & mask);
        store(room + Q4::WORDS * BLOCK + i, (nibbles >> 4) & mask);
    }
    return room;
}

// The integer sums of group g: [1 or 2 tiles][TILE_ROWS][BLOCK].
template <class Q, bool TWO>
void multiply_group(const TileWork& t, int g, uint32_t* room, int32_t* sums) {
    const uint32_t* w = group_bytes(Q(), t.w + size_t(g) * Q::GROUP_WORDS, room);
    const int at = g * Q::PANEL_GROUP + 2, a_bytes = 4 * t.stride, w_bytes = 4 * BLOCK;
    settle();
    _tile_loadd(6, w, w_bytes);
    _tile_loadd(7, w + W, w_bytes);
    _tile_loadd(4, t.a[0] + at, a_bytes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if constexpr (TWO) {
        _tile_loadd(5, t.a[1] + at, a_bytes);
        _tile_zero(2);
        _tile_zero(3);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums, w_bytes);
    _tile_stored(1, sums + W, w_bytes);
    if constexpr (TWO) {
        _tile_stored(2, sums + TILE_ROWS * BLOCK, w_bytes);
        _tile_stored(3, sums + TILE_ROWS * BLOCK + W, w_bytes);
    }
}

// Adds the products of group g to the sums, as group_tile does.
template <class Q>
void add_group(const TileWork& t, int tiles, int g, const int32_t* products) {
    const uint32_t* w = t.w + size_t(g) * Q::GROUP_WORDS;
    const typename Q::Scale scale0(w, 0), scale1(w, 1);
    for (int half = 0; half < tiles; ++half) {
        const uint32_t* a = t.a[half] + g * Q::PANEL_GROUP;
        const int32_t* from = products + half * TILE_ROWS * BLOCK;
        float* sums = t.sums + half * TILE_ROWS * BLOCK;
        for (int r = 0; r < t.rows; ++r, a += t.stride, from += BLOCK, sums += BLOCK) {
            const vi start = Q::start(a[1]);
            store(sums, scale0.add(load<vf>(sums), load<vi>(from) + start, a));
            store(sums + W, scale1.add(load<vf>(sums + W), load<vi>(from + W) + start, a));
        }
    }
}

// While one group's products are scaled and added, the next one's are under way.
template <bool TWO, class Q>
void multiply_tiles(Q, const TileWork& t) {
    constexpr int TILES = TWO ? 2 : 1;
    alignas(64) int32_t products[2][TILES * TILE_ROWS * BLOCK];
    alignas(64) uint32_t room[2][GROUP / 4 * BLOCK];
    Fetcher fetcher(t.ahead, t.depth);
    std::memset(t.sums, 0, sizeof(float) * TILES * TILE_ROWS * BLOCK);
    multiply_group<Q, TWO>(t, 0, room[0], products[0]);
    for (int g = 0; g < t.depth; ++g) {
        if (g + 1 < t.depth) multiply_group<Q, TWO>(t, g + 1, room[(g + 1) % 2], products[(g + 1) % 2]);
        add_group<Q>(t, TILES, g, products[g % 2]);
        fetcher.step();
    }
}

template <class F>
void multiply_two_tiles(const uint32_t* w, const uint32_t* a, int stride, int depth, float* sums) {
    multiply_tiles<true>(F(), TileWork{w, {a, a + size_t(TILE_ROWS) * stride}, TILE_ROWS, stride, depth, sums, Ahead{}});
}

constexpr int NEAR = 8192;  // bytes ahead of what is read only once

// As `multiply`. Tiles of activations begin every 16 rows, but the last of them ends with the last row: what it has
// again of the tile before it is not written twice, and no tile has other shapes than the rest.
template <class F, class Weights, class Write>
void multiply_by_tiles(Team& team, int me, const Weights& m, const Panel& a, Write&& write) {
    const int height = std::min(a.rows, TILE_ROWS), pieces = (a.rows + TILE_ROWS - 1) / TILE_ROWS;
    const int pairs = (pieces + 1) / 2, blocks = m.blocks(), bytes = int(m.block_words() * 4);
    const int groups = std::min(pairs, std::max(1, 4 * team.threads() / blocks));
    alignas(64) float sums[2 * TILE_ROWS * BLOCK];
    const Tiles tiles(height, tile_depth<F>);
    team.each(me, blocks * groups, [&](int unit) {
        const int b = unit / groups, group = unit % groups;
        const int first = pairs * group / groups, last = pairs * (group + 1) / groups;
        const int share = bytes / (last - first), distance = last - first == 1 ? std::min(NEAR, bytes) : bytes;
        for (int p = first; p < last; ++p) {
            const int begin = 2 * p * TILE_ROWS, count = std::min(2, pieces - 2 * p);
            const int from[2] = {std::min(begin, a.rows - height), std::min(begin + TILE_ROWS, a.rows - height)};
            const char* next = reinterpret_cast<const char*>(m.block(b)) + distance + size_t(p - first) * share;
            const TileWork work{m.block(b), {a.row(from[0]), a.row(from[1])}, height, a.stride(), m.depth, sums, Ahead{next, share}};
            if (count == 2)
                multiply_tiles<true>(F(), work);
            else
                multiply_tiles<false>(F(), work);
            for (int i = 0; i < count; ++i) {
                const int fresh = begin + i * TILE_ROWS, end = from[i] + height;
                write(fresh, end - fresh, b, sums + (i * TILE_ROWS + fresh - from[i]) * BLOCK);
            }
        }
    });
}

#endif

}  // namespace trellis
