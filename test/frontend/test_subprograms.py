"""Programs inside programs, scopes, typed reads by the expression itself, and images."""

from __future__ import annotations

import contextvars
import threading

import pytest

from trellis.errors import BackendError, InvalidRequestError, ProgramError, RequestAborted
from trellis.frontend import (
    MockAnswer,
    MockBackend,
    assistant,
    function,
    gen,
    image,
    select,
    user,
    video,
)

HANGS = MockAnswer(latency=float("inf"))


def run(body, backend=None, **options):
    return function(body).run(backend=backend or MockBackend(last_word), **options)


def last_word(request):
    """Answers with the last word of the prompt, doubled."""
    return request.prompt[-1].split()[-1] * 2


@function
def rate(s, thing: str, scale: int = 5) -> str:
    s += f" {thing} of {scale}: " + gen("rating")
    return f"rated {s['rating']}"


# -- run ---------------------------------------------------------------------------------------------------------


def test_a_program_appends_to_the_state_of_another_and_sets_its_variables() -> None:
    def body(s):
        s += "Begin."
        s.set("first", s.run(rate, "tea"))
        s.run(rate.bind(scale=9), thing="coffee")
        s += " End."

    state = run(body)
    assert state["first"] == "rated 5:5:"
    assert state.text() == "Begin. tea of 5: 5:5: coffee of 9: 9:9: End."
    assert state["rating"] == "9:9:"


def test_options_of_a_sub_program_are_for_its_gens_only() -> None:
    @function
    def inner(s):
        s += "a" + gen("a") + gen("b", temperature=0.7)
        branch = s.copy()
        branch += "c" + gen("c")
        assert branch["c"] == "x"
        assert s.options.sampling.temperature == 0

    def body(s):
        s += gen("before")
        s.run(inner.with_options(top_k=3), temperature=0, max_tokens=5)
        s += gen("after")

    backend = MockBackend("x")
    run(body, backend, temperature=2.0, top_p=0.5)
    found = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p) for r in backend.requests]
    assert found == [(2.0, -1, 0.5), (0.0, 3, 0.5), (0.7, 3, 0.5), (0.0, 3, 0.5), (2.0, -1, 0.5)]
    assert [r.sampling.max_new_tokens for r in backend.requests] == [128, 5, 5, 5, 128]


def test_a_default_that_is_said_wins_over_the_run() -> None:
    @function
    def inner(s):
        s += "a" + gen("a")

    backend = MockBackend("x")
    run(lambda s: s.run(inner, temperature=1.0), backend, temperature=0)
    assert backend.requests[0].sampling.temperature == 1.0


def test_programs_may_call_themselves() -> None:
    @function
    def countdown(s, n):
        s += f"{n} "
        return 0 if n == 0 else 1 + s.run(countdown, n - 1)

    assert run(lambda s: s.set("depth", s.run(countdown, 30)))["depth"] == 30


def test_an_exception_of_the_inner_body_comes_out_unchanged() -> None:
    @function
    def broken(s):
        s += "before "
        raise KeyError("mine")

    def body(s):
        with pytest.raises(KeyError, match="mine"):
            s.run(broken)
        s += "after"

    assert run(body).text() == "before after"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.run(str.upper), "s.run takes a program"),
        (lambda s: s.run(rate), "missing a required argument: 'thing'"),
        (lambda s: s.run(rate, "tea", temprature=0), "did you mean 'temperature'"),
        (lambda s: s.run(rate, "tea", timeout=3), "timeout belongs to a whole run"),
        (lambda s: s.run(rate, "tea", stream=True), "stream belongs to a whole run"),
        (lambda s: s.run(rate.with_options(backend=MockBackend()), "tea"), "backend belongs to a whole run"),
    ],
)
def test_a_wrong_call_of_a_sub_program_says_what_is_wrong(call, message) -> None:
    with pytest.raises(TypeError, match=message):
        run(call)


# -- gather ------------------------------------------------------------------------------------------------------


def test_gathered_programs_run_at_the_same_time_on_branches_of_their_own() -> None:
    barrier = threading.Barrier(3, timeout=10)
    who = contextvars.ContextVar("who", default="nobody")

    @function
    def meet(s, name):
        s += f" {name}"
        barrier.wait()
        s += ": " + gen("said")
        s["mine"] = name
        return who.get()

    def body(s):
        who.set("me")
        s += "All:" + gen("old")
        found = s.gather(a=meet.bind(name="A"), b=meet.bind(name="B"), c=meet.bind(name="C"))
        assert found == {"a": "me", "b": "me", "c": "me"}

    state = run(body, MockBackend(lambda r: "" if r.prompt == ("All:",) else last_word(r)))
    assert state["b"] == {"said": "B:B:", "mine": "B"}
    assert state.text("c") == {"said": "C:C:", "mine": "C"}
    assert state.meta("a")["said"].counts.sampled_tokens == 1
    assert [row.variable for row in state.report().rows] == ["old", "a.said", "b.said", "c.said"]
    assert state.text() == "All:"
    assert "said" not in state


def test_a_gathered_program_that_fails_ends_the_others(assert_settled) -> None:
    def answer(request):
        return BackendError("gone") if "bad" in request.prompt[-1] else HANGS

    backend = MockBackend(answer)
    with pytest.raises(ProgramError, match=r"gather 'b'.*gone") as caught:
        run(lambda s: s.gather(a=rate.bind(thing="good"), b=rate.bind(thing="bad")), backend)
    assert str(caught.value.__cause__) == "gone"
    assert_settled(backend)


def test_gathered_errors_may_stand_in_their_place() -> None:
    @function
    def broken(s):
        s += "x"
        raise KeyError("mine")

    def body(s):
        found = s.gather("return", good=rate.bind(thing="tea"), bad=broken)
        assert isinstance(found["bad"].__cause__, KeyError)
        s += "go on"

    state = run(body)
    assert state["good"]["rating"] == "5:5:"
    assert isinstance(state["bad"], ProgramError)
    assert state.text() == "go on"


def test_gather_inside_gather_and_forks_inside_it() -> None:
    @function
    def leaf(s, n):
        with s.fork(2) as branches:
            branches += lambda i: f" {n}{i} " + gen("x")

    @function
    def inner(s, n):
        s.gather(left=leaf.bind(n=n), right=leaf.bind(n=n + 1))

    state = run(lambda s: s.gather(a=inner.bind(n=1), b=inner.bind(n=5)))
    assert state["a"]["right"] == {"x": ["2020", "2121"]}
    assert state["b"]["left"] == {"x": ["5050", "5151"]}


def test_what_was_gathered_without_a_value_raises_when_it_is_read() -> None:
    @function
    def cut(s):
        s += gen("x", schema={"type": "object"}, max_tokens=1)

    class Loose(MockBackend):
        _check_constraint = staticmethod(lambda _request, _text: None)

    state = run(lambda s: s.gather(a=cut), Loose('{"a": 1 2'))
    with pytest.raises(ProgramError, match=r"was cut at max_tokens.*state.text\('"):
        state["a"]
    assert state.text("a") == {"x": '{"a":'}


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda s: s.gather(), InvalidRequestError, "needs at least one program"),
        (lambda s: s.gather("later", a=rate), InvalidRequestError, "gather.on_error"),
        (lambda s: s.gather(a=rate), TypeError, "missing a required argument"),
        (lambda s: s.gather(a=len), TypeError, "takes a program"),
    ],
)
def test_gather_refuses_what_it_does_not_know_before_anything_starts(call, kind, message) -> None:
    backend = MockBackend("x")
    with pytest.raises(kind, match=message):
        run(call, backend)
    assert backend.requests == []


def test_cancelling_a_state_ends_what_it_gathers(assert_settled) -> None:
    backend = MockBackend(HANGS)

    def body(s):
        s.gather(a=rate.bind(thing="tea"), b=rate.bind(thing="coffee"))

    state = run(body, backend, stream=True)
    while backend.active < 2:
        pass
    state.cancel()
    with pytest.raises(ProgramError) as caught:
        state.text()
    assert isinstance(caught.value.__cause__, RequestAborted)
    assert_settled(backend)


# -- scopes ------------------------------------------------------------------------------------------------------


def test_a_scope_holds_all_that_was_said_in_it() -> None:
    def body(s):
        s += "Before "
        with s.var_scope("outer"):
            s += "one " + gen("x")
            with s.var_scope("inner"), s.user():
                s += "Hi " + select("y", ["a", "b"])
            s += " two"
        s += " after " + s["inner"]

    state = run(body)
    assert state["inner"] == "USER: Hi a\n"
    assert state["outer"] == "one oneoneUSER: Hi a\n two"
    assert state.text() == "Before one oneoneUSER: Hi a\n two after USER: Hi a\n"
    assert state.meta("outer") is None


def test_a_scope_streams_like_a_gen() -> None:
    def body(s):
        with s.var_scope("part"):
            s += "a " + gen("x", n=2)
        s += "later"

    state = run(body, MockBackend("one two"), stream=True)
    assert list(state.text_iter("part")) == ["a ", "one", " two"]


def test_a_branch_that_is_concatenated_is_in_the_scope() -> None:
    def body(s):
        with s.var_scope("all"):
            s += "start"
            branches = s.fork(2)
            branches += lambda i: f" b{i}"
            branches.join("concatenate")

    assert run(body)["all"] == "start b0 b1"


def test_a_scope_that_is_read_inside_itself_is_an_error_and_no_deadlock() -> None:
    def body(s):
        with s.var_scope("x"):
            s += "a"
            with pytest.raises(RuntimeError, match="inside its own var_scope"):
                s["x"]
            with pytest.raises(RuntimeError, match="inside its own var_scope"):
                list(s.text_iter("x"))

    assert run(body)["x"] == "a"


def test_a_scope_that_is_left_by_an_error_has_ended() -> None:
    def body(s):
        def fails(s):
            with s.var_scope("x"):
                s += "a"
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            fails(s)
        s += "b"

    state = run(body)
    assert (state["x"], state.text()) == ("a", "ab")


def test_a_failure_inside_a_scope_reaches_its_readers() -> None:
    def body(s):
        with s.var_scope("x"):
            s += "a" + gen("y")

    state = run(body, MockBackend(BackendError("gone")), stream=True)
    with pytest.raises(ProgramError, match="gone"):
        state["x"]
    with pytest.raises(InvalidRequestError, match="non-empty string"):
        run(lambda s: s.var_scope("").__enter__())


# -- reading by the expression -----------------------------------------------------------------------------------


def test_a_gen_itself_is_a_key_also_without_a_name() -> None:
    number, word, choice = gen(type=int), gen("word"), select(choices=["a", "b"])

    def body(s):
        s += "n: " + number + " w: " + word + choice
        assert s[number] == 7
        assert number in s
        assert gen(type=int) not in s

    state = run(body, MockBackend(["7", "seven"]))
    assert (state[number], state[word], state[choice]) == (7, "seven", "a")
    assert state.text(number) == "7"
    assert state.meta(number).counts.sampled_tokens == 1
    assert state.get(number) == 7
    assert "".join(state.text_iter(word)) == "seven"
    with pytest.raises(KeyError, match="was not appended to this state"):
        state[gen("word")]


def test_a_gen_that_is_appended_again_has_the_last_value_of_this_state() -> None:
    again = gen("x")

    def body(s):
        s += again
        branches = s.fork(2)
        branches += lambda i: f" {i} " + again
        assert [branch[again] for branch in branches] == ["00", "11"]
        branches.join()
        assert s[again] == "first"
        assert s["x"] == ["00", "11"]
        s += " 9 " + again

    assert run(body, MockBackend(lambda r: last_word(r) if r.prompt else "first"))[again] == "99"


def test_get_checks_the_type() -> None:
    def body(s):
        s += "n: " + gen("n", type=int) + gen("words", type=list[str])

    state = run(body, MockBackend(["7", '["a"]']))
    assert state.get("n", int) == 7
    assert state.get("words", list[str]) == ["a"]
    assert state.get_var("n") == 7
    with pytest.raises(TypeError, match="variable 'n' is int 7, not 'str'"):
        state.get("n", str)
    with pytest.raises(KeyError):
        state.get("m", int)


# -- images ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("media", [image("cat.png"), image(b"\x89PNG"), video("cat.mp4", num_frames=4)])
def test_media_are_refused_before_the_request_that_would_show_them(media) -> None:
    backend = MockBackend("x")

    def body(s):
        s += user("Look: " + media) + assistant(gen("x"))

    with pytest.raises(ProgramError, match=f"{media.kind}: the model 'mock' reads text only"):
        run(body, backend)
    assert backend.requests == []


def test_media_are_checked_where_they_are_written() -> None:
    with pytest.raises(InvalidRequestError, match=r"image\.source"):
        image(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"video\.num_frames"):
        video("a", 0)
