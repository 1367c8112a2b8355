"""The language and the chat endpoint say the same, to the token, on the templates of many families."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from trellis.chat_format import ChatFormat
from trellis.chat_templates import built_in, get_chat_template
from trellis.errors import InvalidRequestError
from trellis.frontend.backends import answers
from trellis.frontend.backends.base import Completion
from trellis.frontend.transcript import Transcript
from trellis.runtime.manager.prompts import PromptEncoder
from trellis.runtime.models import Tokenizer, chat_template, load_tokenizer, resolve_model_path
from trellis.runtime.models import tokenizer as tokenizer_module
from trellis.runtime.models.tokenizer import find_chat_template

_spec = util.spec_from_file_location("family_templates", Path(__file__).with_name("family_templates.py"))
assert _spec is not None
assert _spec.loader is not None
_module = util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
FAMILIES: dict[str, tuple[str, str, str]] = _module.FAMILIES

Said = tuple[str, str, bool]  # role, content, whether the model wrote it
FIRST = {"mistral-1": "user", "gemma-2": "user"}  # families without a system message


def byte_tokenizer(source: str, bos: str, eos: str) -> Tokenizer:
    """Every byte is a token, and so are BOS and EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token in (bos, eos) if token])
    begin = backend.token_to_id(bos) if bos else None
    return Tokenizer(
        backend,
        eos_token_ids=[backend.token_to_id(eos)],
        bos_token_id=begin,
        prefix=[] if begin is None else [begin],
        chat_template=source,
    )


TOKENIZERS = {name: byte_tokenizer(*family) for name, family in FAMILIES.items()}


def speak(chat: ChatFormat, said: Sequence[Said], tokenizer: Tokenizer) -> Transcript:
    """What a program says: written texts in pieces, the model's as the tokens that it wrote."""
    transcript = Transcript()
    for role, content, sampled in said:
        transcript.begin_role(role, chat)
        if sampled:
            transcript.before_answer()
            turn = transcript.open_turn.turn
            # Where the template puts a blank before an answer of the history, the model writes it itself.
            if turn.opening.startswith(turn.generation):
                content = turn.opening.removeprefix(turn.generation) + content
            ids = tuple(tokenizer.encode_plain(content))
            transcript.add_completion(Completion(content, ids, kept_tokens=len(ids)))
        else:
            for part in (content[: len(content) // 2], content[len(content) // 2 :]):
                transcript.write(part)
        transcript.end_role()
    return transcript


def check(tokenizer: Tokenizer, said: Sequence[Said]) -> None:
    """What the next gen of the program sends is what the chat endpoint makes of the messages."""
    transcript = speak(tokenizer.chat_format(), said, tokenizer)
    transcript.begin_role("assistant", tokenizer.chat_format())
    transcript.before_answer()
    text = tokenizer.render_chat([{"role": role, "content": content} for role, content, _ in said])
    segments = [s if isinstance(s, str) else list(s) for s in transcript.prompt()]
    ids = PromptEncoder(tokenizer, 100_000).encode(segments)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(
        tokenizer.encode(text), skip_special_tokens=False
    )
    assert ids == tokenizer.encode(text)


def is_plain(text: str) -> bool:
    return bool(text.strip()) and "<" not in text and text.isprintable()


WRITTEN = st.one_of(
    st.sampled_from(
        ["Hi", " two  words ", "\n\nlines\n\n", "  ", "ü 你好 \t", "a: b", "{{ x }}", "</think>"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda t: "<" not in t),
)
SAMPLED = st.one_of(
    st.sampled_from(["Yes.", "Well, no", "<think>\nhm\n</think>\n\nYes.", "hm\n</think>\n\nNo"]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
    .filter(is_plain)
    .map(str.strip),
)


@st.composite
def conversations(draw: st.DrawFn, system: bool = True) -> list[Said]:
    """Questions and answers in turns, up to a question; the first message may be the system's."""
    said: list[Said] = []
    if system and draw(st.booleans()):
        said.append(("system", draw(WRITTEN.filter(str.strip)), False))
    for _ in range(draw(st.integers(0, 3))):
        said.append(("user", draw(WRITTEN.filter(str.strip)), False))
        sampled = draw(st.booleans())
        said.append(("assistant", draw(SAMPLED if sampled else WRITTEN.filter(str.strip)), sampled))
    said.append(("user", draw(WRITTEN.filter(str.strip)), False))
    return said


@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_is_taken_apart_exactly(name: str) -> None:
    form = TOKENIZERS[name].chat_format()
    assert form.exact
    assert not form.problem


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_programs_and_the_chat_endpoint_send_the_same_tokens(name: str, data: st.DataObject) -> None:
    said = data.draw(conversations(system=name not in FIRST))
    if name == "mistral-3" and said[0][0] == "system":
        said = said[:2]  # what more would do: see below
    check(TOKENIZERS[name], said)


@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "llama-3", "granite", "glm-4"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_messages_of_tools_too(name: str, data: st.DataObject) -> None:
    said = data.draw(conversations())
    for _ in range(data.draw(st.integers(1, 4))):
        roles = st.sampled_from(["tool", "user", "assistant"])
        said.append((data.draw(roles), data.draw(WRITTEN.filter(str.strip)), False))
    check(TOKENIZERS[name], [*said, ("tool", "42", False)])


@pytest.mark.model
@settings(max_examples=60, deadline=None)
@given(said=conversations())
def test_the_default_model_gets_the_same_tokens(said: list[Said]) -> None:
    check(SMOLLM[0], said)


@pytest.fixture(autouse=True, scope="module")
def _smollm(request: pytest.FixtureRequest) -> None:
    if any(item.get_closest_marker("model") for item in request.session.items):
        SMOLLM.append(load_tokenizer(resolve_model_path("smollm2-135m")))


SMOLLM: list[Tokenizer] = []


@pytest.mark.parametrize(
    ("name", "roles", "reason"),
    [
        ("mistral-1", ["system"], "no role 'system'; it has: user"),
        (
            "gemma-2",
            ["system"],
            "no 'system' as the first message: .*System role not supported; it has: user",
        ),
        (
            "gemma-3",
            ["user", "user"],
            "no 'user' after 'user': .*roles must alternate.*; it has: .*assistant",
        ),
        ("llama-2", ["system", "assistant"], "no 'assistant' after 'system': .*alternate.*; it has: user"),
        ("command-r", ["assistant"], "no 'assistant' as the first message: .*; it has: system, user"),
        ("phi-3", ["user", "tool"], "no role 'tool'"),
        (
            "mistral-3",
            ["system", "user", "assistant", "user"],
            "no 'user' after 'assistant': the template leaves out, moves or repeats",
        ),
    ],
)
def test_what_the_template_forbids_is_said(name: str, roles: list[str], reason: str) -> None:
    tokenizer = TOKENIZERS[name]
    said = [(role, "x", False) for role in roles]
    speak(tokenizer.chat_format(), said[:-1], tokenizer)
    with pytest.raises(InvalidRequestError, match=reason):
        speak(tokenizer.chat_format(), said, tokenizer)


def test_thoughts_leave_the_prompts_but_not_the_text() -> None:
    tokenizer = TOKENIZERS["deepseek-r1"]
    said = [("user", "q", False), ("assistant", "hm\n</think>\n\nYes", True)]
    before = speak(tokenizer.chat_format(), said, tokenizer)
    shown = (
        "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>\nhm\n</think>\n\nYes<｜end▁of▁sentence｜>"
    )
    assert before.text() == shown
    branch = before.copy()
    branch.begin_role("user", tokenizer.chat_format())
    assert branch.text() == shown + "<｜User｜>"
    assert "".join(map(str, branch.prompt())) == (
        "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜>\n\nYes<｜end▁of▁sentence｜><｜User｜>"
    )
    assert branch.as_messages()[1]["content"] == "hm\n</think>\n\nYes"
    assert before.text() == shown
    assert any(isinstance(segment, tuple) for segment in before.prompt())


def test_text_before_the_first_role_takes_the_place_of_the_beginning() -> None:
    tokenizer = TOKENIZERS["llama-3"]
    transcript = Transcript()
    transcript.write("Notes.\n")
    transcript.begin_role("user", tokenizer.chat_format())
    assert transcript.text() == "Notes.\n<|start_header_id|>user<|end_header_id|>\n\n"


# -- formats by name -----------------------------------------------------------------------------------------------

NAMED = {
    "chatml": "chatml",
    "llama-2": "llama-2",
    "llama-3": "llama-3",
    "gemma": "gemma-3",
    "phi-3": "phi-3",
    "zephyr": "zephyr",
    "granite": "granite",
    "glm-4": "glm-4",
    "command-r": "command-r",
}
WORDS = st.sampled_from(["Hi", "two  words", "a\n\nb", "ü 你好", "1 + 1 = ?"])


@pytest.mark.parametrize("name", NAMED)
@settings(max_examples=20, deadline=None)
@given(texts=st.lists(WORDS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_named_formats_write_what_the_templates_of_their_families_do(name: str, texts: list[str]) -> None:
    roles = ["system", *["user", "assistant"] * 3]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    assert get_chat_template(name).render(messages) == TOKENIZERS[NAMED[name]].render_chat(messages)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "SYSTEM: s\nUSER: a\nASSISTANT: b\nUSER: c\nASSISTANT: "),
        ("mistral", "<s>[INST] s\n\na[/INST] b</s>[INST] c[/INST]"),
        ("vicuna", "s USER: a ASSISTANT: b</s>USER: c ASSISTANT: "),
        (
            "deepseek",
            "<｜begin▁of▁sentence｜>s<｜User｜>a<｜Assistant｜>b<｜end▁of▁sentence｜><｜User｜>c<｜Assistant｜>",
        ),
    ],
)
def test_other_named_formats(name: str, text: str) -> None:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, "sabc", strict=True)]
    assert get_chat_template(name).render(messages) == text


def test_every_named_format_was_tried() -> None:
    assert {*NAMED, "plain", "mistral", "vicuna", "deepseek"} == set(built_in())


def test_a_tokenizer_takes_a_named_format_in_place_of_its_template() -> None:
    form = find_chat_template("llama-2")
    tokenizer = Tokenizer(TOKENIZERS["chatml"].backend, eos_token_ids=[0], chat_template=form)
    assert tokenizer.chat_format() is form
    assert tokenizer.render_chat([{"role": "user", "content": " a "}]) == "<s>[INST] a [/INST]"
    with pytest.raises(InvalidRequestError, match=r"no role 'tool'; it has: system, user") as refused:
        tokenizer.render_chat([{"role": "tool", "content": "a"}])
    assert refused.value.field == "messages"


def test_a_tokenizer_takes_a_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(FAMILIES["gemma-2"][0], encoding="utf-8")
    assert find_chat_template(str(path)) == FAMILIES["gemma-2"][0]
    path.write_text("a\n{% if %}", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=r"own.jinja, line 2: Expected an expression"):
        find_chat_template(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        find_chat_template(str(path))
    with pytest.raises(
        InvalidRequestError, match=r"no such file, and 'chatm1' is not known .*'chatml'.*known: chatml, "
    ):
        find_chat_template("chatm1")


def test_the_format_survives_the_wire() -> None:
    for name, tokenizer in TOKENIZERS.items():
        form = tokenizer.chat_format()
        wire = json.loads(msgspec.json.encode({"model_path": name, "chat_format": form}))
        assert answers.model_info(wire, "http://x").chat_format == form


def test_a_template_with_the_date_is_taken_apart_anew_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        today_is = "01 Jan"

        @classmethod
        def now(cls, tz: object = None) -> Clock:  # noqa: ARG003
            return cls(2030, 1, 1 if cls.today_is == "01 Jan" else 2)

    monkeypatch.setattr(chat_template, "datetime", Clock)
    monkeypatch.setattr(tokenizer_module, "date", SimpleNamespace(today=lambda: Clock.today_is))
    source = "{{ strftime_now('%d %b') }}|" + FAMILIES["chatml"][0]
    tokenizer = byte_tokenizer(source, "", "<|im_end|>")
    for day in ("01 Jan", "02 Jan"):
        Clock.today_is = day
        messages = [{"role": "user", "content": "a"}]
        assert tokenizer.chat_format().render(messages) == tokenizer.render_chat(messages)
        assert tokenizer.chat_format().render(messages).startswith(f"{day}|")
    assert tokenizer.chat_format() is tokenizer.chat_format()
