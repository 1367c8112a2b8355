// Attention of a ragged batch, in place over the slots of the pool.
//
// Blocks of keys and values are gathered and packed as weights are, so that scores and sums are products of the same
// kernel; the softmax runs along the blocks (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022,
// arXiv:2205.14135). Where the keys of a row are read in several parts, each part leaves its sums, its largest score and
// its total weight, and the parts are merged by these (the log-sum-exp merge; Juravsky et al. 2024, arXiv:2402.05099).
#pragma once

#include <cmath>

#include "batch.h"
#include "memory.h"
#include "threads.h"
#include "tile.h"

namespace trellis {

struct HeadShape {
    int heads, kv_heads, head_dim;
    float scale;
    float soft_cap;  // 0: none
    int ratio() const { return heads / kv_heads; }
    int width() const { return heads * head_dim; }
    int blocks() const { return (head_dim + BLOCK - 1) / BLOCK; }
};

constexpr int KEYS = 64;  // keys in a block
static_assert(KEYS % BLOCK == 0, "a block of keys is made of whole blocks of outputs");
constexpr int FEW = 4;    // so many queries of a key head read keys and values as they lie: packing would cost more
constexpr int MOST_BLOCKS = 4;
constexpr float NOTHING_SEEN = -INFINITY;
constexpr float LOG2_E = 1.44269504f;

// What a thread works in.
template <class F>
struct Desk {
    uint32_t *queries, *keys, *values, *weights, *words;
    float *scores, *sums, *out, *best, *total, *newest, *rescale;
    typename F::Element* zeros;
    const typename F::Element *key[KEYS], *value[KEYS];  // rows of the block in work

    static size_t bytes(const HeadShape& s) {
        Counter counter;
        Desk().lay(counter, s);
        return counter.used;
    }

    template <class Taker>
    void lay(Taker& from, const HeadShape& s) {
        const int padded = s.blocks() * BLOCK;
        const size_t queries_max = size_t(std::max(PANEL_QUERIES, s.heads));
        queries = from.template take<uint32_t>(queries_max * F::panel_depth(s.head_dim));
        keys = from.template take<uint32_t>(size_t(KEYS) * F::depth(s.head_dim));
        values = from.template take<uint32_t>(size_t(F::depth(KEYS)) * padded);
        weights = from.template take<uint32_t>(size_t(MAX_ROWS) * F::panel_depth(KEYS));
        words = from.template take<uint32_t>(F::panel_depth(std::max(KEYS, s.head_dim + 1)));
        scores = from.template take<float>(size_t(MAX_ROWS) * KEYS);
        sums = from.template take<float>(size_t(MAX_ROWS) * BLOCK);
        out = from.template take<float>(queries_max * padded);
        best = from.template take<float>(queries_max + W);  // read by whole vectors
        total = from.template take<float>(queries_max * W);  // partial sums, added up at the end
        newest = from.template take<float>(MAX_ROWS + W);
        rescale = from.template take<float>(MAX_ROWS + W);
        zeros = from.template take<typename F::Element>(s.head_dim);
    }

private:
    struct Counter {
        size_t used = 0;
        template <class T>
        T* take(size_t count) {
            used += Room::rounded(count * sizeof(T));
            return nullptr;
        }
    };
};

template <class F>
class Attention {
public:
    using Element = typename F::Element;

    Attention(const HeadShape& shape, const Plan& plan, int threads, Room& room) : s_(shape), unit_(LOG2_E * (shape.soft_cap > 0 ? shape.soft_cap : shape.scale)), plan_(plan) {
        desks_.resize(threads);
        for (Desk<F>& desk : desks_) {
            desk.lay(room, s_);
            std::memset(desk.zeros, 0, sizeof(Element) * s_.head_dim);
        }
        share_out(threads);
        partial_out_ = room.take<float>(size_t(plan.partials) * s_.width());
        partial_best_ = room.take<float>(size_t(plan.partials) * s_.heads);
        partial_total_ = room.take<float>(size_t(plan.partials) * s_.heads);
    }

    static size_t bytes(const HeadShape& s, const Plan& plan, int threads) {
        return threads * Desk<F>::bytes(s) + Room::rounded(size_t(plan.partials) * s.width() * 4) +
               2 * Room::rounded(size_t(plan.partials) * s.heads * 4);
    }

    // One layer. queries: [rows] with `stride` floats from one to the next, heads one after the other. keys, values:
    // [slots, kv_heads, head_dim]. out: [rows, heads * head_dim]. window: 0 for none.
    struct Layer {
        const float* queries;
        size_t stride;
        const Element *keys, *values;
        int window;
        float* out;
    };

    // Two stages, `read` and, where there are parts, `merge`; the caller puts a barrier behind each.
    void read(Team& team, int me, const Layer& layer) {
        team.each(me, int(units_.size()), [&](int i) {
            const Unit& unit = units_[i];
            attend(desks_[me], plan_.items[unit.item], unit.first, unit.last, layer);
        });
    }

    bool has_parts() const { return plan_.partials > 0; }

    void merge(Team& team, int me, float* out) {
        team.each(me, int(plan_.parts.size()), [&](int row) {
            if (plan_.parts[row] > 1)
                for (int h = 0; h < s_.heads; ++h) merge_head(row, h, out + size_t(row) * s_.width() + h * s_.head_dim);
        });
    }

private:
    // An item's key heads first .. last - 1.
    struct Unit {
        int item, first, last;
    };

    // A decode reads all key heads of its slots together, whose memory is one run. Where there are few items, or many
    // queries in one, threads share out the heads.
    void share_out(int threads) {
        const bool enough = int(plan_.items.size()) >= 4 * threads;
        for (int i = 0; i < int(plan_.items.size()); ++i) {
            const bool together = enough && plan_.items[i].rows * s_.heads <= PANEL_QUERIES;
            const int step = together ? s_.kv_heads : 1;
            for (int g = 0; g < s_.kv_heads; g += step) units_.push_back(Unit{i, g, g + step});
        }
    }

    void attend(Desk<F>& d, const Item& item, int first, int last, const Layer& layer) {
        const int32_t* rows = plan_.row_list.data() + item.first;
        const int32_t* position = plan_.rows.position.data();
        const int ratio = s_.ratio(), each = item.rows * ratio, queries = each * (last - first), depth = F::panel_depth(s_.head_dim);
        int newest = 0, oldest = item.end;
        for (int i = 0; i < item.rows; ++i) {
            newest = std::max(newest, position[rows[i]]);
            oldest = std::min(oldest, position[rows[i]]);
        }
        for (int g = first; g < last; ++g) {
            uint32_t* packed = d.queries + size_t(g - first) * each * depth;
            const Panel panel(packed, each, depth);
            for (int i = 0; i < each; ++i) {
                F::pack(layer.queries + rows[i / ratio] * layer.stride + (g * ratio + i % ratio) * s_.head_dim, s_.head_dim, d.words);
                if (direct(each))
                    std::copy_n(d.words, depth, packed + size_t(i) * depth);
                else
                    panel.put(i, d.words);
            }
        }
        std::memset(d.out, 0, sizeof(float) * queries * s_.blocks() * BLOCK);
        std::fill_n(d.best, queries, NOTHING_SEEN);
        std::fill_n(d.total, queries * W, 0.0f);
        const int end = std::min(item.end, newest + 1);
        int begin = layer.window ? std::max(item.begin, oldest - layer.window + 1) : item.begin;
        if (plan_.alike) begin = begin / KEYS * KEYS;  // where blocks begin must not depend on the oldest row
        fetch(item.slots + begin, std::min(KEYS, end - begin), first, last, layer);
        for (int at = begin; at < end; at += KEYS) {
            const int n = std::min(KEYS, end - at), next = std::min(KEYS, end - at - n);
            for (int g = first; g < last; ++g) {
                const int from = next * (g - first) / (last - first), to = next * (g - first + 1) / (last - first);
                fetch(item.slots + at + n + from, to - from, first, last, layer);
                gather(d, item.slots + at, n, g, layer, direct(each));
                const Panel panel(d.queries + size_t(g - first) * each * depth, each, depth);
                for (int t = 0; t < panel.tiles(); ++t)
                    block(d, panel, t, (g - first) * each, at, n, rows, layer.window);
            }
        }
        for (int i = 0; i < queries; ++i)
            finish(d, i, rows[i % each / ratio], (first + i / each) * ratio + i % ratio, item.ordinal, layer.out);
    }

    // Asks for some slots' keys and values of the heads, so that they are there when the block before them is done.
    void fetch(const int32_t* slots, int n, int first, int last, const Layer& layer) const {
        for (int j = 0; j < n; ++j) {
            const size_t at = (slots[j] * size_t(s_.kv_heads) + first) * s_.head_dim;
            for (int i = 0; i < (last - first) * s_.head_dim; i += int(64 / sizeof(Element))) {
                __builtin_prefetch(layer.keys + at + i, 0, 2);
                __builtin_prefetch(layer.values + at + i, 0, 2);
            }
        }
    }

    bool direct(int queries) const {
        return F::DIRECT && !plan_.alike && queries <= FEW && s_.head_dim % BLOCK == 0 && s_.blocks() <= MOST_BLOCKS;
    }

    // Finds the keys and values of n slots, and packs them unless they are read as they lie. The rest of the block is zero.
    void gather(Desk<F>& d, const int32_t* slots, int n, int group, const Layer& layer, bool direct) {
        for (int j = 0; j < KEYS; ++j) {
            const size_t at = j < n ? (slots[j] * size_t(s_.kv_heads) + group) * s_.head_dim : 0;
            d.key[j] = j < n ? layer.keys + at : d.zeros;
            d.value[j] = j < n ? layer.values + at : d.zeros;
        }
        if (direct) return;
        const int depth = F::depth(s_.head_dim), used = (n + BLOCK - 1) / BLOCK;
        for (int b = 0; b < used; ++b) {
            const uint32_t* words[BLOCK];
            for (int j = 0; j < BLOCK; ++j) words[j] = reinterpret_cast<const uint32_t*>(d.key[b * BLOCK + j]);
            transpose_block(words, depth, d.keys + size_t(b) * depth * BLOCK);
        }
        for (int b = 0; b < s_.blocks(); ++b)
            F::pack_values(d.value, used * BLOCK, b * BLOCK, s_.head_dim - b * BLOCK, d.values + size_t(b) * F::depth(KEYS) * BLOCK);
    }

    // One tile of a head's queries, which begin at `base`, against one block of keys, positions at .. at + n - 1.
    void block(Desk<F>& d, const Panel& panel, int t, int base, int at, int n, const int32_t* rows, int window) {
        const int first = base + t * panel.tile, height = panel.tile_rows(t), used = (n + BLOCK - 1) / BLOCK;
        const int depth = F::depth(s_.head_dim), padded = s_.blocks() * BLOCK;
        const bool few = direct(panel.rows);
        const Tile product = tile_for<F, false>(height, plan_.alike);
        for (int b = 0; b < used; ++b) {  // scores: [used][height][BLOCK]
            float* scores = d.scores + b * height * BLOCK;
            if (few)
                direct_scores(s_.blocks())(d.key + b * BLOCK, panel.data, height, scores);
            else
                product(d.keys + size_t(b) * depth * BLOCK, panel.tile_data(t), depth, scores, Ahead{});
        }
        soften(d, panel, t, first, at, n, used, rows, window);
        for (int b = 0; b < s_.blocks(); ++b) {
            if (few)
                direct_sums(height)(d.value, F::depth(n), b * BLOCK, d.weights, d.sums);
            else
                product(d.values + size_t(b) * F::depth(KEYS) * BLOCK, d.weights, F::depth(used * BLOCK), d.sums, Ahead{});
            for (int r = 0; r < height; ++r) {
                float* out = d.out + size_t(first + r) * padded + b * BLOCK;
                for (int half = 0; half < BLOCK; half += W)
                    store(out + half, load<vf>(out + half) * d.rescale[r] + load<vf>(d.sums + r * BLOCK + half));
            }
        }
    }

    // The scores of some queries (packed rows) against BLOCK keys: [queries][BLOCK].
    template <int BLOCKS>
    static void score(const Element* const* keys, const uint32_t* queries, int count, float* scores) {
        for (int half = 0; half < BLOCK; half += W)
            for (int r = 0; r < count; ++r) {
                vf part[W];
                for (int j = 0; j < W; ++j)
                    part[j] = F::template dot<BLOCKS>(keys[half + j], queries + r * F::panel_depth(BLOCKS * BLOCK));
                store(scores + r * BLOCK + half, sums_of(part));
            }
    }

    using Score = void (*)(const Element* const*, const uint32_t*, int, float*);
    static Score direct_scores(int blocks) {
        static constexpr Score table[MOST_BLOCKS] = {score<1>, score<2>, score<3>, score<4>};
        return table[blocks - 1];
    }

    // BLOCK columns of the sums of values by weights ([depth][ROWS] words): [ROWS][BLOCK].
    template <int ROWS>
    static void sum_values(const Element* const* rows, int depth, int column, const uint32_t* weights, float* sums) {
        vf part[ROWS][2] = {};
        for (int i = 0; i < depth; ++i, weights += F::PANEL_WORDS * ROWS) {
            vu w0, w1;
            F::values(rows, i, column, w0, w1);
            F::template step<ROWS>(part, w0, w1, weights);
        }
        for (int r = 0; r < ROWS; ++r) {
            store(sums + r * BLOCK, part[r][0]);
            store(sums + r * BLOCK + W, part[r][1]);
        }
    }

    using SumValues = void (*)(const Element* const*, int, int, const uint32_t*, float*);
    static SumValues direct_sums(int rows) {
        static constexpr SumValues table[FEW] = {sum_values<1>, sum_values<2>, sum_values<3>, sum_values<4>};
        return table[rows - 1];
    }

    // The scores of a tile become weights, packed as a panel; d.rescale is by what the sums so far have to be multiplied.
    // Scores are in units of log 2, since powers of 2 are quicker.
    void soften(Desk<F>& d, const Panel& panel, int t, int first, int at, int n, int used, const int32_t* rows, int window) {
        const int height = panel.tile_rows(t), stride = height * BLOCK;
        float* best = d.best + first;
        bool seen[MAX_ROWS];
        for (int r = 0; r < height; ++r) {
            const int position = plan_.rows.position[rows[(t * panel.tile + r) / s_.ratio()]];
            const int low = window ? std::max(0, position - window + 1 - at) : 0, high = std::min(n, position + 1 - at);
            float* scores = d.scores + r * BLOCK;
            if (s_.soft_cap > 0) cap(scores, stride, used);
            if (low > 0 || high < used * BLOCK) hide(scores, stride, used, low, high);
            vf top = load<vf>(scores);
            for (int b = 0; b < used; ++b) top = max(top, max(load<vf>(scores + b * stride), load<vf>(scores + b * stride + W)));
            d.newest[r] = std::max(best[r], largest(top) * unit_);
            seen[r] = d.newest[r] != NOTHING_SEEN;
            if (!seen[r]) d.newest[r] = 0;  // all weights are 0 then, and no infinities meet
        }
        for (int r = 0; r < height; r += W) store(d.rescale + r, exp2(load<vf>(best + r) - load<vf>(d.newest + r)));
        const Panel weights(d.weights, height, F::panel_depth(used * BLOCK));
        for (int r = 0; r < height; ++r) {
            vf total = load<vf>(d.total + size_t(first + r) * W) * d.rescale[r];
            for (int b = 0; b < used; ++b) {
                const float* scores = d.scores + b * stride + r * BLOCK;
                const vf low = exp2(load<vf>(scores) * unit_ - d.newest[r]), high = exp2(load<vf>(scores + W) * unit_ - d.newest[r]);
                F::pack_block(low, high, d.words + b * F::panel_depth(BLOCK));
                total += low + high;
            }
            store(d.total + size_t(first + r) * W, total);
            if (seen[r]) best[r] = d.newest[r];
            weights.put(r, d.words);
        }
    }

    void cap(float* scores, int stride, int used) const {
        for (int b = 0; b < used; ++b)
            for (int half = 0; half < BLOCK; half += W) {
                float* at = scores + b * stride + half;
                store(at, tanh(load<vf>(at) * (s_.scale / s_.soft_cap)));
            }
    }

    // Keys outside of [low, high) get no weight.
    static void hide(float* scores, int stride, int used, int low, int high) {
        for (int b = 0; b < used; ++b)
            for (int half = 0; half < BLOCK; half += W) {
                float* at = scores + b * stride + half;
                const vi place = lanes() + (b * BLOCK + half);
                store(at, ((place >= low) & (place < high)) ? load<vf>(at) : splat(NOTHING_SEEN));
            }
    }

    void finish(Desk<F>& d, int query, int row, int head, int ordinal, float* out) {
        const float* from = d.out + size_t(query) * s_.blocks() * BLOCK;
        const float total = sum(load<vf>(d.total + size_t(query) * W));
        if (plan_.parts[row] == 1) {
            const float share = 1.0f / total;
            float* to = out + size_t(row) * s_.width() + head * s_.head_dim;
            for (int i = 0; i < s_.head_dim; ++i) to[i] = from[i] * share;
            return;
        }
        const int part = plan_.partial[row] + ordinal;
        std::memcpy(partial_out_ + size_t(part) * s_.width() + head * s_.head_dim, from, sizeof(float) * s_.head_dim);
        partial_best_[part * s_.heads + head] = d.best[query];
        partial_total_[part * s_.heads + head] = total;
    }

    void merge_head(int row, int head, float* to) {
        const int first = plan_.partial[row], parts = plan_.parts[row];
        float best = NOTHING_SEEN, total = 0;
        for (int p = 0; p < parts; ++p) best = std::max(best, partial_best_[(first + p) * s_.heads + head]);
        std::fill_n(to, s_.head_dim, 0.0f);
        for (int p = 0; p < parts; ++p) {
            const size_t part = first + p;
            const float weight = std::exp2(partial_best_[part * s_.heads + head] - best);
            if (weight == 0) continue;
            total += weight * partial_total_[part * s_.heads + head];
            const float* from = partial_out_ + part * s_.width() + head * s_.head_dim;
            for (int i = 0; i < s_.head_dim; ++i) to[i] += weight * from[i];
        }
        for (int i = 0; i < s_.head_dim; ++i) to[i] /= total;
    }

    const HeadShape s_;
    const float unit_;  // raw scores, or those divided by their cap, times this are logarithms of base 2
    const Plan& plan_;
    std::vector<Desk<F>> desks_;
    std::vector<Unit> units_;
    float *partial_out_, *partial_best_, *partial_total_;
};

}  // namespace trellis
