// A few queries of each key head, as a decode has them: keys and values are read as they lie in the pool, once, and packing
// them would cost more than it saves. A lane is a key, or a column of values.
#pragma once

#include <algorithm>

#include "arithmetic.h"
#include "parts.h"

namespace trellis {

constexpr int FEW_KEYS = 16;  // keys in a block: the next one is fetched meanwhile, and the processor foresees runs so short best
constexpr int FEW = 8;  // queries of a key head; from there on `Wide` is quicker

template <class F>
class Few {
    using A = Arithmetic<F>;
    using Element = typename F::Element;
    using Layer = AttentionLayer<Element>;

public:
    template <class Taker>
    Few(const HeadShape& shape, const Plan& plan, Taker& room) : s_(shape), scaling_(shape), plan_(plan) {
        const size_t queries = size_t(FEW) * s_.kv_heads;
        queries_ = room.template take<uint32_t>(queries * s_.head_dim);
        scores_ = room.template take<float>(queries * FEW_KEYS);
        sums_ = room.template take<float>(queries * s_.head_dim);
        best_ = room.template take<float>(queries + W);  // these are read by whole vectors
        newest_ = room.template take<float>(queries + W);
        rescale_ = room.template take<float>(queries + W);
        total_ = room.template take<float>(queries * W);  // partial sums, added up at the end
    }

    // Whether it can: rows of keys are read in whole registers.
    static bool takes(const HeadShape& s, int rows) { return rows * s.ratio() <= FEW && s.head_dim % BLOCK == 0; }

    // The item's rows x the heads of key heads first .. last - 1, whose keys and values are one run of memory.
    void attend(const Item& item, int first, int last, const Layer& layer, const Parts& parts) {
        const int32_t* rows = plan_.row_list.data() + item.first;
        each_ = item.rows * s_.ratio(), first_ = first, groups_ = last - first;
        int newest = 0, oldest = item.end;
        for (int i = 0; i < item.rows; ++i) {
            newest = std::max(newest, plan_.rows.position[rows[i]]);
            oldest = std::min(oldest, plan_.rows.position[rows[i]]);
        }
        take_queries(rows, layer);
        const int begin = layer.window ? std::max(item.begin, oldest - layer.window + 1) : item.begin;
        const int end = std::min(item.end, newest + 1);
        find(item.slots + begin, std::min(FEW_KEYS, end - begin), layer, keys_, values_);
        for (int at = begin; at < end; at += FEW_KEYS) {
            const int n = std::min(FEW_KEYS, end - at), next = std::min(FEW_KEYS, end - at - n);
            find(item.slots + at + n, next, layer, next_keys_, next_values_);
            std::fill(next_keys_ + next, next_keys_ + FEW_KEYS, keys_[0]);
            std::fill(next_values_ + next, next_values_ + FEW_KEYS, values_[0]);
            for (int k = 0; k < n; k += W) score_of(s_.head_dim / BLOCK)(*this, k, n);
            weigh(rows, at, n, layer.window);
            for (int g = 0; g < groups_; ++g) {
                add(each_)(*this, g, n);
            }
            std::copy_n(next_keys_, next, keys_);
            std::copy_n(next_values_, next, values_);
        }
        for (int i = 0; i < each_ * groups_; ++i) {
            const int row = rows[i % each_ / s_.ratio()], head = (first + i / each_) * s_.ratio() + i % s_.ratio();
            const float total = sum(load<vf>(total_ + i * W));
            parts.put(row, head, item.ordinal, sums_ + size_t(i) * s_.head_dim, best_[i], total, layer.out);
        }
    }

private:
    static constexpr int LINE = int(64 / sizeof(Element));
    int words() const { return s_.head_dim / A::PER_WORD; }

    void take_queries(const int32_t* rows, const Layer& layer) {
        const int count = each_ * groups_, ratio = s_.ratio();
        for (int i = 0; i < count; ++i) {
            const int row = rows[i % each_ / ratio], head = (first_ + i / each_) * ratio + i % ratio;
            const float* from = layer.queries + row * layer.stride + head * s_.head_dim;
            for (int w = 0; w < words(); w += W) store(queries_ + i * words() + w, A::words(from + w * A::PER_WORD, scaling_.queries));
        }
        std::memset(sums_, 0, sizeof(float) * count * s_.head_dim);
        std::fill_n(best_, count, NOTHING_SEEN);
        std::fill_n(total_, count * W, 0.0f);
    }

    // Where keys and values of the heads lie.
    void find(const int32_t* slots, int n, const Layer& layer, const Element** keys, const Element** values) const {
        for (int j = 0; j < n; ++j) {
            const size_t at = (size_t(slots[j]) * s_.kv_heads + first_) * s_.head_dim;
            keys[j] = layer.keys + at;
            values[j] = layer.values + at;
        }
    }

    // Scores of keys k .. k + W - 1, of which those from n on do not count; [queries][FEW_KEYS]. Meanwhile the same keys of the next
    // block are asked for, one with each that is read: a processor drops requests that come faster than memory answers.
    // BLOCKS: of a row, or 0 for any number.
    template <int BLOCKS>
    static void score(Few& f, int k, int n) {
        const int dim = BLOCKS ? BLOCKS * BLOCK : f.s_.head_dim, words = f.words();
        for (int g = 0; g < f.groups_; ++g) {
            const Element *keys[W], *next[W];
            for (int j = 0; j < W; ++j) {
                keys[j] = f.keys_[std::min(k + j, n - 1)] + g * dim;
                next[j] = f.next_keys_[k + j] + g * dim;
            }
            for (int i = 0; i < f.each_; ++i) {
                const int query = g * f.each_ + i;
                vf part[W];
                for (int j = 0; j < W; ++j) {
                    part[j] = A::dot(keys[j], f.queries_ + query * words, dim);
                    for (int at = i * LINE; at < dim; at += f.each_ * LINE) __builtin_prefetch(next[j] + at, 0, 2);
                }
                store(f.scores_ + query * FEW_KEYS + k, sums_of(part));
            }
        }
    }

    using Score = void (*)(Few&, int, int);
    static Score score_of(int blocks) {
        static constexpr Score table[] = {score<0>, score<1>, score<2>, score<3>, score<4>};
        return table[blocks <= 4 ? blocks : 0];
    }

    // Scores become weights, packed in the same memory. rescale_: by what the sums so far have to be multiplied.
    void weigh(const int32_t* rows, int at, int n, int window) {
        const int used = (n + W - 1) / W * W, count = each_ * groups_;
        for (int i = 0; i < count; ++i) {
            const int position = plan_.rows.position[rows[i % each_ / s_.ratio()]];
            const int low = window ? position - window + 1 - at : 0, high = std::min(n, position + 1 - at);
            float* scores = scores_ + i * FEW_KEYS;
            if (scaling_.cap > 0 || low > 0 || high < used) change(scores, used, low, high);
            vf top = load<vf>(scores);
            for (int k = W; k < used; k += W) top = max(top, load<vf>(scores + k));
            newest_[i] = std::max(best_[i], largest(top));
        }
        for (int i = 0; i < count; i += W) {
            const vf newest = load<vf>(newest_ + i);
            store(rescale_ + i, exp2(load<vf>(best_ + i) - newest));
            store(best_ + i, newest);
        }
        for (int i = 0; i < count; ++i) {
            float* scores = scores_ + i * FEW_KEYS;
            vf total = load<vf>(total_ + i * W) * rescale_[i];
            for (int k = 0; k < FEW_KEYS; k += W) {
                const vf weights = k < used ? A::power(load<vf>(scores + k) - newest_[i]) : vf{};
                total += weights;
                store(scores + k, weights);
            }
            store(total_ + i * W, total);
            A::pack_row(scores, FEW_KEYS);
        }
    }

    // Caps a query's scores, and hides those of keys that it does not see.
    void change(float* scores, int used, int low, int high) const {
        for (int k = 0; k < used; k += W) {
            vf score = load<vf>(scores + k);
            if (scaling_.cap > 0) score = scaling_.capped(score);
            const vi key = lanes() + k;
            store(scores + k, ((key >= low) & (key < high)) ? score : splat(HIDDEN));
        }
    }

    // Adds the weighed values of head g.
    template <int ROWS>
    static void add_values(Few& f, int g, int n) {
        const int dim = f.s_.head_dim, depth = (n + A::PER_WORD - 1) / A::PER_WORD;
        const uint32_t* weights = reinterpret_cast<const uint32_t*>(f.scores_ + size_t(g) * ROWS * FEW_KEYS);
        for (int c = 0; c < dim; c += BLOCK) {
            vf part[ROWS][2] = {};
            for (int k = 0; k < depth; ++k) {
                const Element* lines[2];
                for (int p = 0; p < A::PER_WORD; ++p) lines[p] = f.values_[std::min(k * A::PER_WORD + p, n - 1)];
                vu low, high;
                A::columns(lines, g * dim + c, low, high);
                for (int p = 0; p < A::PER_WORD; ++p)
                    for (int at = c; at < c + BLOCK; at += LINE) __builtin_prefetch(f.next_values_[k * A::PER_WORD + p] + g * dim + at, 0, 2);
                for (int r = 0; r < ROWS; ++r) {
                    const vu weight = splat_bits(weights[r * FEW_KEYS + k]);
                    part[r][0] = A::step(part[r][0], low, weight);
                    part[r][1] = A::step(part[r][1], high, weight);
                }
            }
            for (int r = 0; r < ROWS; ++r)
                for (int half = 0; half < 2; ++half) {
                    float* to = f.sums_ + size_t(g * ROWS + r) * dim + c + half * W;
                    store(to, load<vf>(to) * f.rescale_[g * ROWS + r] + part[r][half]);
                }
        }
    }

    using Add = void (*)(Few&, int, int);
    template <int... I>
    static Add add(int rows, std::integer_sequence<int, I...>) {
        static constexpr Add table[] = {add_values<I + 1>...};
        return table[rows - 1];
    }
    static Add add(int rows) { return add(rows, std::make_integer_sequence<int, FEW>()); }

    const HeadShape s_;
    const Scaling scaling_;
    const Plan& plan_;
    int each_ = 0, first_ = 0, groups_ = 0;  // queries of a key head; the item's key heads
    uint32_t* queries_;
    float *scores_, *sums_, *best_, *newest_, *rescale_, *total_;
    const Element *keys_[FEW_KEYS], *values_[FEW_KEYS];            // of the block in work
    const Element *next_keys_[FEW_KEYS], *next_values_[FEW_KEYS];  // of the one after it
};

}  // namespace trellis
