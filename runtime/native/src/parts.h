// The results of rows whose keys are read in several parts: each part leaves its sums, its largest score and its total
// weight, and these are merged (the log-sum-exp merge; Juravsky et al. 2024, arXiv:2402.05099).
#pragma once

#include <cmath>

#include "batch.h"
#include "heads.h"
#include "memory.h"

namespace trellis {

class Parts {
public:
    Parts(const HeadShape& shape, const Plan& plan, Room& room) : s_(shape), plan_(plan) {
        sums_ = room.take<float>(size_t(plan.partials) * s_.width());
        best_ = room.take<float>(size_t(plan.partials) * s_.heads);
        total_ = room.take<float>(size_t(plan.partials) * s_.heads);
    }

    static size_t bytes(const HeadShape& s, const Plan& plan) {
        return Room::rounded(size_t(plan.partials) * s.width() * 4) + 2 * Room::rounded(size_t(plan.partials) * s.heads * 4);
    }

    // One query's part: the sums of values [head_dim], not yet divided by their total weight. best: in units of log 2.
    void put(int row, int head, int ordinal, const float* sums, float best, float total, float* out) const {
        if (plan_.parts[row] == 1) {
            const float share = 1.0f / total;
            float* to = out + size_t(row) * s_.width() + size_t(head) * s_.head_dim;
            for (int i = 0; i < s_.head_dim; ++i) to[i] = sums[i] * share;
            return;
        }
        const size_t part = plan_.partial[row] + ordinal;
        std::memcpy(sums_ + part * s_.width() + size_t(head) * s_.head_dim, sums, sizeof(float) * s_.head_dim);
        best_[part * s_.heads + head] = best;
        total_[part * s_.heads + head] = total;
    }

    void merge(int row, float* out) const {
        if (plan_.parts[row] == 1) return;
        for (int h = 0; h < s_.heads; ++h) merge_head(row, h, out + size_t(row) * s_.width() + size_t(h) * s_.head_dim);
    }

private:
    void merge_head(int row, int head, float* to) const {
        const size_t first = plan_.partial[row], end = first + plan_.parts[row];
        float best = NOTHING_SEEN, total = 0;
        for (size_t part = first; part < end; ++part) best = std::max(best, best_[part * s_.heads + head]);
        std::fill_n(to, s_.head_dim, 0.0f);
        for (size_t part = first; part < end; ++part) {
            const float weight = std::exp2(best_[part * s_.heads + head] - best);
            if (weight == 0) continue;
            total += weight * total_[part * s_.heads + head];
            const float* from = sums_ + part * s_.width() + size_t(head) * s_.head_dim;
            for (int i = 0; i < s_.head_dim; ++i) to[i] += weight * from[i];
        }
        for (int i = 0; i < s_.head_dim; ++i) to[i] /= total;
    }

    const HeadShape s_;
    const Plan& plan_;
    float *sums_, *best_, *total_;
};

}  // namespace trellis
