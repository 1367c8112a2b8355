// What Python sees: plain C functions over plain structs (mirrored in runtime/native/abi.py).
// Each returns 0, or a code whose reason trellis_reason() gives. Nothing is thrown across this border.
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "amx_start.h"
#include "choose.h"
#include "pool_format.h"

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

// act(format) for what `format` stands for.
template <class Do>
void in_pool_format(int format, Do&& act) {
    if (format == 0) return act(F32());
    if (format == 1) return act(Bf16());
    if (format == 2) return act(F16());
    throw std::invalid_argument("unknown format " + std::to_string(format));
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
        std::vector<uint32_t> data(size_t(p.rows) * (depth + Panel::PADDING)), words(depth);
        const Panel panel = panel_of<G>(data.data(), p.rows, m.inputs, by_tiles<G>(p.rows, false));
        for (int r = 0; r < p.rows; ++r) put_row<G>(panel, r, p.x + size_t(r) * m.inputs, m.inputs, words.data());
        team.run(1, [&](int me) { multiply<G>(team, me, m, panel, Into{m, p.out, size_t(m.outputs), false}); });
        for (int i = 0; i < m.outputs; ++i) unpack_row<G>(m, i, p.unpacked + size_t(i) * m.inputs);
    });
}

}  // namespace

// Hidden by default: libraries for several instruction sets may be loaded at once, and must not find each other's symbols.
#pragma GCC visibility push(default)
extern "C" {

const char* trellis_reason() { return reason.c_str(); }

// Before anything else: whether this library can be used here.
int trellis_start() {
    return guarded([] { start_tiles(); });
}

int trellis_new_decoder(const TrellisDecoder* c, int threads, void** out) {
    return guarded([&] {
        DecoderShape s;
        s.vocab = c->vocab, s.hidden = c->hidden, s.intermediate = c->intermediate, s.layers = c->layers;
        s.heads = HeadShape{c->heads, c->kv_heads, c->head_dim, c->scale, c->soft_cap};
        s.norm_eps = c->norm_eps, s.rotary_scale = c->rotary_scale;
        s.windows.assign(c->windows, c->windows + c->layers);
        s.frequencies.assign(c->frequencies, c->frequencies + c->head_dim / 2);
        s.tied = c->tied != 0, s.alike = c->alike != 0;
        in_pool_format(c->format, [&](auto format) { *out = new_decoder<decltype(format)>(s, threads); });
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
        in_pool_format(a->format, [&](auto format) { attend<decltype(format)>(*static_cast<Team*>(team), *a); });
    });
}

}  // extern "C"
#pragma GCC visibility pop
