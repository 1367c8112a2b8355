"""What the language asks to be healed, and how a program goes on from a healed answer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.errors import InvalidRequestError, ProgramError
from trellis.frontend import MockBackend, assistant, function, gen, select, user
from trellis.frontend.backends import answers, wire
from trellis.frontend.backends.base import Completion, GenerateRequest, SamplingOptions
from trellis.frontend.transcript import Transcript

HEALED = Completion("me is", token_ids=(5, 6), kept_tokens=2, healed_characters=3)  # " na" + "me is"


def asked(program, **options) -> list[bool]:
    backend = MockBackend()
    program.run(backend=backend, **options)
    return [request.token_healing for request in backend.requests]


def test_text_that_the_program_wrote_is_healed_and_no_other() -> None:
    @function
    def program(s):
        s += "the na" + gen()  # the program's text
        s += gen()  # the model's own tokens
        s += "x" + select(choices=["Yes"]) + gen()  # a choice is meant as it is
        s += user("hi") + assistant(gen())  # so is what the chat template says
        s += assistant("A: " + gen())

    assert asked(program) == [True, False, False, False, True]


def test_a_gen_or_a_run_can_switch_it_off() -> None:
    @function
    def program(s):
        s += "a" + gen() + "b" + gen(token_healing=False) + "c" + gen(token_healing=True)

    assert asked(program) == [True, False, True]
    assert asked(program, token_healing=False) == [False, False, True]
    assert asked(program.with_options(token_healing=False)) == [False, False, True]
    with pytest.raises(InvalidRequestError, match=r"gen\.token_healing: must be True or False"):
        gen(token_healing="yes")  # type: ignore[arg-type]


def test_the_next_prompt_leaves_out_the_text_that_the_tokens_spell_again() -> None:
    backend = MockBackend([HEALED, Completion("end")])

    @function
    def program(s):
        s += "the"
        s += " n"
        s += "a" + gen("a") + "!" + gen("b")

    state = program.run(backend=backend)
    assert backend.requests[1].prompt == ("the", (5, 6), "!")
    assert state.text() == "the name is!end"
    assert state["a"] == "me is"
    assert state.meta("a").token_ids == (5, 6)


def test_messages_say_what_was_said() -> None:
    backend = MockBackend([HEALED, Completion("end")])

    @function
    def program(s):
        s += user("hi")
        s += assistant("the na" + gen("a"))
        s += user("more")
        s += assistant(gen("b"))

    state = program.run(backend=backend)
    assert state.messages()[1] == {"role": "assistant", "content": "the name is"}
    assert backend.requests[1].prompt[0] == "USER: hi\nASSISTANT: the"
    assert backend.requests[1].prompt[1] == (5, 6)


def test_branches_heal_the_text_before_the_fork_each_for_itself() -> None:
    backend = MockBackend(lambda request: HEALED if len(request.prompt) == 1 else Completion("."))

    @function
    def program(s):
        s += "the na"
        branches = s.fork(2)
        for branch in branches:
            branch += gen("a")
            branch += gen("b")
        branches.join("concatenate")
        s += gen("c")

    state = program.run(backend=backend)
    assert state.text() == "the name is.me is.."
    prompts = [request.prompt for request in backend.requests if len(request.prompt) > 1]
    assert prompts[0] == prompts[1] == ("the", (5, 6))
    # The second branch's tokens spell " na" again, which does not stand before them now: its text goes instead.
    assert prompts[2] == ("the", (5, 6), ".me is.")


def test_an_answer_cannot_have_written_more_of_the_prompt_than_there_is() -> None:
    @function
    def program(s):
        s += "a" + gen("x")

    with pytest.raises(ProgramError, match="wrote 3 characters of the prompt again, but it has 1"):
        program.run(backend=MockBackend([HEALED]))


@given(
    st.lists(
        st.one_of(st.text("ab ", min_size=1, max_size=4), st.integers(0, 6).map(lambda n: ("heal", n))),
        max_size=10,
    )
)
def test_segments_spell_the_text_whatever_was_healed(steps: list) -> None:
    """Token ids are code points here, so that a prompt can be read."""
    transcript = Transcript()
    said = ""
    for step in steps:
        if isinstance(step, str):
            transcript.add_text(step, written=True)
            said += step
        else:
            own = transcript.pieces[-1].text if transcript.ends_in_written_text else ""
            count = min(step[1], len(own))
            again = own[len(own) - count :]
            ids = tuple(map(ord, again + "xy"))
            transcript.add_completion(Completion("xy", ids, kept_tokens=len(ids), healed_characters=count))
            said += "xy"
    segments = transcript.prompt()
    read = "".join(s if isinstance(s, str) else "".join(map(chr, s)) for s in segments)
    assert read == transcript.text() == said
    assert all(isinstance(a, str) != isinstance(b, str) for a, b in itertools.pairwise(segments))


def test_over_http_it_is_one_field_each_way() -> None:
    request = GenerateRequest(("the na",), SamplingOptions(), token_healing=True)
    assert wire.generate_body(request, stream=False)["token_healing"] is True
    assert "token_healing" not in wire.generate_body(GenerateRequest(("x",), SamplingOptions()), stream=False)
    meta = {"finish_reason": {"type": "stop"}, "kept_tokens": 2, "healed_characters": 3}
    answer = {"text": "me is", "output_ids": [5, 6], "meta_info": meta}
    assert answers.completion(answer, "http://x") == HEALED
