// The decoder of the Llama family over a planned batch: all layers in one parallel region.
//
// The residual stream, sums of products, norms, rotary and softmax are float32 in every format; what a product reads is
// rounded to its format, and so are keys and values in the pool.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "matrix.h"

namespace trellis {

struct DecoderShape {
    int vocab, hidden, intermediate, layers;
    HeadShape heads;
    float norm_eps;
    float rotary_scale;              // of cosines and sines
    std::vector<int> windows;        // one a layer; 0: none
    std::vector<float> frequencies;  // radians a position, [head_dim / 2]
    bool tied;
    bool alike;  // a row's logits are the same bits whatever else is in its batch, and however its past was computed
    int head_rows() const { return heads.heads + 2 * heads.kv_heads; }
};

enum Part { EMBED, NORMS, QKV, ROTARY, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, PLAN, PARTS };

struct Step {
    Extends extends;
    const int32_t* tokens;
    const int32_t* logits_from;  // in each extend
    void* const* keys;           // one a layer
    void* const* values;
    int pool_rows;
    float* hidden;    // [R, hidden] of the rows that are asked for, before the last norm; or null
    float* logits;    // [R, vocab]; or null
    double* seconds;  // [PARTS], added to; or null
};

// Time by part, as thread 0 sees it: its own work and its waiting for the others at the end of a stage.
class Watch {
public:
    explicit Watch(double* seconds) : seconds_(seconds), last_(seconds ? now() : 0) {}
    void mark(Part part) {
        if (!seconds_) return;
        const double time = now();
        seconds_[part] += time - last_;
        last_ = time;
    }

private:
    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    double* seconds_;
    double last_;
};

class AnyDecoder {
public:
    virtual ~AnyDecoder() = default;
    virtual void put_matrix(int layer, int which, const void* rows, Source kind, const float* bias, Kept kept) = 0;
    virtual void put_vector(int layer, int which, const float* values) = 0;
    virtual void step(const Step& step) = 0;
    virtual void logits(const float* hidden, int rows, float* out) = 0;
    virtual size_t bytes() const = 0;
};

enum MatrixName { M_QKV, M_OUTPUT, M_GATE_UP, M_DOWN, M_HEAD, M_EMBEDDING };
enum VectorName { V_ATTENTION_NORM, V_MLP_NORM, V_QUERY_NORM, V_KEY_NORM, V_NORM };

template <class F>
class Decoder : public AnyDecoder {
public:
    Decoder(const DecoderShape& shape, int threads) : s_(shape), team_(threads), layers_(shape.layers) {
        const HeadShape& h = s_.heads;
        for (Layer& layer : layers_) {
            shape_matrix(layer.qkv, s_.head_rows() * h.head_dim, s_.hidden, false);
            shape_matrix(layer.output, s_.hidden, h.width(), false);
            shape_matrix(layer.gate_up, s_.intermediate, s_.hidden, true);
            shape_matrix(layer.down, s_.hidden, s_.intermediate, false);
        }
        shape_matrix(head_, s_.vocab, s_.hidden, false);
        shape_matrix(embedding_, s_.vocab, s_.hidden, false);
    }

    void put_matrix(int layer, int which, const void* rows, Source kind, const float* bias, Kept kept) override {
        Matrix& m = matrix(layer, which);
        m.kept = kept;
        pack_as_kept<F>(team_, arena_, m, rows, kind, bias);
    }

    void put_vector(int layer, int which, const float* values) override {
        const bool of_head = which == V_QUERY_NORM || which == V_KEY_NORM;
        const int n = of_head ? s_.heads.head_dim : s_.hidden;
        float* to = arena_.take<float>(n);
        std::copy_n(values, n, to);
        vector(layer, which) = to;
    }

    size_t bytes() const override { return arena_.total(); }

    void step(const Step& step) override {
        check(step);
        Watch watch(step.seconds);
        const Plan plan = Planner(step.extends, s_.heads.ratio(), s_.heads.kv_heads, team_.threads(), s_.alike).make();
        std::vector<int> wanted;
        for (int e = 0, row = 0; e < step.extends.count; row += step.extends.lengths[e++])
            for (int i = step.logits_from[e]; i < step.extends.lengths[e]; ++i) wanted.push_back(row + i);
        const int rows = int(plan.parts.size());
        room_.reset(desk_bytes(rows, int(wanted.size())) + Attention<F>::bytes(s_.heads, plan, team_.threads()));
        Desk desk = lay_desk(rows, int(wanted.size()));
        Attention<F> attention(s_.heads, plan, team_.threads(), room_);
        watch.mark(PLAN);
        team_.run(11 * s_.layers + 8, [&](int me) {
            Watch own(me == 0 ? step.seconds : nullptr);
            forward(me, step, plan, wanted, desk, attention, own);
        });
    }

    void logits(const float* hidden, int rows, float* out) override {
        room_.reset(desk_bytes(rows, rows));
        Desk desk = lay_desk(rows, rows);
        team_.run(4, [&](int me) {
            Watch none(nullptr);
            head(me, hidden, rows, desk, out, none);
        });
    }

private:
    struct Layer {
        Matrix qkv, output, gate_up, down;
        float *attention_norm = nullptr, *mlp_norm = nullptr, *query_norm = nullptr, *key_norm = nullptr;
    };

    // What a step works in. Panels: one for all, and one for each thread where so little is to be packed that each
    // does it for itself.
    struct Desk {
        float *x, *qkv, *read, *gated, *cos, *sin, *last_x, *last_read;
        uint32_t* panel;
        std::vector<uint32_t*> own_panel;
        std::vector<float*> values;
        std::vector<uint32_t*> words;
    };

    static constexpr int OWN_VALUES = 16384;

    static void shape_matrix(Matrix& m, int outputs, int inputs, bool paired) {
        m.outputs = outputs;
        m.inputs = inputs;
        m.paired = paired;
    }

    Matrix& matrix(int layer, int which) {
        if (which == M_HEAD) return head_;
        if (which == M_EMBEDDING) return embedding_;
        Layer& l = layers_.at(layer);
        return which == M_QKV ? l.qkv : which == M_OUTPUT ? l.output : which == M_GATE_UP ? l.gate_up : l.down;
    }

    float*& vector(int layer, int which) {
        if (which == V_NORM) return norm_;
        Layer& l = layers_.at(layer);
        return which == V_ATTENTION_NORM ? l.attention_norm
               : which == V_MLP_NORM     ? l.mlp_norm
               : which == V_QUERY_NORM   ? l.query_norm
                                         : l.key_norm;
    }

    void check(const Step& step) const {
        int rows = 0;
        int64_t slots = 0;
        for (int e = 0; e < step.extends.count; ++e) {
            rows += step.extends.lengths[e];
            slots += step.extends.starts[e] + step.extends.lengths[e];
        }
        for (int i = 0; i < rows; ++i)
            if (step.tokens[i] < 0 || step.tokens[i] >= s_.vocab)
                throw std::out_of_range("token id " + std::to_string(step.tokens[i]) + " is not in the vocabulary of " +
                                        std::to_string(s_.vocab));
        for (int64_t i = 0; i < slots; ++i)
            if (step.extends.slots[i] < 0 || step.extends.slots[i] >= step.pool_rows)
                throw std::out_of_range("slot " + std::to_string(step.extends.slots[i]) + " is not in the pool of " +
                                        std::to_string(step.pool_rows - 1) + " slots");
    }

    int widest() const { return std::max({s_.hidden, s_.intermediate, s_.heads.width()}); }

    size_t desk_bytes(int rows, int wanted) const {
        size_t used = 0;
        lay(rows, wanted, [&](size_t words) { return used += Room::rounded(words * 4), nullptr; });
        return used;
    }

    Desk lay_desk(int rows, int wanted) {
        return lay(rows, wanted, [&](size_t words) { return room_.template take<uint32_t>(words); });
    }

    template <class Take>
    Desk lay(int rows, int wanted, Take&& take) const {
        const auto floats = [&](size_t count) { return reinterpret_cast<float*>(static_cast<uint32_t*>(take(count))); };
        const size_t n = rows, half = s_.heads.head_dim / 2;
        const size_t wide = std::max(F::panel_depth(widest()), Grouped::panel_depth(widest())) + Panel::PADDING;
        Desk d;
        d.x = floats(n * s_.hidden);
        d.qkv = floats(n * s_.head_rows() * s_.heads.head_dim);
        d.read = floats(n * s_.heads.width());
        d.gated = floats(n * s_.intermediate);
        d.cos = floats(n * half);
        d.sin = floats(n * half);
        d.last_x = floats(size_t(wanted) * s_.hidden);
        d.last_read = floats(size_t(wanted) * s_.heads.width());
        d.panel = take(n * wide);
        for (int i = 0; i < team_.threads(); ++i) {
            d.own_panel.push_back(take(std::min(size_t(2 * OWN_VALUES), n * wide)));
            d.values.push_back(floats(widest()));
            d.words.push_back(take(wide));
        }
        return d;
    }

    void forward(int me, const Step& step, const Plan& plan, const std::vector<int>& wanted, Desk& d,
                 Attention<F>& attention, Watch& watch) {
        using Element = typename F::Element;
        const HeadShape& h = s_.heads;
        int rows = int(plan.parts.size());
        const size_t stride = size_t(s_.head_rows()) * h.head_dim;
        float *x = d.x, *read = d.read;
        begin(me, step, plan, d);
        team_.barrier();
        watch.mark(EMBED);
        for (int l = 0; l < s_.layers; ++l) {
            const Layer& w = layers_[l];
            Element *keys = static_cast<Element*>(step.keys[l]), *values = static_cast<Element*>(step.values[l]);
            product(me, w.qkv, x, rows, w.attention_norm, d, Into{w.qkv, d.qkv, stride, false}, QKV, watch);
            rotate_and_store(me, plan, w, d, keys, values);
            team_.barrier();
            watch.mark(ROTARY);
            const bool last = l + 1 == s_.layers;
            if (last && wanted.empty()) return;  // the keys and values of all layers are stored
            attention.read(team_, me, {d.qkv, stride, keys, values, s_.windows[l], read});
            team_.barrier();
            if (attention.has_parts()) {
                attention.merge(team_, me, read);
                team_.barrier();
            }
            watch.mark(ATTENTION);
            if (last) {  // from here on only the rows that are asked for
                team_.each(me, int(wanted.size()), [&](int i) {
                    std::copy_n(x + size_t(wanted[i]) * s_.hidden, s_.hidden, d.last_x + size_t(i) * s_.hidden);
                    std::copy_n(read + size_t(wanted[i]) * h.width(), h.width(), d.last_read + size_t(i) * h.width());
                });
                team_.barrier();
                x = d.last_x, read = d.last_read, rows = int(wanted.size());
            }
            product(me, w.output, read, rows, nullptr, d, Into{w.output, x, size_t(s_.hidden), true}, OUTPUT, watch);
            product(me, w.gate_up, x, rows, w.mlp_norm, d, Gated{w.gate_up, d.gated, size_t(s_.intermediate)}, GATE_UP, watch);
            product(me, w.down, d.gated, rows, nullptr, d, Into{w.down, x, size_t(s_.hidden), true}, DOWN, watch);
        }
        if (step.hidden && me == 0) std::copy_n(x, size_t(rows) * s_.hidden, step.hidden);
        if (step.logits) head(me, x, rows, d, step.logits, watch);
    }

    void head(int me, const float* x, int rows, Desk& d, float* out, Watch& watch) {
        product(me, head_, x, rows, norm_, d, Into{head_, out, size_t(s_.vocab), false}, HEAD, watch);
    }

    // Embeddings of the tokens; sines and cosines of their positions.
    void begin(int me, const Step& step, const Plan& plan, Desk& d) {
        const int half = s_.heads.head_dim / 2;
        const Matrix& table = s_.tied ? head_ : embedding_;
        team_.each(me, int(plan.parts.size()), [&](int row) {
            in_format<F>(table.kept, [&](auto format) {
                unpack_row<decltype(format)>(table, step.tokens[row], d.x + size_t(row) * s_.hidden);
            });
            for (int i = 0; i < half; ++i) {
                const float angle = float(plan.rows.position[row]) * s_.frequencies[i];
                d.cos[size_t(row) * half + i] = s_.rotary_scale * std::cos(angle);
                d.sin[size_t(row) * half + i] = s_.rotary_scale * std::sin(angle);
            }
        });
    }

    // x [rows, inputs], normed if there is a norm, times the matrix. Ends with a barrier.
    template <class Write>
    void product(int me, const Matrix& m, const float* x, int rows, const float* norm, Desk& d, Write write, Part part,
                 Watch& watch) {
        in_format<F>(m.kept, [&](auto format) {
            product_in<decltype(format)>(me, m, x, rows, norm, d, write, part, watch);
        });
    }

    // G: the format of the matrix.
    template <class G, class Write>
    void product_in(int me, const Matrix& m, const float* x, int rows, const float* norm, Desk& d, Write write, Part part,
                    Watch& watch) {
        const bool own = size_t(rows) * G::panel_depth(m.inputs) <= OWN_VALUES;
        const Panel panel = panel_of<G>(own ? d.own_panel[me] : d.panel, rows, m.inputs, by_tiles<G>(rows, s_.alike));
        const auto pack = [&](int t) {
            for (int r = t * panel.tile; r < t * panel.tile + panel.tile_rows(t); ++r) {
                const float* from = x + size_t(r) * m.inputs;
                if (norm) {
                    normalise(from, norm, m.inputs, d.values[me]);
                    from = d.values[me];
                }
                put_row<G>(panel, r, from, m.inputs, d.words[me]);
            }
        };
        if (own) {
            for (int t = 0; t < panel.tiles(); ++t) pack(t);
        } else {
            team_.each(me, panel.tiles(), pack);
            team_.barrier();
        }
        watch.mark(NORMS);
        multiply<G>(team_, me, m, panel, write, s_.alike);
        team_.barrier();
        watch.mark(part);
    }

    // RMSNorm: x / sqrt(mean(x^2) + eps) * weight.
    void normalise(const float* x, const float* weight, int n, float* to) const {
        vf squares{};
        int i = 0;
        for (; i + W <= n; i += W) squares += load<vf>(x + i) * load<vf>(x + i);
        float total = sum(squares);
        for (; i < n; ++i) total += x[i] * x[i];
        const float scale = 1.0f / std::sqrt(total / n + s_.norm_eps);
        for (i = 0; i < n; ++i) to[i] = x[i] * scale * weight[i];
    }

    // Norms and rotary embedding of queries (in place) and keys; keys and values go to the pool.
    void rotate_and_store(int me, const Plan& plan, const Layer& w, Desk& d, typename F::Element* keys,
                          typename F::Element* values) {
        const HeadShape& h = s_.heads;
        const int dim = h.head_dim, half = dim / 2, heads = s_.head_rows();
        team_.each(me, int(plan.parts.size()) * heads, [&](int unit) {
            const int row = unit / heads, head = unit % heads;
            float* at = d.qkv + (size_t(row) * heads + head) * dim;
            const bool query = head < h.heads, value = head >= h.heads + h.kv_heads;
            if (!value) {
                const float* norm = query ? w.query_norm : w.key_norm;
                if (norm) normalise(at, norm, dim, at);
                const float *cos = d.cos + size_t(row) * half, *sin = d.sin + size_t(row) * half;
                for (int i = 0; i < half; ++i) {
                    const float a = at[i], b = at[i + half];
                    at[i] = a * cos[i] - b * sin[i];
                    at[i + half] = b * cos[i] + a * sin[i];
                }
            }
            if (query) return;
            const int group = head - h.heads - (value ? h.kv_heads : 0);
            auto* to = (value ? values : keys) + (size_t(plan.rows.slot[row]) * h.kv_heads + group) * dim;
            for (int i = 0; i < dim; ++i) to[i] = F::to_element(at[i]);
        });
    }

    const DecoderShape s_;
    Team team_;
    Arena arena_;
    Room room_;
    std::vector<Layer> layers_;
    Matrix head_, embedding_;
    float* norm_ = nullptr;
};

}  // namespace trellis
