// Attention of a ragged batch, in place over the slots of the pool.
//
// A plan (batch.h) says which rows read which keys together. Few queries (few.h) and many (wide.h) are computed each in
// their own way; where the keys of a row are read in several parts, these are merged afterwards (parts.h).
#pragma once

#include "few.h"
#include "memory.h"
#include "parts.h"
#include "threads.h"
#include "wide.h"

namespace trellis {

template <class F>
class Attention {
public:
    using Layer = AttentionLayer<typename F::Element>;

    Attention(const HeadShape& shape, const Plan& plan, int threads, Room& room) : s_(shape), plan_(plan), parts_(shape, plan, room) {
        for (int i = 0; i < threads; ++i) desks_.emplace_back(shape, plan, room);
        share_out(threads);
    }

    static size_t bytes(const HeadShape& s, const Plan& plan, int threads) {
        Counter counter;
        Desk(s, plan, counter);
        return threads * counter.used + Parts::bytes(s, plan);
    }

    // Two stages, `read` and, where there are parts, `merge`; the caller puts a barrier behind each.
    void read(Team& team, int me, const Layer& layer) {
        team.each(me, int(units_.size()), [&](int i) {
            const Unit& unit = units_[i];
            const Item& item = plan_.items[unit.item];
            if (few(item))
                desks_[me].few.attend(item, unit.first, unit.last, layer, parts_);
            else
                for (int g = unit.first; g < unit.last; ++g) desks_[me].wide.attend(item, g, layer, parts_);
        });
    }

    bool has_parts() const { return plan_.partials > 0; }

    void merge(Team& team, int me, float* out) const {
        team.each(me, int(plan_.parts.size()), [&](int row) { parts_.merge(row, out); });
    }

private:
    // What a thread works with.
    struct Desk {
        Few<F> few;
        Wide<F> wide;
        template <class Taker>
        Desk(const HeadShape& shape, const Plan& plan, Taker& room) : few(shape, plan, room), wide(shape, plan, room) {}
    };

    struct Counter {
        size_t used = 0;
        template <class T>
        T* take(size_t count) {
            used += Room::rounded(count * sizeof(T));
            return nullptr;
        }
    };

    // An item's key heads first .. last - 1.
    struct Unit {
        int item, first, last;
    };

    bool few(const Item& item) const { return !plan_.alike && Few<F>::takes(s_, item.rows); }

    // A decode reads all key heads of its slots together, whose memory is one run. Where there are few items, or many
    // queries in one, threads share out the heads.
    void share_out(int threads) {
        const bool enough = int(plan_.items.size()) >= 4 * threads;
        for (int i = 0; i < int(plan_.items.size()); ++i) {
            const int step = enough && few(plan_.items[i]) ? s_.kv_heads : 1;
            for (int g = 0; g < s_.kv_heads; g += step) units_.push_back(Unit{i, g, g + step});
        }
    }

    const HeadShape s_;
    const Plan& plan_;
    const Parts parts_;
    std::vector<Desk> desks_;
    std::vector<Unit> units_;
};

}  // namespace trellis
