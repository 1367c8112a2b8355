// What is compiled anew for each format of the pool: the decoder and its attention. Each format has a source file of its own, so
// that they compile side by side.
#pragma once

#include "abi.h"
#include "decoder.h"

namespace trellis {

template <class F>
AnyDecoder* new_decoder(const DecoderShape& shape, int threads);

// Attention alone, as a step computes it.
template <class F>
void attend(Team& team, TrellisAttention& a);

#if defined(TRELLIS_POOL_FORMAT)

template <class F>
AnyDecoder* new_decoder(const DecoderShape& shape, int threads) {
    return new Decoder<F>(shape, threads);
}

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

template AnyDecoder* new_decoder<TRELLIS_POOL_FORMAT>(const DecoderShape&, int);
template void attend<TRELLIS_POOL_FORMAT>(Team&, TrellisAttention&);

#endif

}  // namespace trellis
