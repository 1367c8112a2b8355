"""Which part of a model each rank holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.errors import ModelLoadError
from trellis.runtime.assembly import settle
from trellis.runtime.config import ServerConfig
from trellis.runtime.distributed.split import Part, Split, fitting_sizes, local_kv_size
from trellis.runtime.models import ModelConfig


def config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 8,
        "context_length": 256,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "tied_head": True,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_windows": (None, None),
    }
    return ModelConfig(**{**values, **changes})


@st.composite
def splits(draw: st.DrawFn) -> list[Split]:
    """All ranks of a model that can be split into so many."""
    size = draw(st.integers(1, 8))
    kv_heads = draw(st.integers(1, 12))
    sharing = draw(st.sampled_from([n for n in range(1, 25) if n * kv_heads % size == 0]))
    whole = config(
        num_heads=kv_heads * sharing,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        intermediate_size=size * draw(st.integers(1, 20)),
        vocab_size=draw(st.integers(1, 50)),
    )
    return [Split(whole, rank, size) for rank in range(size)]


def places(part: Part) -> list[int]:
    return [place for first, end in part.ranges for place in range(first, end)]


@given(splits())
def test_what_is_split_is_split_without_gap_or_overlap(ranks: list[Split]) -> None:
    whole = ranks[0].whole
    for total, of in (
        (whole.query_size, lambda split: split.queries(0)),
        (whole.intermediate_size, lambda split: split.inner(0)),
        (whole.vocab_size, lambda split: split.tokens()),
    ):
        assert [place for split in ranks for place in places(of(split))] == list(range(total))


@given(splits())
def test_every_query_head_finds_its_key_head(ranks: list[Split]) -> None:
    whole = ranks[0].whole
    for split in ranks:
        local = split.local
        sharing = local.num_heads // local.num_kv_heads
        held = places(split.keys(0))
        assert len(held) == local.kv_size
        for head in range(local.num_heads):
            wanted = (split.rank * local.num_heads + head) // (whole.num_heads // whole.num_kv_heads)
            own = head // sharing * local.head_dim
            assert held[own : own + local.head_dim] == [
                wanted * local.head_dim + i for i in range(local.head_dim)
            ]


@given(splits())
def test_no_more_copies_of_key_heads_than_needed(ranks: list[Split]) -> None:
    whole, size = ranks[0].whole, len(ranks)
    if whole.num_kv_heads % size == 0:
        assert {split.local.num_kv_heads for split in ranks} == {whole.num_kv_heads // size}
    elif size % whole.num_kv_heads == 0:
        assert {split.local.num_kv_heads for split in ranks} == {1}
    assert {split.local.kv_size for split in ranks} == {local_kv_size(whole, size)}


@given(splits())
def test_every_rank_has_as_many_rows_of_the_vocabulary(ranks: list[Split]) -> None:
    width = ranks[0].vocab_rows
    assert {split.vocab_rows for split in ranks} == {width}
    assert all(
        first == split.rank * width or first == end for split in ranks for first, end in split.tokens().ranges
    )


def test_what_is_added_to_a_sum_is_added_by_one_rank() -> None:
    part = Part(0, ((0, 64),))
    assert [Split(config(), rank, 4).once(part).size for rank in range(4)] == [64, 0, 0, 0]


def test_one_rank_has_the_whole_model() -> None:
    assert Split(config(), 0, 1).local == config()


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "8 attention heads cannot be split evenly among 3 ranks.*that fit: 1, 2, 4, 8"),
        ({"intermediate_size": 30}, 4, "30 MLP columns cannot be split evenly among 4 ranks.*that fit: 1, 2"),
    ],
)
def test_models_that_cannot_be_split_say_into_how_many_they_can(
    changes: dict[str, Any], size: int, message: str
) -> None:
    whole = config(**changes)
    with pytest.raises(ModelLoadError, match=message):
        Split(whole, 0, size)
    with pytest.raises(ModelLoadError, match=message):  # before anything is loaded
        settle(ServerConfig("m", tp_size=size, dtype="float32", device="cpu"), whole)
    for fitting in fitting_sizes(whole):
        Split(whole, 0, fitting)


def test_the_machine_is_shared_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from trellis.runtime import assembly

    monkeypatch.setattr(assembly, "free_memory", lambda: 1 << 20)
    monkeypatch.setattr(assembly, "os", SimpleNamespace(sched_getaffinity=lambda _: range(6)))
    one = settle(ServerConfig("m", dtype="float32", device="cpu"), config(context_length=8192))
    two = settle(ServerConfig("m", dtype="float32", device="cpu", tp_size=2), config(context_length=8192))
    four = settle(ServerConfig("m", dtype="float32", device="cpu", tp_size=4), config(context_length=8192))
    assert (one.num_threads, two.num_threads, four.num_threads) == (6, 3, 1)
    # Two ranks have one of the two key heads each; of four, two each have the same.
    assert (one.max_total_tokens, two.max_total_tokens, four.max_total_tokens) == (1024, 1024, 512)
    assert (two.executor, one.executor) == ("torch", "auto")
