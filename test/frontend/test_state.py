"""Variables, text, roles, messages and the report of a state."""

from __future__ import annotations

import threading

import pytest

from trellis.errors import InvalidRequestError, ProgramError
from trellis.frontend import (
    ChatFormat,
    Meta,
    MockBackend,
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    role,
    select,
    system,
    user,
    user_begin,
    user_end,
)
from trellis.frontend.backends.base import Completion

CHATML = ChatFormat(
    roles={r: (f"<|im_start|>{r}\n", "<|im_end|>\n") for r in ("system", "user", "assistant", "tool")},
    default_system="<|im_start|>system\nBe helpful.<|im_end|>\n",
)


def run(body, backend=None, **options):
    return function(body).run(backend=backend or MockBackend("ok"), **options)


# -- variables -----------------------------------------------------------------------------------------------------


def test_appending_does_not_wait_and_reading_does() -> None:
    release = threading.Event()

    async def answer(_request):
        import asyncio

        await asyncio.to_thread(release.wait)
        return "done"

    def body(s):
        s += "a" + gen("x")
        s += "b" + gen("y")
        assert "x" in s
        assert "y" in s
        assert "z" not in s
        release.set()
        assert s["y"] == "done"
        assert s["x"] == "done"

    run(body, MockBackend(answer))


def test_a_variable_that_is_set_later_wins() -> None:
    def body(s):
        s += gen("x") + gen("x")
        s.set("y", 1)
        s["y"] = [2]

    state = run(body, MockBackend(["one", "two"]))
    assert state["x"] == "two"
    assert state["y"] == [2]
    assert state.text() == "onetwo"
    assert state.variables() == ["x", "y"]
    assert state.meta("y") is None
    assert state.text("y") == "[2]"


def test_an_unknown_variable_is_a_key_error_that_names_the_known_ones() -> None:
    def body(s):
        s += gen("first")
        with pytest.raises(KeyError, match="no variable 'secnd'; it has: first"):
            s["secnd"]

    state = run(body)
    for read in (state.__getitem__, state.text, state.meta):
        with pytest.raises(KeyError, match="has no variable"):
            read("nothing")


def test_a_bad_name_cannot_be_set() -> None:
    with pytest.raises(InvalidRequestError, match="non-empty string"):
        run(lambda s: s.set("", 1))


def test_values_can_steer_the_program() -> None:
    def body(s):
        for i in range(5):
            s += f"{i}:" + gen("word") + ";"
            if s["word"] == "stop":
                break

    assert run(body, MockBackend(["go", "go", "stop", "go"])).text() == "0:go;1:go;2:stop;"


def test_a_gen_without_a_name_adds_text_only() -> None:
    state = run(lambda s: s.__iadd__("a" + gen() + "b") and None)
    assert state.text() == "aokb"
    assert state.variables() == []
    assert [row.variable for row in state.report().rows] == ["(unnamed)"]


def test_meta_of_a_gen() -> None:
    def body(s):
        s += "one two" + gen("x", stop="!", return_logprob=True) + gen("y", max_tokens=2)

    state = run(body, MockBackend(["a b c! d", "e f g"]))
    x, y = state.meta("x"), state.meta("y")
    assert isinstance(x, Meta)
    assert (x.finish_reason, x.matched, state["x"]) == ("stop", "!", "a b c")
    assert (x.counts.prompt_tokens, x.counts.completion_tokens, x.counts.sampled_tokens) == (2, 3, 3)
    assert len(x.token_ids) == 3
    assert x.logprobs == (-1.0, -1.0, -1.0)
    assert x.seconds >= 0
    assert (y.finish_reason, state["y"], y.logprobs) == ("length", "e f", None)


# -- roles ---------------------------------------------------------------------------------------------------------


def test_role_text_is_what_the_chat_format_says() -> None:
    def body(s):
        s += system("Be brief.")
        s += user("  Hi ")
        s += assistant("Well, " + gen("x"))
        s += role("tool", "42")

    state = run(body, MockBackend("ok", chat_format=CHATML))
    assert state.text() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n  Hi <|im_end|>\n"
        "<|im_start|>assistant\nWell, ok<|im_end|>\n"
        "<|im_start|>tool\n42<|im_end|>\n"
    )
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Hi "},
        {"role": "assistant", "content": "Well, ok"},
        {"role": "tool", "content": "42"},
    ]


def test_the_default_system_text_comes_before_a_first_role_that_is_not_system() -> None:
    chat = ChatFormat(CHATML.roles, CHATML.default_system, begin="<s>")

    def body(s):
        s += user("a") + user("b")

    state = run(body, MockBackend(chat_format=chat))
    assert state.text() == (
        "<s><|im_start|>system\nBe helpful.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
    )
    assert [m["content"] for m in state.messages()] == ["a", "b"]
    own = run(lambda s: s.system("mine"), MockBackend(chat_format=chat))
    assert own.text() == "<s><|im_start|>system\nmine<|im_end|>\n"


def test_roles_can_be_methods_blocks_and_pairs() -> None:
    def methods(s):
        s.user("a")
        s.assistant(gen("x"))

    def blocks(s):
        with s.user():
            s += "a"
        with s.role("assistant"):
            s += gen("x")

    def pairs(s):
        s += user_begin()
        s += "a"
        s += user_end() + assistant_begin() + gen("x")
        s += assistant_end()

    def expressions(s):
        s += user("a")
        s += assistant(gen("x"))

    texts = {run(body).text() for body in (methods, blocks, pairs, expressions)}
    assert texts == {"USER: a\nASSISTANT: ok\n"}
    assert run(pairs).messages() == run(blocks).messages()


def test_a_role_that_has_not_ended_is_not_a_message_yet() -> None:
    def body(s):
        s += user("a") + assistant_begin() + gen("x")
        assert len(s.messages()) == 1

    assert run(body).text() == "USER: a\nASSISTANT: ok"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda s: s.__iadd__(user_begin() + assistant("x")), "'assistant' begins while 'user' is open"),
        (lambda s: s.__iadd__(user_end()), "role 'user' ends, but no role is open"),
        (lambda s: s.__iadd__(user_begin() + assistant_end()), "'assistant' ends, but 'user' is open"),
    ],
)
def test_roles_that_do_not_pair_up_are_refused_where_they_are_appended(body, message) -> None:
    with pytest.raises(ProgramError, match=message):
        run(lambda s: body(s) and None)


def test_nested_role_blocks_are_refused() -> None:
    def body(s):
        with s.user(), s.assistant():
            pass

    with pytest.raises(ProgramError, match="roles cannot be nested"):
        run(body)


def test_an_exception_inside_a_role_block_leaves_no_open_role() -> None:
    def body(s):
        try:
            with s.user():
                s += "half"
                raise ValueError("changed my mind")
        except ValueError:
            pass
        s += assistant(gen("x"))

    assert run(body).messages() == [
        {"role": "user", "content": "half"},
        {"role": "assistant", "content": "ok"},
    ]


def test_a_role_that_the_template_lacks_is_named() -> None:
    with pytest.raises(ProgramError, match="no role 'critic'; it has: assistant, system, user"):
        run(lambda s: s.role("critic", "x"))


# -- report --------------------------------------------------------------------------------------------------------


def test_the_report_has_a_row_for_each_variable_and_their_sum() -> None:
    def body(s):
        s += "one two" + gen("a")
        s += select("b", ["x", "y"])
        branches = s.fork(2)
        branches += gen("c")
        branches.join()
        s.set("d", 1)

    report = run(body, MockBackend("k l m")).report()
    assert [(row.variable, row.kind) for row in report.rows] == [
        ("a", "gen"),
        ("b", "select"),
        ("c[0]", "gen"),
        ("c[1]", "gen"),
    ]
    assert report.total.sampled_tokens == 9
    lines = str(report).splitlines()
    assert lines[0].split() == [
        "variable", "kind", "prompt", "cached", "sampled", "forced", "passes", "seconds", "finish",
    ]  # fmt: skip
    assert len({line.index("gen") for line in lines if " gen " in line}) == 1


def test_the_report_of_a_failed_state_shows_what_was_done_and_why_it_ended() -> None:
    program = function(lambda s: s.__iadd__("a" + gen("x") + gen("y")) and None)
    [state] = program.run_batch([()], backend=MockBackend(["fine", ValueError("no luck")]), on_error="return")
    report = state.report()
    assert [row.variable for row in report.rows] == ["x"]
    assert "no luck" in str(report)
    assert state.partial_text() == "afine"


def test_repr_tells_the_status() -> None:
    assert "done, variables: x" in repr(run(lambda s: s.__iadd__(gen("x")) and None))


def test_a_variable_that_only_a_branch_has_points_to_join() -> None:
    def body(s):
        branches = s.fork(2)
        branches += gen("tip")
        with pytest.raises(KeyError, match=r"no variable 'tip'.*a branch has it: call join\(\) first"):
            s["tip"]
        with pytest.raises(KeyError) as caught:
            s["other"]
        assert "branch" not in str(caught.value)
        branches.join()
        assert len(s["tip"]) == 2

    run(body)


def test_plus_without_equals_says_how_to_append() -> None:
    def body(s):
        for wrong in (lambda: s + "abc", lambda: "abc" + s, lambda: s + gen("x")):
            with pytest.raises(TypeError, match=r"append with s \+= "):
                wrong()
        s += "abc"

    assert run(body).text() == "abc"


def test_an_empty_prompt_is_refused_in_the_languages_words() -> None:
    refusal = InvalidRequestError("prompt", "is empty")
    backend = MockBackend(refusal)
    for program, hint in (
        (function(lambda s: s.__iadd__(gen("x")) and None), True),
        (function(lambda s: s.__iadd__("a" + gen("x")) and None), False),
    ):
        with pytest.raises(ProgramError) as caught:
            program.run(backend=backend)
        cause = caught.value.__cause__
        assert isinstance(cause, InvalidRequestError)
        assert cause.field == "prompt"
        assert cause.reason == "is empty" + ("; append text before the first gen" if hint else "")


def test_meta_tells_which_parts_of_the_text_were_forced() -> None:
    text = '{"größe": 7}'
    completion = Completion(text, (1, 2, 3), forced_spans=((0, 10), (11, 12)), kept_tokens=3)

    def body(s):
        s += "a" + gen("card") + gen("free") + select("pick", ["x", "y"])

    state = function(body).run(backend=MockBackend([completion, "free text"]))
    assert state.meta("card").pieces == (('{"größe": ', "forced"), ("7", "sampled"), ("}", "forced"))
    assert state.meta("free").pieces == (("free text", "sampled"),)
    assert state.meta("pick").pieces == (("x", "selected"),)


def test_a_variable_is_not_set_to_an_expression() -> None:
    @function
    def program(s):
        s["x"] = gen("x")

    with pytest.raises(TypeError, match=r"append it: s \+= gen\('x', "):
        program.run(backend=MockBackend("a"))
