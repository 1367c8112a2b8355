// Where groups of quantised weights come from: blocks as GGUF files have them, or floats.
// Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include "groups.h"

namespace trellis {

// What rows of weights are made of. Blocks have ggml's own numbers.
enum class Source : int { F32 = 0, BF16 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12 };

inline bool is_blocks(Source kind) { return kind != Source::F32 && kind != Source::BF16; }

inline size_t row_bytes(Source kind, int k) {
    switch (kind) {
        case Source::F32: return size_t(k) * 4;
        case Source::BF16: return size_t(k) * 2;
        case Source::Q4_0: return size_t(k) / 32 * 18;
        case Source::Q4_1: return size_t(k) / 32 * 20;
        case Source::Q8_0: return size_t(k) / 32 * 34;
        case Source::Q4_K: return size_t(k) / 256 * 144;
    }
    return 0;
}

// Group g of a row of Q4_K: 256 inputs have a half for scales and one for minima, times 6 bits for each group.
inline void put_q4_k(const uint8_t* row, int g, uint32_t* group, int lane) {
    const uint8_t *block = row + g / 8 * 144, *packed = block + 4, *nibbles = block + 16 + g % 8 / 2 * 32;
    const int j = g % 8, shift = j % 2 * 4;
    const int scale = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    const int minimum = j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
    uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = uint8_t((nibbles[i] >> shift & 15) | (nibbles[i + 16] >> shift & 15) << 4);
    Q4::put_group(bytes, to_half(from_half(load_half(block)) * float(scale)),
                  to_half(-from_half(load_half(block + 2)) * float(minimum)), group, lane);
}

// One output's blocks, as they are.
inline void put_blocks(Q4, const uint8_t* row, Source kind, int groups, uint32_t* block, int lane) {
    for (int g = 0; g < groups; ++g, block += Q4::GROUP_WORDS) {
        if (kind == Source::Q4_K) {
            put_q4_k(row, g, block, lane);
        } else if (kind == Source::Q4_1) {
            const uint8_t* from = row + g * 20;
            Q4::put_group(from + 4, load_half(from), load_half(from + 2), block, lane);
        } else {  // Q4_0: (u - 8) * s
            const uint8_t* from = row + g * 18;
            Q4::put_group(from + 2, load_half(from), to_half(-8.0f * from_half(load_half(from))), block, lane);
        }
    }
}

inline void put_blocks(Q8, const uint8_t* row, Source, int groups, uint32_t* block, int lane) {
    for (int g = 0; g < groups; ++g, block += Q8::GROUP_WORDS, row += 34) {
        Q8::halves(block)[lane] = load_half(row);
        for (int j = 0; j < Q8::WORDS; ++j)  // with the sign bit turned: from -128 .. 127 to 0 .. 255
            block[Q8::SCALES + j * BLOCK + lane] = load<uint32_t>(row + 2 + 4 * j) ^ 0x80808080u;
    }
}

inline bool fits(Q4, Source kind) { return kind == Source::Q4_0 || kind == Source::Q4_1 || kind == Source::Q4_K; }
inline bool fits(Q8, Source kind) { return kind == Source::Q8_0; }

// Four bits for GROUP floats: a scale and a minimum of little squared error.
class FourBits {
public:
    explicit FourBits(const float* x) : x_(x) {
        const auto [low, high] = std::minmax_element(x, x + GROUP);
        offer(*low, (*high - *low) / 15);
        // Ends that are cut off a little cost less than steps that are wider for all; then the best line through the
        // integers that this gives.
        for (int i = 0; i < 4; ++i) {
            const float cut = (*high - *low) * 0.03f * float(i);
            refine(*low + cut, (*high - *low - 2 * cut) / 15);
        }
    }
    void put(uint32_t* group, int lane) const {
        uint8_t bytes[16];
        for (int i = 0; i < 16; ++i) bytes[i] = uint8_t(best_[i] | best_[i + 16] << 4);
        Q4::put_group(bytes, scale_, minimum_, group, lane);
    }

private:
    static void integers(const float* x, float minimum, float scale, int (&u)[GROUP]) {
        const float inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
        for (int i = 0; i < GROUP; ++i)
            u[i] = std::min(15, std::max(0, int((x[i] - minimum) * inverse + 0.5f)));
    }

    void refine(float minimum, float scale) {
        int u[GROUP];
        integers(x_, minimum, scale, u);
        float su = 0, suu = 0, sx = 0, sux = 0;
        for (int i = 0; i < GROUP; ++i) {
            su += float(u[i]), suu += float(u[i] * u[i]);
            sx += x_[i], sux += float(u[i]) * x_[i];
        }
        const float determinant = GROUP * suu - su * su;
        if (determinant <= 0) return;
        const float slope = (GROUP * sux - su * sx) / determinant;
        offer((sx - slope * su) / GROUP, slope);
    }

    void offer(float minimum, float scale) {
        const uint16_t s = to_half(scale), m = to_half(minimum);
        const float kept_scale = from_half(s), kept_minimum = from_half(m);
        int u[GROUP];
        integers(x_, kept_minimum, kept_scale, u);
        float error = 0;
        for (int i = 0; i < GROUP; ++i) {
            const float miss = kept_minimum + kept_scale * float(u[i]) - x_[i];
            error += miss * miss;
        }
        if (error_ >= 0 && error >= error_) return;
        error_ = error, scale_ = s, minimum_ = m;
        std::copy_n(u, GROUP, best_);
    }

    const float* x_;
    float error_ = -1;
    uint16_t scale_ = 0, minimum_ = 0;
    int best_[GROUP] = {};
};

inline void Q4::put(const float* x, int groups, uint32_t* block, int lane) {
    for (int g = 0; g < groups; ++g) FourBits(x + g * GROUP).put(block + size_t(g) * GROUP_WORDS, lane);
}

}  // namespace trellis
