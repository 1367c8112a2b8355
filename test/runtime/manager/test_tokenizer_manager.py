"""The manager over a scheduler that echoes: results, order, errors, aborts, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from runtime_fakes import CONTEXT, ByteTokenizer, EchoScheduler, echo_build

from trellis.errors import (
    BackendError,
    CapacityError,
    ConstraintError,
    InvalidRequestError,
    RequestAborted,
)
from trellis.runtime.config import ServerConfig
from trellis.runtime.engine import InProcessEngine
from trellis.runtime.manager.prompts import common_prefix
from trellis.runtime.manager.tokenizer_manager import TokenizerManager
from trellis.runtime.manager.transport import ChannelFull
from trellis.runtime.manager.types import GenerateInput
from trellis.runtime.messages import Constraint, GenerateCommand, SamplingParams


@pytest.fixture
def scheduler() -> EchoScheduler:
    return EchoScheduler()


@pytest.fixture
def engine(scheduler: EchoScheduler) -> Iterator[InProcessEngine]:
    config = ServerConfig(model_path="echo", max_running_requests=8, max_queued_requests=8)
    with InProcessEngine(config, echo_build(scheduler)) as engine:
        yield engine


def request(prompt: Any, n: int = 4, **more: Any) -> GenerateInput:
    params = more.pop("params", None) or SamplingParams(max_new_tokens=n)
    return GenerateInput(prompt=prompt, params=params, **more)


async def until(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")


def test_generate(engine: InProcessEngine) -> None:
    result = asyncio.run(engine.manager.generate(request("abcdef")))
    assert (result.text, result.token_ids) == ("abcd", [97, 98, 99, 100])
    assert result.finish is not None
    assert result.finish.type == "length"
    assert result.counts.prompt_tokens == 6
    assert result.counts.completion_tokens == 4
    assert (result.kept_tokens, result.tail_text) == (4, "")
    assert engine.manager.in_flight == 0


def test_stream_gives_deltas_that_join_to_the_whole(engine: InProcessEngine) -> None:
    async def run() -> list[Any]:
        return [delta async for delta in engine.manager.stream(request("aé€", n=6))]

    deltas = asyncio.run(run())
    assert "".join(delta.text for delta in deltas) == "aé€"
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert sum(len(delta.token_ids) for delta in deltas) == 6


def test_logprobs_are_aligned(engine: InProcessEngine) -> None:
    result = asyncio.run(
        engine.manager.generate(request("abc", n=5, return_logprob=True, top_logprobs_num=2, logprob_start=1))
    )
    assert result.logprobs == [-i / 100 for i in result.token_ids]
    assert [len(top) for top in result.top_logprobs or []] == [2] * 5
    assert result.input_token_ids == [98, 99]
    assert result.input_logprobs == [-0.98, -0.99]


def test_segments_are_tokenized_apart_and_adjacent_texts_together(
    engine: InProcessEngine, scheduler: EchoScheduler
) -> None:
    asyncio.run(engine.manager.generate(request(["th", "e", [104, 101], "he"])))
    # "th" + "e" is one text, so "he" in it is one token; the ids in the middle stay two.
    assert scheduler.commands[0].token_ids == [116, 257, 104, 101, 257]


def test_several_requests_reach_the_scheduler_in_one_message(
    engine: InProcessEngine, scheduler: EchoScheduler
) -> None:
    results = asyncio.run(engine.manager.generate_many([request("ab"), request("xy")]))
    assert [result.text for result in results] == ["abab", "xyxy"]
    assert len(scheduler.batches) == 1
    assert len(scheduler.batches[0]) == 2


@pytest.mark.parametrize(
    ("prompt", "field", "reason"),
    [
        ("", "prompt", "at least one token"),
        ([], "prompt", "at least one token"),
        (["", []], "prompt", "at least one token"),
        ([1, 258], "prompt[1]", "token id from 0 to 257"),
        ([-1], "prompt[0]", "token id"),
        ([True], "prompt[0]", "text or a list"),
        (5, "prompt", "must be text"),
        (["a", 5], "prompt[1]", "must be text or a list"),
        (["a", [1, "b"]], "prompt[1][1]", "token id"),
        ("\ud800", "prompt", "lone surrogate"),
        ([1] * CONTEXT, "prompt", f"context length is {CONTEXT}"),
        ("a" * CONTEXT, "prompt", f"context length is {CONTEXT}"),
    ],
)
def test_bad_prompts(
    engine: InProcessEngine, scheduler: EchoScheduler, prompt: Any, field: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason.replace("[", r"\[")) as caught:
        asyncio.run(engine.manager.generate(request(prompt)))
    assert caught.value.field == field
    assert scheduler.commands == []


def test_a_text_that_cannot_fit_is_not_even_tokenized(scheduler: EchoScheduler) -> None:
    tokenizer = ByteTokenizer()
    build = echo_build(scheduler, tokenizer)
    with (
        InProcessEngine(ServerConfig(model_path="echo"), build) as engine,
        pytest.raises(InvalidRequestError, match="context length"),
    ):
        asyncio.run(engine.manager.generate(request("a" * 100_000)))
    assert tokenizer.encoded == []


@pytest.mark.parametrize(
    "more",
    [
        {"params": SamplingParams(top_p=0.0)},
        {"constraint": Constraint("nonsense", "{}")},
        {"constraint": Constraint("schema", "{}", "wide")},
        {"top_logprobs_num": 1000},
        {"logprob_start": 4},
        {"logprob_start": -2},
        {"namespace": "\ud800"},
        {"rid": "\ud800"},
    ],
)
def test_bad_options(engine: InProcessEngine, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        asyncio.run(engine.manager.generate(request("abc", **more)))
    assert engine.manager.in_flight == 0


def test_the_length_of_the_output(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    asyncio.run(engine.manager.generate(request("abc", until_context=True)))
    assert scheduler.commands[-1].params.max_new_tokens == CONTEXT
    exact = request("abc", n=CONTEXT - 3, strict_length=True)
    assert len(asyncio.run(engine.manager.generate(exact)).token_ids) == CONTEXT - 3
    with pytest.raises(InvalidRequestError, match=f"at most {CONTEXT - 3} more fit"):
        asyncio.run(engine.manager.generate(request("abc", n=CONTEXT - 2, strict_length=True)))


def test_a_refused_constraint_is_a_constraint_error_and_ends_only_its_request(
    engine: InProcessEngine,
) -> None:
    async def run() -> list[Any]:
        bad = request("ab", constraint=Constraint("regex", "("))
        return await asyncio.gather(
            engine.manager.generate(bad), engine.manager.generate(request("ab")), return_exceptions=True
        )

    error, result = asyncio.run(run())
    assert isinstance(error, ConstraintError)
    assert (error.kind, error.code, error.where, error.detail) == (
        "regex",
        "syntax",
        "position 0",
        "unterminated group",
    )
    assert result.text == "abab"


def test_one_bad_request_of_a_call_aborts_the_others(
    engine: InProcessEngine, scheduler: EchoScheduler
) -> None:
    bad = request("ab", constraint=Constraint("regex", "("))

    async def run() -> None:
        with pytest.raises(ConstraintError):
            await engine.manager.generate_many([request("ab", n=190), bad])
        await until(lambda: not scheduler.running)

    asyncio.run(run())
    assert engine.manager.in_flight == 0


def test_cancelling_the_task_aborts_the_request(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    async def run() -> None:
        scheduler.gate.clear()
        task = asyncio.ensure_future(engine.manager.generate(request("ab", n=100)))
        await until(lambda: scheduler.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not scheduler.running)

    asyncio.run(run())
    assert engine.manager.in_flight == 0
    assert len(scheduler.aborted) == 1


def test_leaving_a_stream_aborts_the_request(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    async def run() -> None:
        async for _ in engine.manager.stream(request("ab", n=190)):
            scheduler.gate.clear()
            break
        await until(lambda: not scheduler.running)

    asyncio.run(run())
    assert engine.manager.in_flight == 0


def test_abort_by_exact_id(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    async def run() -> tuple[Any, Any]:
        scheduler.gate.clear()
        one = asyncio.ensure_future(engine.manager.generate(request("ab", n=8, rid="a")))
        other = asyncio.ensure_future(engine.manager.generate(request("cd", n=8, rid="ab")))
        await until(lambda: len(scheduler.running) == 2)
        assert not engine.manager.abort("")
        assert not engine.manager.abort("unknown")
        assert engine.manager.abort("a")
        assert not engine.manager.abort("a")  # twice does no harm
        with pytest.raises(RequestAborted):
            await one
        scheduler.open_gate()  # type: ignore[attr-defined]
        return scheduler.aborted, await other

    aborted, result = asyncio.run(run())
    assert [rid.partition("#")[0] for rid in aborted] == ["a"]
    assert result.text == "cdcdcdcd"


def test_an_aborted_request_of_many_is_a_result(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    async def run() -> list[Any]:
        scheduler.gate.clear()
        task = asyncio.ensure_future(
            engine.manager.generate_many([request("ab", rid="x"), request("cd", rid="y")])
        )
        await until(lambda: len(scheduler.running) == 2)
        engine.manager.abort("x")
        scheduler.open_gate()  # type: ignore[attr-defined]
        return await task

    first, second = asyncio.run(run())
    assert (first.finish.type, first.text) == ("abort", "")
    assert (second.finish.type, second.text) == ("length", "cdcd")


def test_an_id_is_taken_once_and_free_again_afterwards(
    engine: InProcessEngine, scheduler: EchoScheduler
) -> None:
    async def run() -> None:
        scheduler.gate.clear()
        first = asyncio.ensure_future(engine.manager.generate(request("ab", rid="x")))
        await until(lambda: scheduler.running)
        with pytest.raises(InvalidRequestError, match="another request in flight"):
            await engine.manager.generate(request("ab", rid="x"))
        scheduler.open_gate()  # type: ignore[attr-defined]
        await first
        await engine.manager.generate(request("ab", rid="x"))

    asyncio.run(run())


def test_the_number_in_flight_is_bounded(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    async def run() -> None:
        scheduler.gate.clear()
        tasks = [asyncio.ensure_future(engine.manager.generate(request("ab"))) for _ in range(16)]
        await until(lambda: len(scheduler.running) == 16)
        with pytest.raises(CapacityError, match="16 requests are in flight") as caught:
            await engine.manager.generate(request("ab"))
        assert caught.value.status == 503
        with pytest.raises(InvalidRequestError, match=r"17 sequences .* at most 16 at once"):
            await engine.manager.generate_many([request("ab")] * 17)
        scheduler.open_gate()  # type: ignore[attr-defined]
        assert [result.text for result in await asyncio.gather(*tasks)] == ["abab"] * 16

    asyncio.run(run())


def test_a_dead_scheduler_fails_what_is_in_flight_and_every_later_call(
    engine: InProcessEngine, scheduler: EchoScheduler
) -> None:
    async def run() -> None:
        scheduler.gate.clear()
        tasks = [asyncio.ensure_future(engine.manager.generate(request("ab"))) for _ in range(3)]
        await until(lambda: len(scheduler.running) == 3)
        scheduler.explode = True
        scheduler.open_gate()  # type: ignore[attr-defined]
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, BackendError)
            assert "RuntimeError: boom" in str(error)
        with pytest.raises(BackendError, match="boom"):
            await engine.manager.generate(request("ab"))
        with pytest.raises(BackendError, match="ended"):
            engine.control("stats")
        assert engine.health().status == "ended"

    asyncio.run(run())
    assert engine.manager.in_flight == 0


def test_several_event_loops_at_once(engine: InProcessEngine) -> None:
    texts: list[str] = []

    def work(prompt: str) -> None:
        for _ in range(5):
            texts.append(asyncio.run(engine.manager.generate(request(prompt))).text)

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in ("ab", "cd", "ef")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == ["abab"] * 5 + ["cdcd"] * 5 + ["efef"] * 5


def test_a_closed_event_loop_harms_nobody_else(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    loop = asyncio.new_event_loop()
    scheduler.gate.clear()
    task = loop.create_task(engine.manager.generate(request("ab")))

    async def started() -> None:
        await until(lambda: scheduler.running)

    loop.run_until_complete(started())
    loop.close()
    scheduler.open_gate()  # type: ignore[attr-defined]
    assert asyncio.run(engine.manager.generate(request("cd"))).text == "cdcd"
    assert engine.manager.in_flight == 0
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):  # what is left of the task cannot be unwound without its loop
        task.get_coro().close()  # type: ignore[union-attr]


class StubbornSender:
    """Takes nothing for a while."""

    def __init__(self) -> None:
        self.full = False
        self.sent: list[Any] = []

    def send(self, items: Any, timeout: float = 0.0) -> None:  # noqa: ARG002
        if self.full:
            raise ChannelFull("no room")
        self.sent += items

    def close(self) -> None: ...


def test_a_full_channel_is_503_and_loses_no_abort() -> None:
    manager = TokenizerManager(ByteTokenizer(), context_length=CONTEXT, max_requests=10)
    sender = StubbornSender()
    manager.connect(sender)

    async def run() -> None:
        task = asyncio.ensure_future(manager.generate(request("ab")))
        await until(lambda: sender.sent)
        sender.full = True
        with pytest.raises(CapacityError, match="keep up"):
            await manager.generate(request("ab"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        sender.full = False
        manager.deliver([])

    asyncio.run(run())
    command, abort = sender.sent
    assert isinstance(command, GenerateCommand)
    assert abort.rid == command.rid
    assert manager.in_flight == 0


class FailingSender:
    """Cannot encode what it is given."""

    def send(self, items: Any, timeout: float = 0.0) -> None:  # noqa: ARG002
        raise OverflowError("integer out of range")

    def close(self) -> None: ...


def test_a_message_that_cannot_be_sent_leaves_nothing_registered() -> None:
    manager = TokenizerManager(ByteTokenizer(), context_length=CONTEXT, max_requests=2)
    manager.connect(FailingSender())
    for _ in range(3):
        with pytest.raises(OverflowError):
            asyncio.run(manager.generate_many([request("ab", rid="mine")] * 2))
    assert manager.in_flight == 0
    assert not manager.abort("mine")


class ReentrantSender:
    """While the first message is under way, its request is aborted, as another thread may do."""

    def __init__(self, manager: TokenizerManager) -> None:
        self.manager = manager
        self.arrived: list[Any] = []

    def send(self, items: Any, timeout: float = 0.0) -> None:  # noqa: ARG002
        if isinstance(items[0], GenerateCommand):
            aborting = threading.Thread(target=self.manager.abort, args=("mine",))
            aborting.start()
            aborting.join(30)
            assert not aborting.is_alive(), "the manager holds its lock while it sends"
        self.arrived += items

    def close(self) -> None: ...


def test_an_abort_during_the_sending_arrives_after_the_request() -> None:
    manager = TokenizerManager(ByteTokenizer(), context_length=CONTEXT, max_requests=2)
    sender = ReentrantSender(manager)
    manager.connect(sender)
    with pytest.raises(RequestAborted):
        asyncio.run(manager.generate(request("ab", rid="mine")))
    kinds = [type(item).__name__ for item in sender.arrived]
    assert kinds.index("GenerateCommand") < len(kinds) - 1
    assert kinds[-1] == "AbortCommand"
    assert len({item.rid for item in sender.arrived}) == 1


def test_each_distinct_prompt_is_tokenized_once(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    ids = [120, 121]
    prompts = ["ab", "ab", "cd", ids, ids, "ab"]
    asyncio.run(engine.manager.generate_many([request(prompt) for prompt in prompts]))
    assert engine.tokenizer.encoded == ["ab", "cd"]  # type: ignore[attr-defined]
    given = [command.token_ids for command in scheduler.commands]
    assert given == [[97, 98], [97, 98], [99, 100], ids, ids, [97, 98]]
    assert given[0] is given[1]
    assert given[3] is given[4]


def test_too_many_sequences_are_refused_before_anything_is_tokenized(engine: InProcessEngine) -> None:
    for run in (
        engine.manager.generate_many([request(f"a{i}", prompt_field=f"text[{i}]") for i in range(17)]),
        engine.manager.score("a", ["b"] * 17),
    ):
        with pytest.raises(InvalidRequestError, match="17 sequences") as caught:
            asyncio.run(run)
        assert caught.value.field in ("text", "options")
    assert engine.tokenizer.encoded == []  # type: ignore[attr-defined]


def test_the_text_of_all_options_is_bounded(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trellis.runtime.manager.bounds.MAX_SCORED_BYTES", 100)
    assert len(score(engine, "é" * 10, ["abcde"] * 4).options) == 4
    for prompt, options in (("é" * 10, ["abcdef"] * 4), ("a", ["b" * 100])):
        with pytest.raises(InvalidRequestError, match=r"one request may have 100: score fewer") as caught:
            score(engine, prompt, options)
        assert caught.value.field == "options"


def test_what_one_call_sends_is_bounded(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    large = Constraint("regex", "a" * (8 << 20))
    with pytest.raises(InvalidRequestError, match="10 sequences with their parameters") as caught:
        asyncio.run(engine.manager.generate_many([request("a", constraint=large)] * 10))
    assert caught.value.field == "prompt"
    biased = SamplingParams(max_new_tokens=1, logit_bias=dict.fromkeys(range(250), 1.0))
    asyncio.run(engine.manager.generate_many([request("a", params=biased)] * 10))
    assert len(scheduler.commands) == 10


class SlowTokenizer(ByteTokenizer):
    """Long texts take until ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.begun.set()
        assert self.go.wait(30)
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize("kind", ["generate", "score"])
def test_a_caller_who_leaves_ends_the_tokenizing(kind: str) -> None:
    tokenizer = SlowTokenizer()
    manager = TokenizerManager(tokenizer, context_length=20_000, max_requests=50)
    manager.connect(StubbornSender())

    async def run() -> None:
        texts = [f"{i}" * 1000 for i in range(50)]
        if kind == "generate":
            work: Any = manager.generate_many([request(text) for text in texts])
        else:
            work = manager.score("x", texts)
        task = asyncio.ensure_future(work)
        await until(tokenizer.begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        tokenizer.go.set()

    asyncio.run(run())  # waits for the thread
    assert len(tokenizer.encoded) <= 2
    assert manager.in_flight == 0


def test_many_small_segments_are_joined_in_one_go(engine: InProcessEngine) -> None:
    segments = ["a", "b", [], "c", [100], "", "e"] + [""] * 20_000
    result = asyncio.run(engine.manager.generate(request(segments, n=5)))
    assert result.text == "abcde"
    assert engine.tokenizer.encoded == ["abc", "e"]  # type: ignore[attr-defined]


def test_before_the_scheduler_is_there_requests_get_a_503() -> None:
    manager = TokenizerManager(ByteTokenizer(), context_length=CONTEXT, max_requests=10)
    with pytest.raises(CapacityError, match="still being loaded") as caught:
        asyncio.run(manager.generate(request("ab")))
    assert caught.value.status == 503


def score(engine: InProcessEngine, prompt: Any, options: list[str]) -> Any:
    return asyncio.run(engine.manager.score(prompt, options))


def test_score_shares_one_boundary_and_one_message(engine: InProcessEngine, scheduler: EchoScheduler) -> None:
    output = score(engine, "x: ", ["yes", "no", "yes and no"])
    assert [bytes(each.token_ids) for each in output.options] == [b"yes", b"no", b"yes and no"]
    for each in output.options:
        assert each.logprobs == [-i / 100 for i in each.token_ids]
    assert [len(batch) for batch in scheduler.batches] == [3]
    assert all(command.params.max_new_tokens == 0 for command in scheduler.commands)
    assert output.counts.prompt_tokens == sum(len(command.token_ids) for command in scheduler.commands)


def test_score_goes_back_to_the_last_common_token_where_texts_merge(engine: InProcessEngine) -> None:
    # "th" + "e" ends in the token "he", so the prompt's last token is not a common one.
    output = score(engine, "th", ["e", "at"])
    assert [each.token_ids for each in output.options] == [[257], [104, 97, 116]]


def test_score_of_options_that_begin_alike_begins_at_the_prompts_end(engine: InProcessEngine) -> None:
    output = score(engine, "x", ["ab", "ac", "ab"])
    assert [bytes(each.token_ids) for each in output.options] == [b"ab", b"ac", b"ab"]


def test_score_of_an_empty_option_has_no_tokens(engine: InProcessEngine) -> None:
    output = score(engine, "x", ["", "a"])
    assert [each.token_ids for each in output.options] == [[], [97]]
    assert score(engine, "x", ["", ""]).options[1].logprobs == []


def test_score_where_nothing_is_common(engine: InProcessEngine) -> None:
    output = score(engine, "h", ["e"])  # together they are one token
    assert [each.token_ids for each in output.options] == [[101]]
    assert len(output.options[0].logprobs) == 1


def test_score_after_token_segments(engine: InProcessEngine) -> None:
    output = score(engine, ["t", [104]], ["e"])  # ids stay as they are, nothing merges with them
    assert [each.token_ids for each in output.options] == [[101]]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", [], "options"),
        ("x", ["a", "\ud800"], "options[1]"),
        ("x", [5], "options[0]"),
        ("", ["a"], "prompt"),
    ],
)
def test_bad_scores(engine: InProcessEngine, prompt: str, options: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        score(engine, prompt, options)
    assert caught.value.field == field


def test_common_prefix() -> None:
    assert common_prefix([[1, 2, 3], [1, 2], [1, 2, 4]]) == 2
    assert common_prefix([[1, 2]]) == 2
    assert common_prefix([[], [1]]) == 0
