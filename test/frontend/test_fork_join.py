"""Branches: what they start from, and what a join makes of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from trellis.errors import InvalidRequestError, ProgramError
from trellis.frontend import (
    MockAnswer,
    MockBackend,
    assistant,
    assistant_begin,
    assistant_end,
    fork,
    function,
    gen,
    join,
    user,
    user_begin,
    user_end,
)

HANGS = MockAnswer(latency=float("inf"))


def run(body, backend=None, **options):
    return function(body).run(backend=backend or MockBackend(last_word), **options)


def last_word(request):
    """Answers with the last word of the prompt, doubled."""
    return request.prompt[-1].split()[-1] * 2


def test_join_makes_lists_in_the_order_of_the_branches() -> None:
    def body(s):
        s += "start "
        branches = s.fork(3)
        for i, branch in enumerate(branches):
            branch += f"b{i} " + gen("x")
        assert branches.join() is s
        s += "end"

    state = run(body)
    assert state["x"] == ["b0b0", "b1b1", "b2b2"]
    assert state.text("x") == state["x"]
    assert [m.counts.sampled_tokens for m in state.meta("x")] == [1, 1, 1]
    assert state.text() == "start end"


def test_functions_do_what_the_methods_do() -> None:
    def body(s):
        branches = fork(s, 2)
        branches += lambda i: f"b{i} " + gen("x")
        join(branches, mode="gather", on_error="raise")

    assert run(body)["x"] == ["b0b0", "b1b1"]


def test_a_branch_that_did_not_set_a_variable_has_none_in_its_place() -> None:
    def body(s):
        branches = s.fork(3)
        branches[0] += "a " + gen("x")
        branches[2] += "c " + gen("x")
        branches[1].set("y", 5)
        branches.join()

    state = run(body)
    assert state["x"] == ["aa", None, "cc"]
    assert state["y"] == [None, 5, None]
    assert state.meta("x")[1] is None


def test_variables_of_the_parent_are_seen_and_stay_unless_a_branch_sets_them_again() -> None:
    def body(s):
        s += "p " + gen("old") + gen("again")
        branches = s.fork(2)
        assert branches[0]["old"] == s["old"]
        branches[0] += " q " + gen("again")
        branches.join()

    state = run(body, MockBackend(["1", "2", "3"]))
    assert state["old"] == "1"
    assert state["again"] == ["3", None]


def test_rounds_of_forks_give_fresh_lists() -> None:
    def body(s):
        for r in range(3):
            branches = s.fork(2)
            branches += lambda i, r=r: f"r{r}b{i} " + gen("idea")
            branches.join()
            s += s["idea"][0] + " "

    state = run(body)
    assert state["idea"] == ["r2b0r2b0", "r2b1r2b1"]
    assert state.text() == "r0b0r0b0 r1b0r1b0 r2b0r2b0 "


def test_fork_does_not_wait_and_the_branches_wait_for_their_parent() -> None:
    release = threading.Event()

    async def answer(request):
        if request.prompt == ("a",):
            await asyncio.to_thread(release.wait)
            return "slow"
        return "fast"

    def body(s):
        s += "a" + gen("x")
        branches = s.fork(2)
        branches += "b" + gen("y")
        release.set()
        branches.join()
        assert branches[1]["x"] == "slow"
        assert branches[1].text() == "aslowbfast"

    assert run(body, MockBackend(answer))["y"] == ["fast", "fast"]


def test_branches_send_their_gens_at_the_same_time() -> None:
    backend = MockBackend("a", latency=0.02)

    def body(s):
        s += "prefix"
        branches = s.fork(8)
        branches += lambda i: str(i) + gen("x")
        branches.join()

    run(body, backend)
    assert backend.peak == 8


def test_fork_before_any_text() -> None:
    def body(s):
        branches = s.fork(2)
        branches += lambda i: f"b{i} " + gen("x")
        branches.join()

    assert run(body)["x"] == ["b0b0", "b1b1"]


def test_nested_forks() -> None:
    def body(s):
        outer = s.fork(2)
        for i, branch in enumerate(outer):
            inner = branch.fork(3)
            inner += lambda j, i=i: f"{i}{j} " + gen("x")
            inner.join()
            branch.set("all", "+".join(branch["x"]))
        outer.join()

    state = run(body)
    assert state["all"] == ["0000+0101+0202", "1010+1111+1212"]
    assert state["x"][1] == ["1010", "1111", "1212"]
    assert [row.variable for row in state.report().rows][:2] == ["x[0][0]", "x[0][1]"]


def test_groups_have_a_length_an_order_and_places() -> None:
    def body(s):
        branches = s.fork(3)
        assert len(branches) == 3
        assert list(branches) == [branches[0], branches[1], branches[2]]
        assert branches[-1] is branches[2]
        assert branches[1:] == [branches[1], branches[2]]
        branches[1] += "only here"
        with pytest.raises(TypeError, match="cannot be replaced"):
            branches[0] = branches[1]
        assert [b.text() for b in branches] == ["", "only here", ""]

    run(body)


def test_groups_append_to_all_one_by_one_or_by_index() -> None:
    def body(s):
        branches = s.fork(2)
        branches += "all "
        branches += ["first ", "second " + gen("x")]
        branches += lambda i: f"i{i}"
        assert [b.text() for b in branches] == ["all first i0", "all second secondsecondi1"]
        with pytest.raises(InvalidRequestError, match="a list of 3 for 2 branches"):
            branches += ["a", "b", "c"]
        with pytest.raises(TypeError, match="cannot append"):
            branches += 5

    run(body)


def test_join_by_concatenation() -> None:
    def body(s):
        s += user("topic")
        branches = s.fork(2)
        branches += lambda i: user(f"part {i}") + assistant(f"b{i} " + gen("x"))
        branches.join(mode="concatenate")
        s += user("end")

    state = run(body)
    assert state.text() == (
        "USER: topic\nUSER: part 0\nASSISTANT: b0 b0b0\nUSER: part 1\nASSISTANT: b1 b1b1\nUSER: end\n"
    )
    assert [m["content"] for m in state.messages()] == [
        "topic",
        "part 0",
        "b0 b0b0",
        "part 1",
        "b1 b1b1",
        "end",
    ]
    assert "x" not in state


def test_a_fork_inside_a_role_stays_inside() -> None:
    def body(s):
        s += user("q") + assistant_begin() + "So: "
        branches = s.fork(2)
        branches += lambda i: f"b{i} " + gen("x")
        branches.join(mode="concatenate")
        s += assistant_end()

    assert run(body).messages()[1]["content"] == "So: b0 b0b0b1 b1b1"


def test_branches_that_end_elsewhere_cannot_be_concatenated() -> None:
    def body(s):
        s += user_begin() + "q"
        branches = s.fork(1)
        branches += user_end()
        branches.join(mode="concatenate")

    with pytest.raises(ProgramError, match="branch that has role None open to a state that has 'user' open"):
        run(body)


def test_a_branch_can_end_the_role_for_itself() -> None:
    def body(s):
        s += user_begin() + "q"
        branches = s.fork(2)
        branches += user_end() + assistant(gen("x"))
        branches.join()
        s += user_end()
        assert branches[0].messages()[1]["role"] == "assistant"

    assert run(body, MockBackend("a")).text() == "USER: q\n"


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2"])
def test_a_bad_number_of_branches_is_refused(n) -> None:
    with pytest.raises(InvalidRequestError, match=r"fork\.n"):
        run(lambda s: s.fork(n))


@pytest.mark.parametrize("wrong", [{"mode": "zip"}, {"on_error": "ignore"}])
def test_join_refuses_what_it_does_not_know(wrong) -> None:
    with pytest.raises(InvalidRequestError, match="join"):
        run(lambda s: s.fork(1).join(**wrong))


# -- failures ------------------------------------------------------------------------------------------------------


def one_fails(request):
    return LookupError("lost") if request.prompt[-1].startswith("b1") else last_word(request)


def three_branches(s):
    branches = s.fork(3)
    branches += lambda i: f"b{i} " + gen("x")
    return branches


def test_a_failed_branch_makes_join_raise_its_real_cause() -> None:
    with pytest.raises(ProgramError, match="branch 1: LookupError: lost") as caught:
        run(lambda s: three_branches(s).join(), MockBackend(one_fails))
    assert caught.value.variable == "x"
    assert isinstance(caught.value.__cause__, LookupError)


def test_join_raises_without_waiting_for_branches_that_hang(assert_settled) -> None:
    backend = MockBackend(lambda r: LookupError("lost") if r.prompt[0].startswith("b1") else HANGS)
    with pytest.raises(ProgramError, match="lost"):
        run(lambda s: three_branches(s).join(), backend)
    assert_settled(backend)
    assert backend.cancelled == 2


def test_on_error_return_keeps_the_lists_aligned() -> None:
    def body(s):
        three_branches(s).join(on_error="return")
        s += "going on"

    state = run(body, MockBackend(one_fails))
    first, error, third = state["x"]
    assert (first, third) == ("b0b0", "b2b2")
    assert isinstance(error, ProgramError)
    assert isinstance(error.__cause__, LookupError)
    assert state.text() == "going on"
    assert state.error() is None


def test_concatenation_leaves_out_failed_branches_when_asked() -> None:
    state = run(lambda s: three_branches(s).join("concatenate", "return") and None, MockBackend(one_fails))
    assert state.text() == "b0 b0b0b2 b2b2"


def test_a_program_may_catch_the_error_of_a_branch_and_go_on() -> None:
    def body(s):
        branches = three_branches(s)
        with pytest.raises(ProgramError):
            branches.join()
        s += "plan B " + gen("y")
        assert branches[0]["x"] == "b0b0"

    assert run(body, MockBackend(one_fails))["y"] == "BB"


def test_all_branches_failed() -> None:
    state = run(lambda s: three_branches(s).join(on_error="return") and None, MockBackend(ValueError("down")))
    assert [type(e) for e in state["x"]] == [ProgramError] * 3


def test_a_failed_parent_ends_its_branches() -> None:
    def body(s):
        s += "a" + gen("x")
        branches = s.fork(2)
        branches += gen("y")
        with pytest.raises(ProgramError) as caught:
            branches[0]["y"]
        assert caught.value.variable == "x"
        branches.join()

    with pytest.raises(ProgramError, match="down"):
        run(body, MockBackend(ValueError("down")))


def test_run_waits_for_branches_that_nobody_joined() -> None:
    backend = MockBackend("late", latency=0.02)
    kept = []

    def body(s):
        branches = s.fork(2)
        branches += "b" + gen("x")
        kept.extend(branches)

    run(body, backend)
    assert backend.active == 0
    assert [branch["x"] for branch in kept] == ["late", "late"]


def test_a_with_block_joins_or_cancels(assert_settled) -> None:
    def good(s):
        with s.fork(2) as branches:
            branches += lambda i: f"b{i} " + gen("x")
        assert s["x"] == ["b0b0", "b1b1"]

    run(good)
    backend = MockBackend(HANGS)

    def fail_inside(group):
        with group as branches:
            branches += "a" + gen("x")
            raise ValueError("enough")

    def bad(s):
        branches = s.fork(2)
        with pytest.raises(ValueError, match="enough"):
            fail_inside(branches)
        assert branches[0].error() is not None
        assert s.error() is None

    run(bad, backend)
    assert_settled(backend)


def test_copy_goes_on_alone() -> None:
    def body(s):
        s += "a"
        other = s.copy()
        other += "b"
        s += "c"
        assert (s.text(), other.text()) == ("ac", "ab")

    run(body)
