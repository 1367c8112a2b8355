"""Several gens out of one call: when the text is the same as with a call each, and what that saves."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis import Meta, OpenAI, function, gen, select
from trellis.frontend.backends.base import SamplingOptions
from trellis.frontend.backends.surplus import Surplus, cut, drawn_with, take

GREEDY = SamplingOptions(temperature=0.0)


class Recited(OpenAI):
    """A completions API whose model knows one text by heart: it goes on where the prompt ends in it, and ends with it;
    anywhere else it is lost.
    Its tokens are words with the blanks before them. offsets: whether it says where they begin.
    end_token: whether it shows and counts the token that ends a text."""

    def __init__(self, text: str, offsets: bool = True, end_token: bool = False) -> None:
        super().__init__("m", "http://nowhere/v1", "key", "completions")
        self.text = text
        self.offsets = offsets
        self.end_token = end_token
        self.bodies: list[dict[str, Any]] = []

    async def _create(self, call: Any, n: int = 1, **_: Any) -> Any:
        body = call.arguments
        self.bodies.append(body)
        prompt = body["prompt"]
        if body.get("echo"):
            return self._echo(prompt)
        lost = "" if prompt.endswith(" lost") else " lost"
        rest = self.text[len(prompt) :] if self.text.startswith(prompt) else lost
        tokens = tokens_of(rest) + [""] * self.end_token
        text, finish, used = "", "stop", 0
        for used, token in enumerate(tokens, start=1):
            text += token
            found = [text.index(stop) for stop in body.get("stop", []) if stop in text]
            if found:
                text = text[: min(found)]
                break
            if used == body["max_tokens"] and token:  # what ends a text would be one more token
                finish = "length"
                break
        logprobs = self._logprobs(tokens[:used]) if "logprobs" in body else None
        usage = SimpleNamespace(prompt_tokens=len(tokens_of(prompt)), completion_tokens=used)
        choices = [
            SimpleNamespace(index=i, text=text, finish_reason=finish, logprobs=logprobs) for i in range(n)
        ]
        return SimpleNamespace(choices=choices, usage=usage)

    def _echo(self, prompts: list[str]) -> Any:
        choices = [
            SimpleNamespace(index=i, text=p, finish_reason="length", logprobs=self._logprobs(tokens_of(p)))
            for i, p in enumerate(prompts)
        ]
        return SimpleNamespace(choices=choices, usage=None)

    def _logprobs(self, tokens: list[str]) -> Any:
        offsets = [100 + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        return SimpleNamespace(
            tokens=tokens,
            token_logprobs=[-1.0] * len(tokens),
            top_logprobs=None,
            text_offset=offsets if self.offsets else None,
        )


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+", text)


POEM = "Name: Ada Lovelace\nBorn: 1815 in London\nKnown for: the first program\nEnd"


@function
def sheet(s: Any) -> None:
    s += "Name:" + gen("name", stop="\n")
    s += "\nBorn:" + gen("year", max_tokens=1) + gen("place", stop="\n")
    s += "\nKnown for:" + gen("what", stop="\n")


def test_a_whole_program_is_one_call() -> None:
    alone, together = Recited(POEM), Recited(POEM)
    wanted = sheet.run(backend=alone, temperature=0)
    state = sheet.run(backend=together, temperature=0, num_api_spec_tokens=64)
    assert state.text() == wanted.text() == POEM[: POEM.index("\nEnd")]
    assert (len(alone.bodies), len(together.bodies)) == (4, 1)
    assert together.bodies[0]["max_tokens"] == 128  # what the gen itself may use, if that is more
    assert "stop" not in together.bodies[0]


def test_what_was_saved_is_told() -> None:
    alone, together = Recited(POEM), Recited(POEM)
    apart = sheet.run(backend=alone, temperature=0)
    state = sheet.run(backend=together, temperature=0, num_api_spec_tokens=64)
    sent = [apart.meta(name).counts.prompt_tokens for name in ("year", "place", "what")]
    assert [state.meta(name).saved_prompt_tokens for name in ("year", "place", "what")] == sent
    assert state.meta("name").saved_prompt_tokens is None
    assert state.meta("what").counts == Meta().counts
    stats = together.stats()
    assert (stats.calls, stats.saved_calls, stats.saved_prompt_tokens) == (1, 3, sum(sent))
    assert stats.completion_tokens == len(tokens_of(POEM.removeprefix("Name:")))
    report = state.report()
    assert (report.saved_calls, report.saved_prompt_tokens) == (3, sum(sent))
    assert f"saved calls: 3, prompt tokens: {sum(sent)}" in str(report)
    assert "saved" not in str(apart.report())


def test_the_other_text_is_a_new_call() -> None:
    @function
    def differs(s: Any) -> None:
        s += "Name:" + gen("name", stop="\n") + "\nDied:" + gen("year", max_tokens=1)

    backend = Recited(POEM)
    state = differs.run(backend=backend, temperature=0, num_api_spec_tokens=64)
    assert state.text() == "Name: Ada Lovelace\nDied: lost"
    assert len(backend.bodies) == 2


def test_text_that_ends_inside_a_token_is_a_new_call() -> None:
    @function
    def inside(s: Any) -> None:
        s += "Name:" + gen("name", stop="\n") + "\nBo" + gen("rest", max_tokens=1)

    backend = Recited(POEM)
    state = inside.run(backend=backend, temperature=0, num_api_spec_tokens=64)
    assert state["rest"] == "rn:"
    assert len(backend.bodies) == 2


def test_a_gen_that_does_not_end_in_what_came_is_a_new_call() -> None:
    @function
    def long(s: Any) -> None:
        s += "Name:" + gen("name", max_tokens=1) + gen("rest", max_tokens=5)

    backend = Recited(POEM)
    state = long.run(backend=backend, temperature=0, num_api_spec_tokens=4)
    assert state.text() == "Name: Ada Lovelace\nBorn: 1815 in London"
    assert [body["max_tokens"] for body in backend.bodies] == [4, 5]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5, "seed": 1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"return_logprob": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_call_of_its_own_would_draw_otherwise_is_one(options: dict[str, Any]) -> None:
    backend = Recited(POEM)
    sheet.run(backend=backend, num_api_spec_tokens=64, **options)
    assert len(backend.bodies) == 4


def test_other_sampling_parameters_are_a_new_call() -> None:
    @function
    def two(s: Any) -> None:
        s += "Name:" + gen("a", max_tokens=1, temperature=0) + gen("b", max_tokens=1, temperature=0.5)

    backend = Recited(POEM)
    two.run(backend=backend, num_api_spec_tokens=64)
    assert len(backend.bodies) == 2


def test_branches_draw_each_on_its_own() -> None:
    @function
    def forked(s: Any) -> None:
        s += "Name:" + gen("name", stop="\n")
        branches = s.fork(2)
        branches += "\nBorn:" + gen("year", max_tokens=1)
        branches.join()

    backend = Recited(POEM)
    state = forked.run(backend=backend, num_api_spec_tokens=64)
    assert state["year"] == [" 1815", " 1815"]
    assert len(backend.bodies) == 3


def test_several_samples_are_drawn_each_on_its_own() -> None:
    @function
    def sampled(s: Any) -> None:
        s += "Name:" + gen("name", stop="\n") + "\nBorn:" + gen("year", max_tokens=1, n=2)

    backend = Recited(POEM)
    state = sampled.run(backend=backend, num_api_spec_tokens=64)
    assert state["year"] == [" 1815", " 1815"]
    assert len(backend.bodies) == 2
    assert [meta.saved_prompt_tokens for meta in state.meta("year")] == [None, None]


def test_a_select_goes_on_in_what_came() -> None:
    @function
    def chosen(s: Any) -> None:
        s += "Name:" + gen("name", max_tokens=1) + select("s", [" Lovelace"]) + gen("next", max_tokens=1)

    backend = Recited(POEM)
    state = chosen.run(backend=backend, temperature=0, num_api_spec_tokens=64)
    assert state["next"] == "\nBorn:"
    assert [bool(body.get("echo")) for body in backend.bodies] == [False, True]


def test_states_do_not_see_each_other() -> None:
    backend = Recited(POEM)
    states = sheet.run_batch([{}] * 20, backend=backend, temperature=0, num_api_spec_tokens=64)
    assert {state.text() for state in states} == {POEM[: POEM.index("\nEnd")]}
    assert len(backend.bodies) == 20
    assert backend.stats().saved_calls == 60


def test_without_token_places_nothing_is_taken() -> None:
    backend = Recited(POEM, offsets=False)
    state = sheet.run(backend=backend, temperature=0, num_api_spec_tokens=64)
    assert state.text() == POEM[: POEM.index("\nEnd")]
    assert backend.stats().saved_calls == 0


def test_a_stream_shows_the_same_text() -> None:
    backend = Recited(POEM)
    state = sheet.run(backend=backend, temperature=0, num_api_spec_tokens=64, stream=True)
    assert "".join(state.text_iter()) == POEM[: POEM.index("\nEnd")]
    assert len(backend.bodies) == 1


def test_a_program_may_ask_for_it_itself() -> None:
    @function(num_api_spec_tokens=64)
    def own(s: Any) -> None:
        s += "Name:" + gen("a", stop="\n") + "\nBorn:" + gen("b", stop="\n")

    backend = Recited(POEM)
    own.run(backend=backend, temperature=0)
    assert len(backend.bodies) == 1


@pytest.mark.parametrize("end_token", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_the_end_of_the_text_is_the_same(limit: int, end_token: bool) -> None:
    @function
    def last(s: Any) -> None:
        s += "Name:" + gen("x", max_tokens=limit) + gen("y", max_tokens=limit)

    def ends(spec_tokens: int) -> list[str]:
        backend = Recited("Name: Ada Lovelace", end_token=end_token)
        state = last.run(backend=backend, temperature=0, num_api_spec_tokens=spec_tokens)
        return [state.text(), *(state.meta(name).finish_reason for name in "xy")]

    assert ends(8) == ends(0)


# -- any program ---------------------------------------------------------------------------------------------------

WORDS = ["one", " two", ",", " and", "\n", " three", ".", " four"]
POEMS = st.lists(st.sampled_from(WORDS), min_size=3, max_size=30).map("".join)
# A part of a program: so many characters of the poem from where it stands, some other text, or a gen.
PARTS = st.lists(
    st.one_of(
        st.integers(1, 9),
        st.sampled_from([" four", "x"]),
        st.builds(
            lambda stops, limit: (tuple(stops), limit),
            st.sets(st.sampled_from(WORDS), max_size=2),
            st.integers(1, 6),
        ),
    ),
    min_size=1,
    max_size=8,
)


@given(POEMS, PARTS, st.integers(1, 20), st.booleans())
@settings(max_examples=60)
def test_any_program_says_the_same_with_fewer_calls(
    poem: str, parts: list[Any], tokens: int, end_token: bool
) -> None:
    @function
    def recite(s: Any) -> None:
        s += poem[:2]
        for index, part in enumerate(parts):
            if isinstance(part, tuple):
                s += gen(f"x{index}", stop=list(part[0]), max_tokens=part[1])
            else:
                at = len(s.text())
                s += poem[at : at + part] if isinstance(part, int) else part

    alone, together = Recited(poem, end_token=end_token), Recited(poem, end_token=end_token)
    wanted = recite.run(backend=alone, temperature=0)
    state = recite.run(backend=together, temperature=0, num_api_spec_tokens=tokens)
    assert state.text() == wanted.text()
    for name in wanted.variables():
        assert state.meta(name).finish_reason == wanted.meta(name).finish_reason
    assert len(together.bodies) + together.stats().saved_calls == len(alone.bodies)


# -- the rules, on any text ----------------------------------------------------------------------------------------

TOKENS = st.lists(st.text("ab.", min_size=1, max_size=3), max_size=12).map(tuple)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3)


def surplus_of(tokens: tuple[str, ...], ended: bool = False) -> Surplus:
    return Surplus(tokens, ended, drawn_with(GREEDY), prompt_tokens=10)


def watched(tokens: tuple[str, ...], stops: list[str], limit: int) -> tuple[str, str] | None:
    """(text, finish reason) of a model that is stopped while it writes: the plain way to say it."""
    text = ""
    for count, token in enumerate(tokens, start=1):
        text += token
        places = [text.index(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)], "stop"
        if count == limit:
            return text, "length"
    return None


@given(TOKENS, STOPS, st.integers(1, 12), st.booleans())
def test_a_cut_text_is_what_a_watched_one_would_be(
    tokens: tuple[str, ...], stops: list[str], limit: int, ended: bool
) -> None:
    taken = cut(surplus_of(tokens, ended), stops, limit)
    wanted = watched(tokens, stops, limit) or (("".join(tokens), "stop") if ended else None)
    assert (taken and (taken.text, taken.finish_reason)) == wanted


@given(TOKENS, STOPS, st.integers(1, 12))
def test_nothing_is_lost_or_said_twice(tokens: tuple[str, ...], stops: list[str], limit: int) -> None:
    taken = cut(surplus_of(tokens), stops, limit)
    if taken is not None:
        assert taken.rest is not None
        assert taken.text + "".join(taken.rest.tokens) == "".join(tokens)
        whole = taken.text + taken.rest.tokens[0] if taken.rest.partial else taken.text
        count = taken.rest.prompt_tokens - 10
        assert "".join(tokens[:count]) == whole


@given(TOKENS, st.integers(0, 40), st.text("ab.", max_size=3))
def test_after_goes_on_only_where_a_token_ends(tokens: tuple[str, ...], length: int, other: str) -> None:
    joined = "".join(tokens)
    ends = {sum(map(len, tokens[:i])) for i in range(len(tokens) + 1)}
    length = min(length, len(joined))
    left = surplus_of(tokens).after(joined[:length])
    assert (left is not None) == (length in ends)
    if left is not None:
        assert "".join(left.tokens) == joined[length:]
    if not joined.startswith(other):
        assert surplus_of(tokens).after(other) is None


def test_the_rest_of_a_token_is_no_place_to_go_on() -> None:
    taken = cut(surplus_of(("a.b", "c")), ["."], 9)
    assert taken is not None
    assert taken.rest is not None
    assert taken.rest.partial
    assert take(taken.rest, SamplingOptions(temperature=0.0, max_new_tokens=1)) is None
    after = taken.rest.after(".b")
    assert after is not None
    found = take(after, SamplingOptions(temperature=0.0, max_new_tokens=1))
    assert found is not None
    assert found.text == "c"
