// The best token of a row of logits, among those that a mask allows: greedy choice in one pass.
#pragma once

#include <cmath>

#include "vec.h"

namespace trellis {

constexpr int MASK_BITS = 32;
constexpr int NO_TOKEN = -1;

// mask: a bit a token, lowest first; null allows all. The first of equals; NO_TOKEN if there is no finite best, or one of
// the allowed is not a number.
inline int best_token(const float* logits, const uint32_t* mask, int vocab) {
    vf best = splat(-INFINITY);
    vi where = lanes() * 0 + NO_TOKEN, strange{};
    int at = 0;
    for (; at + MASK_BITS <= vocab; at += MASK_BITS) {
        const uint32_t word = mask ? mask[at / MASK_BITS] : ~0u;
        if (word == 0) continue;
        for (int i = 0; i < MASK_BITS; i += W) {
            const vf x = load<vf>(logits + at + i);
            vi better = x > best, odd = x != x;
            if (word != ~0u) {
                const vi allowed = ((vi)(splat_bits(word >> i) << (31 - (vu)lanes())) < 0);
                better &= allowed;
                odd &= allowed;
            }
            best = better ? x : best;
            where = better ? lanes() + (at + i) : where;
            strange |= odd;
        }
    }
    float top = -INFINITY;
    int token = NO_TOKEN;
    bool bad = false;
    const auto look = [&](float x, int index) {
        if (x > top || (x == top && index < token)) top = x, token = index;
    };
    for (int i = 0; i < W; ++i) {
        bad |= strange[i] != 0;
        if (where[i] >= 0) look(best[i], where[i]);
    }
    for (; at < vocab; ++at) {
        if (mask && !(mask[at / MASK_BITS] >> at % MASK_BITS & 1)) continue;
        bad |= logits[at] != logits[at];
        look(logits[at], at);
    }
    return bad || top == INFINITY || top == -INFINITY ? NO_TOKEN : token;
}

}  // namespace trellis
