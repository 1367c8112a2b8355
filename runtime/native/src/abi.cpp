// What Python sees: plain C functions over plain structs (mirrored in runtime/native/abi.py).
// Each returns 0, or a code whose reason trellis_reason() gives. Nothing is thrown across this border.
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "choose.h"
#include "decoder.h"

using namespace trellis;

namespace {

enum Code { OK = 0, FAILED = 1, OUT_OF_RANGE = 2, NO_MEMORY = 3 };

thread_local std::string reason;

template <class Do>
int guarded(Do&& act) {
    try {
        act();
        return OK;
    } catch (const std::out_of_range& error) {
        reason = error.what();
        return OUT_OF_RANGE;
    } catch (const std::bad_alloc&) {
        reason = "no memory";
        return NO_MEMORY;
    } catch (const std::exception& error) {
        reason = error.what();
        return FAILED;
    }
}

}  // namespace

extern "C" {


struct TrellisDecoder {
    int32_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim;
    int32_t format;  // 0: float32, 1: bfloat16
    int32_t tied, alike;
    float norm_eps, scale, soft_cap;
    const int32_t* windows;
    const float* frequencies;
};

struct TrellisStep {
    int32_t extends, pool_rows;
    const int32_t *lengths, *starts, *slots, *tokens, *logits_from;
    void* const* keys;
    void* const* values;
    float* hidden;
    float* logits;
    double* seconds;
};

struct TrellisProduct {
    int32_t outputs, inputs, rows;
    int32_t kept, source;  // see Kept and Source
    const void* weights;   // [outputs][inputs]
    const float* x;        // [rows][inputs]
    float* out;            // [rows][outputs]
    float* unpacked;       // [outputs][inputs]: the weights as they were kept
};

struct TrellisAttention {
    int32_t extends, heads, kv_heads, head_dim, format, window;
    float scale, soft_cap;
    const int32_t *lengths, *starts, *slots;
    const float* queries;
    const void *keys, *values;
    float* out;
    int64_t keys_read;  // filled in: how many, those that several rows read together once
};

}  // extern "C"

namespace {

template <class F>
void attend(Team& team, TrellisAttention& a) {
    using Element = typename F::Element;
    const HeadShape shape{a.heads, a.kv_heads, a.head_dim, a.scale, a.soft_cap};
    const Plan plan = Planner(Extends{a.extends, a.lengths, a.starts, a.slots}, shape.ratio(), a.kv_heads, team.threads()).make();
    a.keys_read = 0;
    for (const Item& item : plan.items) a.keys_read += item.end - item.begin;
    Room room;
    room.reset(Attention<F>::bytes(shape, plan, team.threads()));
    Attention<F> attention(shape, plan, team.threads(), room);
    team.run(2, [&](int me) {
        attention.read(team, me,
                       {a.queries, size_t(shape.width()), static_cast<const Element*>(a.keys),
                        static_cast<const Element*>(a.values), a.window, a.out});
        team.barrier();
        attention.merge(team, me, a.out);
    });
}

// One product alone, as a step computes it.
void multiply_once(Team& team, const TrellisProduct& p) {
    Arena arena;
    Matrix m;
    m.outputs = p.outputs, m.inputs = p.inputs, m.kept = Kept(p.kept);
    pack_as_kept<F32>(team, arena, m, p.weights, Source(p.source), nullptr);
    in_format<F32>(m.kept, [&](auto format) {
        using G = decltype(format);
        const int depth = G::panel_depth(m.inputs);
        std::vector<uint32_t> data(size_t(p.rows) * depth), words(depth);
        const Panel panel(data.data(), p.rows, depth, most_rows<G>);
        for (int r = 0; r < p.rows; ++r) {
            G::pack(p.x + size_t(r) * m.inputs, m.inputs, words.data());
            panel.put(r, words.data());
        }
        team.run(1, [&](int me) { multiply<G>(team, me, m, panel, Into{m, p.out, size_t(m.outputs), false}); });
        for (int i = 0; i < m.outputs; ++i) unpack_row<G>(m, i, p.unpacked + size_t(i) * m.inputs);
    });
}

}  // namespace

// Hidden by default: libraries for several instruction sets may be loaded at once, and must not find each other's symbols.
#pragma GCC visibility push(default)
extern "C" {

const char* trellis_reason() { return reason.c_str(); }

int trellis_new_decoder(const TrellisDecoder* c, int threads, void** out) {
    return guarded([&] {
        DecoderShape s;
        s.vocab = c->vocab, s.hidden = c->hidden, s.intermediate = c->intermediate, s.layers = c->layers;
        s.heads = HeadShape{c->heads, c->kv_heads, c->head_dim, c->scale, c->soft_cap};
        s.norm_eps = c->norm_eps;
        s.windows.assign(c->windows, c->windows + c->layers);
        s.frequencies.assign(c->frequencies, c->frequencies + c->head_dim / 2);
        s.tied = c->tied != 0, s.alike = c->alike != 0;
        AnyDecoder* made;
        if (c->format == 1)
            made = new Decoder<Bf16>(s, threads);
        else
            made = new Decoder<F32>(s, threads);
        *out = made;
    });
}

void trellis_free_decoder(void* decoder) { delete static_cast<AnyDecoder*>(decoder); }

int trellis_put_matrix(void* decoder, int layer, int which, const void* rows, int source, const float* bias, int kept) {
    return guarded([&] {
        static_cast<AnyDecoder*>(decoder)->put_matrix(layer, which, rows, Source(source), bias, Kept(kept));
    });
}

int trellis_put_vector(void* decoder, int layer, int which, const float* values) {
    return guarded([&] { static_cast<AnyDecoder*>(decoder)->put_vector(layer, which, values); });
}

uint64_t trellis_decoder_bytes(void* decoder) { return static_cast<AnyDecoder*>(decoder)->bytes(); }

int trellis_step(void* decoder, const TrellisStep* s) {
    return guarded([&] {
        Step step;
        step.extends = Extends{s->extends, s->lengths, s->starts, s->slots};
        step.tokens = s->tokens, step.logits_from = s->logits_from;
        step.keys = s->keys, step.values = s->values, step.pool_rows = s->pool_rows;
        step.hidden = s->hidden, step.logits = s->logits, step.seconds = s->seconds;
        static_cast<AnyDecoder*>(decoder)->step(step);
    });
}

int trellis_logits(void* decoder, const float* hidden, int rows, float* out) {
    return guarded([&] { static_cast<AnyDecoder*>(decoder)->logits(hidden, rows, out); });
}

int trellis_new_team(int threads, void** out) {
    return guarded([&] { *out = new Team(threads); });
}

void trellis_free_team(void* team) { delete static_cast<Team*>(team); }

// rows: of logits [.., vocab]; masks: one a row, or null.
void trellis_best_tokens(const float* logits, int vocab, int count, const int32_t* rows, const uint32_t* const* masks, int32_t* out) {
    for (int i = 0; i < count; ++i) out[i] = best_token(logits + size_t(rows[i]) * vocab, masks[i], vocab);
}

int trellis_multiply(void* team, const TrellisProduct* p) {
    return guarded([&] { multiply_once(*static_cast<Team*>(team), *p); });
}

int trellis_attend(void* team, TrellisAttention* a) {
    return guarded([&] {
        Team& own = *static_cast<Team*>(team);
        if (a->format == 1)
            attend<Bf16>(own, *a);
        else
            attend<F32>(own, *a);
    });
}

}  // extern "C"
#pragma GCC visibility pop
