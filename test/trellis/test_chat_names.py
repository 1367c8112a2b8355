"""Chat formats by name: the registry, and what the language does with them."""

from __future__ import annotations

import asyncio

import pytest

from trellis.chat_format import ChatFormat
from trellis.chat_templates import ChatTemplates, chat_format_of, get_chat_template, register_chat_template
from trellis.errors import InvalidRequestError, ProgramError
from trellis.frontend import (
    MockBackend,
    OpenAI,
    RuntimeEndpoint,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)

TEST_FORMAT = ChatFormat({"user": ("<u>", "</u>"), "assistant": ("<a>", "</a>")}, stop=("</a>",))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"'lama-3' is not known \(did you mean 'llama-3'\?\); known: chatml, "
    ):
        get_chat_template("lama-3")
    with pytest.raises(InvalidRequestError, match="known: chatml"):
        RuntimeEndpoint("http://127.0.0.1:1", chat_template="nothing")


def test_a_name_stands_for_one_format() -> None:
    names = ChatTemplates({})
    names.register("mine", TEST_FORMAT)
    names.register("mine", ChatFormat(dict(TEST_FORMAT.roles), stop=("</a>",)))
    with pytest.raises(InvalidRequestError, match="another chat template 'mine'"):
        names.register("mine", ChatFormat())
    assert names.names() == ["mine"]


def test_registering_checks_what_it_is_given() -> None:
    with pytest.raises(InvalidRequestError, match="give either"):
        register_chat_template("x")
    with pytest.raises(InvalidRequestError, match="give either"):
        register_chat_template("x", ChatFormat(), roles={})
    with pytest.raises(InvalidRequestError, match=r"roles\['user'\]: must be \(prefix, suffix\), got 'ab'"):
        register_chat_template("x", roles={"user": "ab"})
    with pytest.raises(InvalidRequestError, match="non-empty string"):
        register_chat_template("", ChatFormat())
    with pytest.raises(InvalidRequestError, match="must be a ChatFormat"):
        register_chat_template("x", "chatml")


def test_a_registered_format_is_known_by_its_name() -> None:
    roles = {"user": ("Q: ", "\n"), "assistant": ("A: ", "\n")}
    made = register_chat_template("test-of-registering", roles=roles, begin="^", stop=["\n"])
    assert get_chat_template("test-of-registering") is made
    assert made == ChatFormat(roles, begin="^", stop=("\n",))
    assert chat_format_of(made) is made
    assert chat_format_of(None) is None
    assert chat_format_of("test-of-registering") is made


def test_the_stops_of_a_format_end_gens_in_roles_only() -> None:
    @function
    def program(s):
        s += "a" + gen("outside", stop="!")
        s += user("q")
        s += assistant(gen("inside", stop=["!", "</a>"]) + gen("more"))

    backend = MockBackend(["one", "two", "three</a> four"], chat_format=TEST_FORMAT)
    state = program.run(backend=backend)
    assert [request.sampling.stop for request in backend.requests] == [("!",), ("!", "</a>"), ("</a>",)]
    assert state["more"] == "three"
    assert state.text() == "aone<u>q</u><a>twothree</a>"


def test_a_role_that_the_template_forbids_fails_the_program_with_its_reason() -> None:
    @function
    def program(s):
        s += system("Be brief.")
        s += assistant(gen("x"))

    with pytest.raises(ProgramError, match="no role 'assistant' after 'system'; it has: user"):
        program.run(backend=MockBackend("ok", chat_format=get_chat_template("gemma")))["x"]


def test_blanks_that_the_template_strips_are_never_shown() -> None:
    @function
    def program(s):
        with s.user():
            s += "  one "
            s += " \n"
        with s.assistant():
            s += "\n Well, "
            branches = s.fork(2)
            branches += gen("x")
            branches.join()
            s += select("y", ["yes", "no"])
            s += "  "

    backend = MockBackend("ok", scores={"yes": -1.0, "no": -2.0}, chat_format=get_chat_template("gemma"))
    state = program.run(backend=backend, stream=True)
    text = "<bos><start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\nWell, yes<end_of_turn>\n"
    assert "".join(state.text_iter()) == text
    assert state.text() == text
    assert state.messages() == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Well, yes"},
    ]
    assert [backend.prompt_text(request.prompt)[-6:] for request in backend.requests] == ["Well, "] * 2
    assert backend.score_requests[0][0][-1].endswith("Well, ")


def test_the_answer_may_begin_otherwise_than_a_written_one() -> None:
    @function
    def program(s):
        s += user("a")
        s += assistant("first")
        s += user("b")
        s += assistant(gen("x"))

    backend = MockBackend("ok", chat_format=get_chat_template("mistral"))
    assert program.run(backend=backend).text() == "<s>[INST] a[/INST] first</s>[INST] b[/INST]ok</s>"


def test_branches_are_concatenated_only_where_the_template_allows_it() -> None:
    @function
    def program(s, count):
        s += user("q")
        branches = s.fork(count)
        branches += assistant(gen("x"))
        branches.join("concatenate")
        s += user("and?")

    gemma = MockBackend("ok", chat_format=get_chat_template("gemma"))
    messages = program.run(1, backend=gemma).messages()
    assert program.run(1, backend=gemma).text() == get_chat_template("gemma").render(messages, False)
    with pytest.raises(ProgramError, match="no role 'assistant' after 'assistant'; it has: user"):
        program.run(2, backend=gemma)
    chatml = MockBackend("ok", chat_format=get_chat_template("chatml"))
    state = program.run(2, backend=chatml)
    assert state.text() == get_chat_template("chatml").render(state.messages(), False)


def test_a_branch_may_go_on_inside_a_message() -> None:
    @function
    def program(s):
        s += user("q")
        with s.assistant():
            s += " "
            branches = s.fork(2)
            branches += ["one ", " two "]
            branches.join("concatenate")
            s += gen("x")
        s += user("and?")

    backend = MockBackend("ok", chat_format=get_chat_template("gemma"))
    state = program.run(backend=backend)
    assert state.messages()[1] == {"role": "assistant", "content": "one  two ok"}
    assert state.text() == get_chat_template("gemma").render(state.messages(), False)


def test_every_backend_with_a_text_api_takes_a_format_by_name() -> None:
    backend = OpenAI("some-model", "http://127.0.0.1:1/v1", api="completions", chat_template="chatml")
    assert asyncio.run(backend.model_info()).chat_format == get_chat_template("chatml")
    with pytest.raises(InvalidRequestError, match="known: chatml"):
        OpenAI("some-model", "http://127.0.0.1:1/v1", api="completions", chat_template="nothing")


def test_a_template_that_is_only_nearly_known_is_warned_of() -> None:
    @function
    def program(s):
        s += user("q")
        s += assistant(gen("x"))

    nearly = ChatFormat(dict(TEST_FORMAT.roles), exact=False)
    with pytest.warns(RuntimeWarning, match="only nearly what the chat endpoint sends"):
        program.run(backend=MockBackend("ok", chat_format=nearly))
    hopeless = ChatFormat({}, exact=False, problem="the model's chat template cannot be used: it is broken")
    with pytest.raises(ProgramError, match=r"it is broken; name another one with chat_template="):
        program.run(backend=MockBackend("ok", chat_format=hopeless))
