"""The constant prefix: what it is, that it is asked for once and rightly, and that it never stands in the way."""

from __future__ import annotations

from typing import Any

import pytest

from trellis import ProgramError
from trellis.frontend import (
    Backend,
    Engine,
    MockBackend,
    RuntimeEndpoint,
    assistant,
    function,
    gen,
    system,
    user,
)
from trellis.frontend.backends.base import GenerateRequest, SamplingOptions
from trellis.frontend.defaults import DEFAULTS


@function
def shots(s: Any, word: str, hint: str = "") -> None:
    s += system("You are brief.")
    s += user(f"Q: what is a {word}? {hint}")
    s += assistant(gen("a"))


def test_the_prefix_ends_before_the_first_argument() -> None:
    backend = MockBackend("x")
    prefix = shots.cache(backend=backend)
    assert prefix == "SYSTEM: You are brief.\nUSER: Q: what is a "
    assert [(r.prompt, r.sampling.max_new_tokens) for r in backend.requests] == [((prefix,), 0)]


def test_given_and_bound_arguments_belong_to_it() -> None:
    start = "SYSTEM: You are brief.\nUSER: Q: what is a "
    assert shots.cache("cup", backend=MockBackend("x")) == start + "cup? "
    assert shots.bind(word="cup").cache(hint="Hm", backend=MockBackend("x")).startswith(start + "cup? Hm")


def test_every_run_begins_with_it() -> None:
    backend = MockBackend("x")
    prefix = shots.cache(backend=backend)
    for state in shots.run_batch([("cup",), ("tea", "Hm")], backend=backend):
        assert state.text().startswith(prefix)


def test_it_ends_before_what_the_model_writes() -> None:
    @function
    def program(s: Any) -> None:
        s += "a" + gen("x") + "b"

    assert program.cache(backend=MockBackend("x")) == "a"


def test_forks_variables_and_what_stops_the_trace_do_not_matter_before_their_place() -> None:
    @function
    def program(s: Any, x: str) -> None:
        s += "one "
        s["n"] = 1
        with s.fork(2) as branches:
            branches += gen("y")
        s += "two "
        if x:
            s += "three"

    assert program.cache(backend=MockBackend("x")) == "one two "


def test_without_a_prefix_nothing_is_sent() -> None:
    @function
    def program(s: Any, x: str) -> None:
        s += x + "a" + gen("y")

    backend = MockBackend("x")
    assert program.cache(backend=backend) == ""
    assert backend.requests == []


def test_a_prefix_that_cannot_be_is_an_error() -> None:
    @function
    def program(s: Any) -> None:
        s.role("nobody", "a")

    with pytest.raises(ProgramError, match="nobody"):
        program.cache(backend=MockBackend("x"))


@function
def plants(s: Any, x: str) -> None:
    s += (
        "A gardener's list of plants that climb, with a remark on each of them, in the order of their names: "
    )
    s += x + gen("y", max_tokens=1)


def computed_once(backend: Backend) -> None:
    """The runs after ``cache`` compute only what comes after the prefix."""
    prefix = plants.cache(backend=backend)
    whole = GenerateRequest((prefix,), SamplingOptions(max_new_tokens=0))
    alone = DEFAULTS.loop.call(backend.generate(whole)).result()
    assert (alone.text, alone.token_ids) == ("", ())
    for x in ("ivy", "hop"):
        counts = plants.run(x, backend=backend, temperature=0).meta("y").counts
        # The last tokens of the prefix may be others when more text follows.
        assert counts.cached_tokens >= alone.counts.prompt_tokens - 2


@pytest.mark.model
def test_the_engine_computes_it_once(engine: Engine) -> None:
    computed_once(engine)


@pytest.mark.model
@pytest.mark.server
def test_a_server_computes_it_once(server_url: str) -> None:
    with RuntimeEndpoint(server_url) as backend:
        computed_once(backend)
