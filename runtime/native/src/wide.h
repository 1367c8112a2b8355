// Many queries of one key head: each has a lane of the registers, so that the softmax runs without a step across lanes.
//
// Scores are [keys][queries]: words of packed queries times single words of keys, which are only copied together. Their
// weights are then the packed side of the second product, times single words of values. The softmax runs along the blocks
// of keys (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135). Blocks that no query
// of a tile sees are left out, and only those that some do not see are masked.
//
// For 64 dimensions a vector of scores costs 64 steps of the products with pairs, and 8 of the softmax. Where there are tiles
// (amx.h) they take the place of these products.
#pragma once

#include <algorithm>
#include <optional>

#include "amx.h"
#include "arithmetic.h"
#include "parts.h"

namespace trellis {

template <class F>
class Wide {
    using A = Arithmetic<F>;
    using Element = typename F::Element;
    using Layer = AttentionLayer<Element>;

    static constexpr bool TILES = has_tiles<F>;
    static constexpr int VECTORS = TILES ? BLOCK / W : 3;  // of queries in a tile
    // Keys, or columns of values, in a tile: their sums take 3 * 8 of 32 registers, or 3 * 4 of 16.
    static constexpr int LINES = TILES ? 2 * TILE_ROWS : W == 16 ? 8 : 4;
    static_assert(KEYS % LINES == 0 && KEYS % 2 == 0, "a block of keys is made of whole tiles");

public:
    template <class Taker>
    Wide(const HeadShape& shape, const Plan& plan, Taker& room)
        : s_(shape), scaling_(shape), plan_(plan), depth_((shape.head_dim + A::PER_WORD - 1) / A::PER_WORD),
          columns_((shape.head_dim + LINES - 1) / LINES * LINES) {
        int rows = 0;
        for (const Item& item : plan.items) rows = std::max(rows, item.rows);
        const size_t vectors = vectors_of(rows * s_.ratio()), lanes = vectors * W;
        tiles_ = room.template take<Tile>(vectors);
        queries_ = room.template take<uint32_t>(lanes * depth_);
        keys_ = room.template take<uint32_t>(size_t(KEYS) * depth_);
        values_ = room.template take<uint32_t>(size_t(KEYS / A::PER_WORD) * columns_);
        turned_ = room.template take<uint32_t>(TILES ? size_t(KEYS / A::PER_WORD) * columns_ : 0);
        scores_ = room.template take<float>(size_t(KEYS) * VECTORS * W);
        sums_ = room.template take<float>(lanes * columns_);
        best_ = room.template take<float>(lanes);
        total_ = room.template take<float>(lanes);
        last_ = room.template take<int32_t>(lanes);
        square_ = room.template take<float>(size_t(W) * padded());
    }

    // The item's rows x the heads of key head `group`.
    void attend(const Item& item, int group, const Layer& layer, const Parts& parts) {
        const int32_t* rows = plan_.row_list.data() + item.first;
        std::optional<Tiles> shapes;
        if (TILES) shapes.emplace(TILE_ROWS, TILE_WORDS);
        begin_tiles(item.rows, rows);
        for (int t = 0; t < tile_count_; ++t) take_queries(tiles_[t], rows, group, layer);
        int newest = 0, oldest = item.end;
        for (int t = 0; t < tile_count_; ++t) newest = std::max(newest, tiles_[t].newest), oldest = std::min(oldest, tiles_[t].oldest);
        const int end = std::min(item.end, newest + 1);
        int begin = layer.window ? std::max(item.begin, oldest - layer.window + 1) : item.begin;
        if (plan_.alike) begin = begin / KEYS * KEYS;  // where blocks begin must not depend on the oldest row
        for (int at = begin; at < end; at += KEYS) {
            const int n = std::min(KEYS, end - at), next = std::min(KEYS, end - at - n);
            gather(item.slots + at, n, group, layer);
            for (int t = 0; t < tile_count_; ++t) {
                // A few at a time: a processor drops requests that come faster than memory answers.
                const int from = next * t / tile_count_, to = next * (t + 1) / tile_count_;
                for (int j = from; j < to; ++j) fetch_slot(item.slots[at + n + j], group, layer);
                block(tiles_[t], at, n, layer.window);
            }
        }
        for (int t = 0; t < tile_count_; ++t) put_results(tiles_[t], rows, group, item.ordinal, layer.out, parts);
    }

private:
    // Some queries, in lanes first .. first + width * W - 1. newest, oldest: the last key that one of them sees, and that all see.
    struct Tile {
        int first, width;
        int newest, oldest;
    };

    // Tiles of the processor are whole; else the last vectors are as many as are needed.
    static int vectors_of(int queries) {
        const int vectors = (queries + W - 1) / W;
        return TILES ? (vectors + VECTORS - 1) / VECTORS * VECTORS : vectors;
    }

    int padded() const { return (s_.head_dim + BLOCK - 1) / BLOCK * BLOCK; }

    void begin_tiles(int row_count, const int32_t* rows) {
        count_ = row_count * s_.ratio();
        const int vectors = vectors_of(count_);
        tile_count_ = (vectors + VECTORS - 1) / VECTORS;
        for (int i = 0; i < vectors * W; ++i) last_[i] = plan_.rows.position[rows[std::min(i, count_ - 1) / s_.ratio()]];
        for (int t = 0; t < tile_count_; ++t) {
            const int first = vectors * t / tile_count_, end = vectors * (t + 1) / tile_count_;
            const int32_t *from = last_ + first * W, *to = last_ + end * W;
            tiles_[t] = Tile{first * W, end - first, *std::max_element(from, to), *std::min_element(from, to)};
        }
        std::fill_n(best_, vectors * W, NOTHING_SEEN);
        std::fill_n(total_, vectors * W, 0.0f);
        std::memset(sums_, 0, sizeof(float) * vectors * W * columns_);
    }

    // Packs a tile's queries: [depth][lanes]. Lanes that are left over have zeros.
    void take_queries(const Tile& tile, const int32_t* rows, int group, const Layer& layer) {
        const int ratio = s_.ratio(), lanes = tile.width * W;
        for (int first = tile.first; first < tile.first + lanes; first += W) {
            std::memset(square_, 0, sizeof(float) * W * padded());
            for (int j = 0; j < std::min(W, count_ - first); ++j) {
                const int row = rows[(first + j) / ratio], head = group * ratio + (first + j) % ratio;
                std::memcpy(square_ + j * padded(), layer.queries + row * layer.stride + head * s_.head_dim, sizeof(float) * s_.head_dim);
            }
            uint32_t* to = queries_ + size_t(tile.first) * depth_ + first - tile.first;
            for (int i = 0; i < depth_; i += W) {
                vu square[W];
                for (int j = 0; j < W; ++j) square[j] = A::words(square_ + j * padded() + i * A::PER_WORD, scaling_.queries);
                transpose(square);
                for (int j = 0; j < std::min(W, depth_ - i); ++j) store(to + size_t(i + j) * lanes, square[j]);
            }
        }
    }

    static size_t offset(const HeadShape& s, int slot, int group) { return (size_t(slot) * s.kv_heads + group) * s.head_dim; }

    void fetch_slot(int slot, int group, const Layer& layer) const {
        const size_t at = offset(s_, slot, group);
        fetch(layer.keys + at, s_.head_dim);
        fetch(layer.values + at, s_.head_dim);
    }

    // Copies n keys and values together, and zeros as far as tiles and words go on.
    void gather(const int32_t* slots, int n, int group, const Layer& layer) {
        for (int j = 0; j < n; ++j) A::keys(layer.keys + offset(s_, slots[j], group), s_.head_dim, keys_ + size_t(j) * depth_);
        const int used = (n + LINES - 1) / LINES * LINES;
        std::memset(keys_ + size_t(n) * depth_, 0, sizeof(uint32_t) * (used - n) * depth_);
        for (int j = 0; j < used; j += A::PER_WORD) {
            uint32_t* to = values_ + size_t(j / A::PER_WORD) * columns_;
            const Element* lines[2];
            for (int p = 0; p < A::PER_WORD; ++p) lines[p] = layer.values + offset(s_, slots[std::min(j + p, n - 1)], group);
            // Those after the last repeat it: their weight is 0.
            A::values(lines, s_.head_dim, to);
            for (int i = s_.head_dim; i < columns_; ++i) to[i] = 0;
        }
        if (TILES) turn(used / A::PER_WORD);
    }

    // Values as tiles read them: [columns][KEYS / PER_WORD] of the first `depth` words. Both are whole squares.
    void turn(int depth) {
        for (int i = 0; i < depth; i += W)
            for (int c = 0; c < columns_; c += W) {
                vu square[W];
                for (int j = 0; j < W; ++j) square[j] = load<vu>(values_ + size_t(i + j) * columns_ + c);
                transpose(square);
                for (int j = 0; j < W; ++j) store(turned_ + size_t(c + j) * (KEYS / A::PER_WORD) + i, square[j]);
            }
    }

    // One tile against the block of keys at positions at .. at + n - 1.
    void block(const Tile& tile, int at, int n, int window) {
        n = std::min(n, tile.newest + 1 - at);
        if (n <= 0 || (window && at + n - 1 <= tile.oldest - window)) return;
        if (tile.width == VECTORS)
            block_of<VECTORS>(tile, at, n, window);
        else if (tile.width == 2)
            block_of<2>(tile, at, n, window);
        else
            block_of<1>(tile, at, n, window);
    }

    template <int V>
    void block_of(const Tile& tile, int at, int n, int window) {
        const int used = (n + LINES - 1) / LINES * LINES;
        const bool hidden = at + used - 1 > tile.oldest || (window && at <= tile.newest - window) || used > n;
        vf top[V], rescale[V];
        score<V>(queries_ + size_t(tile.first) * depth_, used, top);
        if (scaling_.cap > 0 || hidden) change<V>(last_ + tile.first, at, n, used, window, top);
        weigh<V>(tile.first, used, top, rescale);
        add<V>(tile.first, used, rescale);
    }

    // sums[l][v] = the sum over i of lanes[i][v] * lines[l][i]. `line` and `next` are the ways from one line, and one i, to the
    // next. depth >= 1: the compiler need not provide for sums that stay zero, and keeps all in registers.
    template <int V>
    __attribute__((always_inline)) static void product(const uint32_t* lanes, const uint32_t* lines, size_t line, size_t next,
                                                       int depth, vf (&sums)[LINES][V]) {
        for (int l = 0; l < LINES; ++l)
            for (int v = 0; v < V; ++v) sums[l][v] = vf{};
        do {
            vu a[V];
            for (int v = 0; v < V; ++v) a[v] = load<vu>(lanes + v * W);
            for (int l = 0; l < LINES; ++l) {
                const vu b = splat_bits(lines[l * line]);
                for (int v = 0; v < V; ++v) sums[l][v] = A::step(sums[l][v], a[v], b);
            }
            lanes += V * W;
            lines += next;
        } while (--depth);
    }

    // Scores: [used][V * W]. top: the largest of each query.
    template <int V>
    void score(const uint32_t* queries, int used, vf (&top)[V]) {
        for (int v = 0; v < V; ++v) top[v] = splat(HIDDEN);
        float* to = scores_;
        const uint32_t* keys = keys_;
        const int depth = depth_;
        for (int k = 0; k < used; k += LINES, keys += size_t(LINES) * depth) {
            if constexpr (TILES) {
                multiply_two_tiles<F>(queries, keys, depth, depth, to);
                for (int l = 0; l < LINES; ++l)
                    for (int v = 0; v < V; ++v, to += W) top[v] = max(top[v], load<vf>(to));
            } else {
                vf sums[LINES][V];
                product<V>(queries, keys, depth, 1, depth, sums);
                for (int l = 0; l < LINES; ++l)
                    for (int v = 0; v < V; ++v, to += W) {
                        store(to, sums[l][v]);
                        top[v] = max(top[v], sums[l][v]);
                    }
            }
        }
    }

    // Caps scores, and hides those of keys that a query does not see.
    template <int V>
    void change(const int32_t* last, int at, int n, int used, int window, vf (&top)[V]) {
        for (int v = 0; v < V; ++v) {
            const vi newest = load<vi>(last + v * W) - at, oldest = window ? newest - window : vi{} - 1;
            top[v] = splat(HIDDEN);
            for (int k = 0; k < used; ++k) {
                float* to = scores_ + (k * V + v) * W;
                const vi key = k + vi{};
                const vf score = scaling_.cap > 0 ? scaling_.capped(load<vf>(to)) : load<vf>(to);
                const vf kept = ((key <= newest) & (key > oldest) & (key < n)) ? score : splat(HIDDEN);
                store(to, kept);
                top[v] = max(top[v], kept);
            }
        }
    }

    // Scores become weights, packed in the same memory: [used / PER_WORD][V * W]. rescale: by what the sums so far have to be
    // multiplied.
    template <int V>
    void weigh(int first, int used, vf (&top)[V], vf (&rescale)[V]) {
        float* const scores = scores_;
        vf total[V];
        for (int v = 0; v < V; ++v) {
            const vf before = load<vf>(best_ + first + v * W);
            top[v] = max(before, top[v]);
            store(best_ + first + v * W, top[v]);
            rescale[v] = exp2(before - top[v]);
            total[v] = load<vf>(total_ + first + v * W) * rescale[v];
        }
        for (int k = 0; k < used; k += A::PER_WORD)
            for (int v = 0; v < V; ++v) {
                vf weights[A::PER_WORD];
                for (int p = 0; p < A::PER_WORD; ++p) {
                    weights[p] = A::power(load<vf>(scores + ((k + p) * V + v) * W) - top[v]);
                    total[v] += weights[p];
                }
                store(scores + (k / A::PER_WORD * V + v) * W, A::pack(weights));
            }
        for (int v = 0; v < V; ++v) store(total_ + first + v * W, total[v]);
    }

    // Adds the weighed values to the tile's sums [columns][V * W].
    template <int V>
    void add(int first, int used, const vf (&rescale)[V]) {
        const uint32_t* weights = reinterpret_cast<const uint32_t*>(scores_);
        float* to = sums_ + size_t(first) * columns_;
        const uint32_t* values = TILES ? turned_ : values_;
        const int columns = columns_, depth = used / A::PER_WORD;
        for (int c = 0; c < columns; c += LINES) {
            alignas(64) vf sums[LINES][V];
            if constexpr (TILES)
                multiply_two_tiles<F>(weights, values + size_t(c) * (KEYS / A::PER_WORD), KEYS / A::PER_WORD, depth, reinterpret_cast<float*>(sums));
            else
                product<V>(weights, values + c, 1, columns, depth, sums);
            for (int l = 0; l < LINES; ++l)
                for (int v = 0; v < V; ++v, to += W) store(to, load<vf>(to) * rescale[v] + sums[l][v]);
        }
    }

    void put_results(const Tile& tile, const int32_t* rows, int group, int ordinal, float* out, const Parts& parts) {
        const int ratio = s_.ratio(), lanes = tile.width * W;
        for (int first = tile.first; first < tile.first + lanes; first += W) {
            const float* from = sums_ + size_t(tile.first) * columns_ + first - tile.first;
            for (int c = 0; c < columns_; c += W) {
                vu square[W];
                for (int j = 0; j < W; ++j) square[j] = c + j < columns_ ? load<vu>(from + size_t(c + j) * lanes) : vu{};
                transpose(square);
                for (int j = 0; j < W; ++j) store(square_ + j * padded() + c, square[j]);
            }
            for (int i = first; i < std::min(first + W, count_); ++i)
                parts.put(rows[i / ratio], group * ratio + i % ratio, ordinal, square_ + (i - first) * padded(), best_[i], total_[i], out);
        }
    }

    const HeadShape s_;
    const Scaling scaling_;
    const Plan& plan_;
    const int depth_, columns_;        // words of a key; columns of values, in whole tiles
    int count_ = 0, tile_count_ = 0;  // of the item's queries
    Tile* tiles_;
    uint32_t *queries_, *keys_, *values_, *turned_;
    float *scores_, *sums_, *best_, *total_, *square_;
    int32_t* last_;  // the last key that a query sees
};

}  // namespace trellis
