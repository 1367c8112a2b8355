"""The language through the OpenAI backend on our own server: what it says is what the native backend says."""

from __future__ import annotations

import time
from datetime import date
from typing import Annotated, Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field

from trellis import (
    BackendError,
    ConstraintError,
    InvalidRequestError,
    OpenAI,
    ProgramError,
    RuntimeEndpoint,
    assistant,
    flush_cache,
    function,
    gen,
    select,
    system,
    user,
)
from trellis.frontend.defaults import DEFAULTS

pytestmark = [pytest.mark.server, pytest.mark.model]
MODEL = "smollm2-135m"


class City(BaseModel):
    name: Literal["Rome", "Paris"]
    people: Annotated[int, Field(ge=0, le=9_999_999)]


@pytest.fixture(scope="module")
def native(server_url: str) -> RuntimeEndpoint:
    return RuntimeEndpoint(server_url)


@pytest.fixture(scope="module")
def text(server_url: str) -> OpenAI:
    return OpenAI(MODEL, f"{server_url}/v1", api="completions", dialect="trellis")


@pytest.fixture(scope="module")
def chat(server_url: str) -> OpenAI:
    return OpenAI(MODEL, f"{server_url}/v1", api="chat", dialect="trellis")


@pytest.fixture(scope="module")
def plain_text(server_url: str) -> OpenAI:
    """The same server, of which only OpenAI's own API is used."""
    return OpenAI(MODEL, f"{server_url}/v1", "none", api="completions")


@pytest.fixture(scope="module")
def plain_chat(server_url: str) -> OpenAI:
    return OpenAI(MODEL, f"{server_url}/v1", "none", api="chat")


@function
def conversation(s: Any) -> None:
    s += system("Be brief.") + user("What is the capital of France?")
    s += assistant(gen("a", max_tokens=12)) + user("And of Italy?") + assistant(gen("b", max_tokens=12))


CONSTRAINED = [
    ("Date: ", gen("x", regex=r"20\d\d-0[1-9]-1\d")),
    ("Colour: ", gen("x", choices=["red", "green"])),
    ("Yes or no: ", gen("x", grammar='start: "yes" | "no"')),
    ("City: ", gen("x", schema=City, max_tokens=40)),
    ("City: ", gen("x", schema=City, max_tokens=40, json_spacing="compact")),
    ("Two and two make ", gen("x", type=int)),
    ("The war ended on ", gen("x", type=date)),
    ("It was a dark and", gen("x", max_tokens=12, stop_regex="[aeiou]t", min_tokens=1)),
]


@function
def constrained(s: Any) -> None:
    """A gen a branch, each after text that both backends send alike."""
    for index, (before, answer) in enumerate(CONSTRAINED):
        branch = s.copy()
        branch += before + answer
        meta = branch.meta("x")
        s[f"x{index}"] = (
            branch["x"],
            branch.text("x"),
            meta.finish_reason,
            meta.matched,
            meta.counts.forced_tokens,
        )


@function
def sampled(s: Any) -> None:
    s += "Once upon" + gen("x", max_tokens=8, top_k=5, min_p=0.01, top_p=0.9, seed=7, repetition_penalty=1.1)
    s += " and" + gen(
        "y", max_tokens=5, seed=3, logit_bias={100: -5.0}, frequency_penalty=0.3, ignore_eos=True
    )


@pytest.mark.parametrize(
    ("program", "stream"),
    [(conversation, True), (constrained, False), (sampled, False)],
    ids=["conversation", "constrained", "sampled"],
)
def test_the_completions_api_says_what_the_native_one_says(
    native: RuntimeEndpoint, text: OpenAI, program: Any, stream: bool
) -> None:
    heat = {} if program is sampled else {"temperature": 0}
    wanted = program.run(backend=native, **heat)
    state = program.run(backend=text, stream=stream, **heat)
    assert "".join(state.text_iter()) == wanted.text()
    for name in wanted.variables():
        assert state[name] == wanted[name]
        mine, theirs = state.meta(name), wanted.meta(name)
        if mine is None:  # set by the program
            continue
        assert (mine.finish_reason, mine.matched) == (theirs.finish_reason, theirs.matched)
        counted = ("completion_tokens", "sampled_tokens", "forced_tokens")
        assert [getattr(mine.counts, n) for n in counted] == [getattr(theirs.counts, n) for n in counted]


def test_logprobs_are_the_same(native: RuntimeEndpoint, text: OpenAI, chat: OpenAI) -> None:
    @function
    def asked(s: Any) -> None:
        s += user("What is the capital of France?") + assistant(gen("a", max_tokens=4))

    metas = [
        asked.run(backend=backend, temperature=0, top_logprobs_num=2).meta("a")
        for backend in (native, text, chat)
    ]
    for meta in metas[1:]:
        assert meta.token_ids == metas[0].token_ids
        assert meta.logprobs == pytest.approx(metas[0].logprobs, abs=1e-3)
        assert [[t for t, _ in top] for top in meta.top_logprobs] == [
            [t for t, _ in top] for top in metas[0].top_logprobs
        ]


@function
def choose(s: Any, method: str) -> None:
    s += "The capital of France is" + select(
        "city", [" Rome", " Paris", " Paris is", " Madrid"], method=method
    )


@pytest.mark.parametrize("method", ["mean", "sum", "greedy", "exact", "unconditional"])
def test_select_decides_alike(native: RuntimeEndpoint, text: OpenAI, plain_text: OpenAI, method: str) -> None:
    wanted = choose.run(method, backend=native)
    backends = [text] if method == "unconditional" else [text, plain_text]
    for backend in backends:
        state = choose.run(method, backend=backend)
        assert state["city"] == wanted["city"]
        assert state.meta("city").probabilities == pytest.approx(wanted.meta("city").probabilities, abs=1e-3)


def test_many_options_are_scored(plain_text: OpenAI, native: RuntimeEndpoint) -> None:
    options = [f" {i}" for i in range(70)]

    @function
    def number(s: Any) -> None:
        s += "Four and three make" + select("n", options)

    assert number.run(backend=plain_text)["n"] == number.run(backend=native)["n"]


def test_the_chat_api_says_what_the_native_one_says(native: RuntimeEndpoint, chat: OpenAI) -> None:
    @function
    def continued(s: Any) -> None:
        s += user("What is the capital of France?") + assistant("The capital" + gen("a", max_tokens=8))
        s += user("A number?") + assistant("It is " + gen("n", type=int) + gen("more", max_tokens=3))

    for program, stream in ((conversation, True), (continued, False)):
        wanted = program.run(backend=native, temperature=0)
        assert program.run(backend=chat, temperature=0, stream=stream).messages() == wanted.messages()


def test_constraints_of_a_chat(chat: OpenAI, plain_chat: OpenAI) -> None:
    @function
    def asked(s: Any) -> None:
        s += user("Name a city.") + assistant(gen("city", schema=City, max_tokens=40))
        s += user("Numbers?") + assistant(gen("numbers", schema=tuple[Literal[1, 2], Literal[3, 4]]))
        s += user("Colour?") + assistant(gen("colour", choices=["red", "blue"]))
        s += user("Yes or no?") + assistant(select("choice", ["yes", "no"]))

    for backend in (chat, plain_chat):
        state = asked.run(backend=backend, temperature=0)
        assert isinstance(state["city"], City)
        assert [type(number) for number in state["numbers"]] == [int, int]
        assert state["colour"] in ("red", "blue")
        assert state["choice"] in ("yes", "no")
        assert state.meta("choice").method == "chosen"


def test_a_regex_on_a_chat(chat: OpenAI, plain_chat: OpenAI) -> None:
    @function
    def asked(s: Any) -> None:
        s += user("When?") + assistant(gen("day", regex=r"20\d\d-0[1-9]-1\d"))

    assert asked.run(backend=chat)["day"].startswith("20")
    with pytest.raises(ProgramError) as caught:
        asked.run(backend=plain_chat)
    assert isinstance(caught.value.__cause__, ConstraintError)


@pytest.mark.parametrize("stream", [False, True])
def test_samples_and_branches(text: OpenAI, chat: OpenAI, stream: bool) -> None:
    @function
    def several(s: Any) -> None:
        s += user("Name a colour.")
        branches = s.fork(2)
        branches += assistant(gen("a", max_tokens=4, n=3, seed=1))
        branches.join()

    for backend in (text, chat):
        found = several.run(backend=backend, stream=stream)["a"]
        assert [len(branch) for branch in found] == [3, 3]
        assert found[0] == found[1]  # the same seeds
        assert len(set(found[0])) > 1


def test_speculation_saves_calls_and_changes_nothing(native: RuntimeEndpoint, text: OpenAI) -> None:
    @function
    def counted(s: Any) -> None:
        s += "1 2 3 4 5 6" + gen("a", max_tokens=4) + gen("b", stop=" 12") + " 12 13" + gen("c", max_tokens=2)

    wanted = counted.run(backend=native, temperature=0)
    before = text.stats()
    state = counted.run(backend=text, temperature=0, num_api_spec_tokens=40)
    assert state.text() == wanted.text()
    for name in "abc":
        assert state.meta(name).finish_reason == wanted.meta(name).finish_reason
    assert state.meta("b").saved_prompt_tokens == wanted.meta("b").counts.prompt_tokens
    assert state.meta("c").saved_prompt_tokens == wanted.meta("c").counts.prompt_tokens
    assert text.stats().calls - before.calls == 1


def test_a_prefix_can_be_cached_ahead(text: OpenAI, native: RuntimeEndpoint) -> None:
    @function
    def story(s: Any) -> None:
        s += "It was the best of times, it was the worst of times, and nobody knew" + gen("x", max_tokens=1)

    flush_cache(text)
    DEFAULTS.loop.call(text.cache_prefix(("It was the best of times, it was the worst of times,",))).result()
    assert story.run(backend=native).meta("x").counts.cached_tokens > 10
    flush_cache(text)
    assert story.run(backend=native).meta("x").counts.cached_tokens == 0


def test_errors_have_their_kinds(server_url: str, text: OpenAI, chat: OpenAI) -> None:
    @function
    def asked(s: Any, question: str = "Hi", **options: Any) -> None:
        s += user(question) + assistant(gen("x", max_tokens=4, **options))

    def cause(backend: OpenAI, **options: Any) -> BaseException | None:
        with pytest.raises(ProgramError) as caught:
            asked.run(backend=backend, **options)
        return caught.value.__cause__

    wrong_model = cause(OpenAI("other", f"{server_url}/v1", api="chat", dialect="trellis"))
    assert isinstance(wrong_model, BackendError)
    assert wrong_model.status == 404
    for backend in (text, chat):
        refused = cause(backend, schema={"type": "array", "uniqueItems": True})
        assert isinstance(refused, ConstraintError)
        assert refused.kind == "schema"
        assert "uniqueItems" in str(refused)
        too_long = cause(backend, question="word " * 9000)
        assert isinstance(too_long, InvalidRequestError)
        assert "context length" in str(too_long)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_gen_ends_at_the_server(server_url: str, chat: OpenAI, stream: bool) -> None:
    @function
    def endless(s: Any) -> None:
        s += user("Count.") + assistant(gen("x", max_tokens=4000, ignore_eos=True))

    def in_flight() -> int:
        return int(httpx.get(f"{server_url}/server_info").json()["in_flight"])

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 30
        while in_flight() != count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert in_flight() == count

    wait_for(0)
    states = [endless.run(backend=chat, stream=True)] if stream else []
    if not stream:
        with pytest.raises(ProgramError):
            endless.run(backend=chat, timeout=1.0)
    else:
        assert next(iter(states[0].text_iter("x")))
        assert in_flight() == 1
        states[0].cancel()
    wait_for(0)
