// A step's batch, and the plan of its attention: who reads which slots together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace trellis {

// As it comes from outside: the extends of all requests, flat. Sequence e stands at positions 0 .. starts[e] +
// lengths[e] - 1; its slots follow those of e - 1. The last lengths[e] tokens are new.
struct Extends {
    int count;
    const int32_t* lengths;
    const int32_t* starts;
    const int32_t* slots;
};

// A query row's tokens and where they lie.
struct Rows {
    std::vector<int32_t> position;
    std::vector<int32_t> slot;  // where its own key and value go
};

// Query rows that read keys [begin, end) of one run of slots. Position p of the run is slots[p]. Each row sees those up
// to its own position. ordinal: which part of a row's keys this is, counted from 0.
struct Item {
    int first;  // into Plan::row_list
    int rows;
    const int32_t* slots;
    int begin, end;
    int ordinal;
};

// alike: a row's result does not depend on the other rows, so nothing is read together or in parts.
// parts[row]: how many items a row is in; above 1 their results are merged. partial[row]: where these begin.
struct Plan {
    std::vector<Item> items;
    std::vector<int32_t> row_list;
    std::vector<int32_t> parts, partial;
    int partials = 0;
    bool alike = false;
    Rows rows;
};

constexpr int SHARED_KEYS = 64;   // shorter common runs are cheaper to read twice than to merge
constexpr int SPLIT_KEYS = 256;   // no part of a split context is shorter
// Queries (rows x heads of a key head) that share one pass over the keys: more, and packing keys costs less of it; fewer, where
// threads would otherwise have nothing to do.
constexpr int FEWEST_PANEL_QUERIES = 96, MOST_PANEL_QUERIES = 384;

// Groups extends by the runs of slots that they share. Requests whose sequences begin with the same slots (one node of
// the radix tree) read them together; what they go on with is grouped again, and so on down to each one's own.
class Planner {
public:
    Planner(const Extends& extends, int queries_per_row, int kv_heads, int threads, bool alike = false)
        : extends_(extends), ratio_(queries_per_row), kv_heads_(kv_heads), threads_(threads) {
        plan_.alike = alike;
    }

    Plan make() {
        lay_out();
        if (plan_.alike) {
            for (int e = 0; e < extends_.count; ++e) runs_.push_back(Run{{e}, 0, extends_.starts[e] + extends_.lengths[e], true});
        } else {
            std::vector<int> all(extends_.count);
            for (int e = 0; e < extends_.count; ++e) all[e] = e;
            descend(all, 0);
        }
        cut();
        return std::move(plan_);
    }

private:
    struct Run {
        std::vector<int> extends;
        int begin, end;
        bool own;  // the last run of one extend, with its new tokens
    };

    void lay_out() {
        const int32_t* slots = extends_.slots;
        int row = 0;
        for (int e = 0; e < extends_.count; ++e) {
            sequence_.push_back(slots);
            first_row_.push_back(row);
            const int start = extends_.starts[e], n = extends_.lengths[e];
            for (int i = 0; i < n; ++i) {
                plan_.rows.position.push_back(start + i);
                plan_.rows.slot.push_back(slots[start + i]);
            }
            row += n;
            slots += start + n;
        }
        plan_.parts.assign(row, 0);
        plan_.partial.assign(row, 0);
    }

    int common(int a, int b, int from, int end) const {
        const int32_t *x = sequence_[a], *y = sequence_[b];
        int i = from;
        while (i < end && x[i] == y[i]) ++i;
        return i;
    }

    // members: extends whose slots are the same up to `from`.
    void descend(std::vector<int>& members, int from) {
        std::vector<int> alone, rest;
        for (int e : members)
            (extends_.starts[e] - from >= SHARED_KEYS ? rest : alone).push_back(e);
        std::stable_sort(rest.begin(), rest.end(), [&](int a, int b) { return sequence_[a][from] < sequence_[b][from]; });
        for (size_t i = 0; i < rest.size();) {
            std::vector<int> group{rest[i]};
            int end = extends_.starts[rest[i]];
            size_t j = i + 1;
            for (; j < rest.size() && sequence_[rest[j]][from] == sequence_[rest[i]][from]; ++j) {
                const int shared = common(rest[i], rest[j], from, std::min(end, extends_.starts[rest[j]]));
                if (shared - from < SHARED_KEYS) {
                    alone.push_back(rest[j]);
                    continue;
                }
                end = shared;
                group.push_back(rest[j]);
            }
            i = j;
            if (group.size() == 1) {
                alone.push_back(group[0]);
                continue;
            }
            runs_.push_back(Run{group, from, end, false});
            descend(group, end);
        }
        for (int e : alone) runs_.push_back(Run{{e}, from, extends_.starts[e] + extends_.lengths[e], true});
    }

    int rows_of(const Run& run) const {
        int rows = 0;
        for (int e : run.extends) rows += extends_.lengths[e];
        return rows;
    }

    double cost(double rows, double keys) const { return (rows * ratio_ + 6) * keys * kv_heads_; }

    // Rows of a panel.
    int most_rows_of_panel() const {
        const int share = int(plan_.parts.size()) * ratio_ * kv_heads_ / (4 * threads_);
        return std::max(1, std::min(std::max(share, FEWEST_PANEL_QUERIES), MOST_PANEL_QUERIES) / ratio_);
    }

    // Runs become items: so many rows that their sums stay in the cache, so many keys that every thread has its share.
    // Shared runs come before the rest of their extends, so ordinals count along each sequence.
    void cut() {
        double total = 0;
        for (const Run& run : runs_) total += cost(rows_of(run), run.end - run.begin);
        const double target = threads_ == 1 || plan_.alike ? total + 1 : total / (3 * threads_);
        const int most = most_rows_of_panel();
        for (const Run& run : runs_) {
            const int rows = rows_of(run), at = int(plan_.row_list.size());
            for (int e : run.extends)
                for (int i = 0; i < extends_.lengths[e]; ++i) plan_.row_list.push_back(first_row_[e] + i);
            const int panels = (rows + most - 1) / most, keys = run.end - run.begin;
            const double piece = cost(double(rows) / panels, keys) / kv_heads_;
            const int splits = std::max(1, std::min(keys / SPLIT_KEYS, int(piece / target + 0.999)));
            const int ordinal = plan_.parts[plan_.row_list[at]];
            for (int p = 0; p < panels; ++p) {
                const int first = rows * p / panels, last = rows * (p + 1) / panels;
                int end = run.begin;  // of what some row of the panel sees
                for (int i = first; i < last; ++i)
                    end = std::max(end, std::min(run.end, plan_.rows.position[plan_.row_list[at + i]] + 1));
                const int64_t seen = end - run.begin;
                for (int s = 0; s < splits; ++s)
                    plan_.items.push_back(Item{at + first, last - first, sequence_[run.extends[0]],
                                               run.begin + int(seen * s / splits), run.begin + int(seen * (s + 1) / splits),
                                               ordinal + s});
            }
            for (int i = 0; i < rows; ++i) plan_.parts[plan_.row_list[at + i]] += splits;
        }
        for (size_t row = 0; row < plan_.parts.size(); ++row) {
            plan_.partial[row] = plan_.partials;
            if (plan_.parts[row] > 1) plan_.partials += plan_.parts[row];
        }
        std::stable_sort(plan_.items.begin(), plan_.items.end(), [&](const Item& a, const Item& b) {
            return cost(a.rows, a.end - a.begin) > cost(b.rows, b.end - b.begin);
        });
    }

    const Extends& extends_;
    const int ratio_, kv_heads_, threads_;
    std::vector<const int32_t*> sequence_;
    std::vector<int> first_row_;
    std::vector<Run> runs_;
    Plan plan_;
};

}  // namespace trellis
