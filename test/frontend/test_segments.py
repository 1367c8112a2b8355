"""The prompt of a later gen carries the tokens that earlier gens produced, so that they hit the cache."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trellis.frontend import MockBackend, assistant, function, gen, select, user
from trellis.frontend.backends.base import Completion
from trellis.frontend.transcript import Transcript


def test_the_second_prompt_has_the_first_answers_tokens() -> None:
    backend = MockBackend(
        [
            Completion("hello", token_ids=(5, 6, 2), kept_tokens=2),  # 2 is an end-of-text token
            Completion("bye", token_ids=(7, 8), kept_tokens=2),
            Completion("end"),
        ]
    )

    @function
    def program(s):
        s += user("hi")
        s += assistant(gen("a"))
        s += user("again") + assistant(gen("b"))
        s += gen("c")

    state = program.run(backend=backend)
    prompts = [request.prompt for request in backend.requests]
    assert prompts[0] == ("USER: hi\nASSISTANT: ",)
    assert prompts[1] == ("USER: hi\nASSISTANT: ", (5, 6), "\nUSER: again\nASSISTANT: ")
    assert prompts[2] == (*prompts[1], (7, 8), "\n")
    assert state.text() == "USER: hi\nASSISTANT: hello\nUSER: again\nASSISTANT: bye\nend"


def test_what_a_cut_inside_a_token_left_over_follows_as_text() -> None:
    backend = MockBackend(
        [Completion("hello wor", (5, 6, 7), kept_tokens=1, tail_text=" wor"), Completion("")]
    )

    @function
    def program(s):
        s += "x" + gen("a", stop="ld") + "!" + gen("b")

    state = program.run(backend=backend)
    assert backend.requests[1].prompt == ("x", (5,), " wor!")
    assert state.text() == "xhello wor!"
    assert state["a"] == "hello wor"


def test_an_answer_without_kept_tokens_goes_on_as_text() -> None:
    backend = MockBackend([Completion("abc", (9,), kept_tokens=0, tail_text="abc"), Completion("")])

    @function
    def program(s):
        s += "x" + gen("a") + "y" + gen("b")

    program.run(backend=backend)
    assert backend.requests[1].prompt == ("xabcy",)


def test_adjacent_answers_are_one_run_of_tokens() -> None:
    backend = MockBackend(
        [Completion("a", (1,), kept_tokens=1), Completion("b", (2,), kept_tokens=1), Completion("")]
    )

    @function
    def program(s):
        s += "x" + gen("a") + gen("b") + gen("c")

    program.run(backend=backend)
    assert backend.requests[2].prompt == ("x", (1, 2))


def test_a_select_adds_text_and_sees_the_same_segments() -> None:
    backend = MockBackend([Completion("a", (1,), kept_tokens=1), Completion("")])

    @function
    def program(s):
        s += "x" + gen("a") + " so: " + select("b", ["yes", "no"]) + gen("c")

    program.run(backend=backend)
    assert backend.score_requests == [(("x", (1,), " so: "), ("yes", "no"))]
    assert backend.requests[1].prompt == ("x", (1,), " so: yes")


def test_forks_start_from_their_parents_segments() -> None:
    backend = MockBackend([Completion("a", (1,), kept_tokens=1), *[Completion("z", (3,), kept_tokens=1)] * 3])

    @function
    def program(s):
        s += "x" + gen("a")
        branches = s.fork(2)
        branches += lambda i: f"[{i}]" + gen("b")
        branches.join(mode="concatenate")
        s += gen("c")

    program.run(backend=backend)
    assert sorted(r.prompt for r in backend.requests[1:3]) == [("x", (1,), "[0]"), ("x", (1,), "[1]")]
    assert backend.requests[3].prompt == ("x", (1,), "[0]", (3,), "[1]", (3,))


def test_the_first_gen_may_have_no_prompt_at_all() -> None:
    backend = MockBackend("a")
    function(lambda s: s.__iadd__(gen("x")) and None).run(backend=backend)
    assert backend.requests[0].prompt == ()


pieces = st.lists(
    st.one_of(
        st.text(max_size=5),
        st.builds(
            lambda head, tail, ids: Completion(head + tail, ids, kept_tokens=len(ids), tail_text=tail),
            st.text(max_size=4),
            st.text(max_size=2),
            st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple),
        ),
    ),
    max_size=12,
)


@given(pieces)
def test_segments_alternate_and_nothing_is_lost(items) -> None:
    transcript, text, ids = Transcript(), "", []
    for item in items:
        if isinstance(item, str):
            transcript.add_text(item)
            text += item
        else:
            transcript.add_completion(item)
            text += item.text
            ids += item.token_ids
    prompt = transcript.prompt()
    assert transcript.text() == text
    assert [i for segment in prompt if isinstance(segment, tuple) for i in segment] == ids
    assert all(segment for segment in prompt)
    kinds = [type(segment) for segment in prompt]
    assert all(a is not b for a, b in itertools.pairwise(kinds))
