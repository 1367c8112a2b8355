"""Chat templates as roles' prefixes and suffixes: for every family, the pieces rebuild what the template renders."""

from __future__ import annotations

import itertools

import pytest

from trellis.chat_format import ChatFormat
from trellis.errors import InvalidRequestError
from trellis.runtime.models.chat_format import derive_chat_format
from trellis.runtime.models.chat_template import PLAIN_TEMPLATE, ChatTemplate

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '<|end|>\n\n' + (message['content'] | trim) + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{{ (first if loop.first else '') + message['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
THINKING = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
EXACT = {"chatml": CHATML, "llama3": LLAMA3, "glm": GLM, "plain": PLAIN_TEMPLATE}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def derive(source: str) -> ChatFormat:
    return derive_chat_format(template(source), "<s>")


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("name", EXACT)
def test_pieces_rebuild_every_conversation(name):
    form = derive(EXACT[name])
    assert form.exact
    texts = ["What now?", "Two\nlines", "ünïcode 你好", "<b>&\"'"]
    for n in (1, 2, 3):
        for roles in itertools.product(("system", "user", "assistant"), repeat=n):
            if "system" in roles[1:]:
                continue
            messages = [message(role, texts[i]) for i, role in enumerate(roles)]
            for prompt in (True, False):
                assert form.render(messages, prompt) == template(EXACT[name]).render(messages, prompt)


def test_pieces_of_chatml():
    form = derive(CHATML)
    assert form.roles["user"] == ("<|im_start|>user\n", "<|im_end|>\n")
    assert form.roles["assistant"] == ("<|im_start|>assistant\n", "<|im_end|>\n")
    assert form.roles["system"] == ("<|im_start|>system\n", "<|im_end|>\n")
    assert form.default_system == "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert form.begin == ""


def test_bos_is_the_beginning():
    form = derive(LLAMA3)
    assert form.begin == "<s>"
    assert form.default_system == ""
    assert form.roles["user"] == ("<|start|>user<|end|>\n\n", "<|eot|>")


def test_bos_that_opens_every_turn_belongs_to_the_turns():
    form = derive_chat_format(template(CHATML), "<|im_start|>")
    assert form == derive(CHATML)


def test_mistral_has_no_system_role():
    form = derive(MISTRAL)
    assert form.exact
    assert "system" not in form.roles
    with pytest.raises(InvalidRequestError, match="no role 'system'"):
        form.render([message("system", "a"), message("user", "b")])
    assert form.begin == "<s>"
    assert form.roles["user"] == ("[INST] ", " [/INST]")
    assert form.roles["assistant"] == (" ", "</s>")
    conversation = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    assert form.render(conversation, False) == template(MISTRAL).render(conversation, False)


def test_system_folded_into_the_user_turn():
    form = derive(GEMMA)
    assert form.exact
    assert form.roles["user"] == ("<turn>user\n", "<end>\n")
    assert form.roles["assistant"] == ("<turn>model\n", "<end>\n")
    conversation = [
        message("system", "s"),
        message("user", "a"),
        message("assistant", "b"),
        message("user", "c"),
    ]
    assert form.render(conversation) == template(GEMMA).render(conversation, True)
    assert form.render(conversation[:2]) == "<s><turn>user\ns\n\na<end>\n<turn>model\n"
    for start in (0, 1):
        with pytest.raises(InvalidRequestError, match=r"no 'user' after 'user': .*roles must alternate"):
            form.render([*conversation[start:2], message("user", "again")])


def test_generation_prompt_decides_how_the_assistant_begins():
    form = derive(THINKING)
    assert form.exact
    assert (
        form.roles["assistant"][0] == "<|im_start|>assistant\n"
    )  # in the history the template leaves the rest out
    assert form.render([message("user", "a")]) == template(THINKING).render([message("user", "a")], True)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ raise_exception('never') }}",
        "{{ 1 / 0 }}",
        "no messages at all",
        "{{ messages[7].x.y }}",
    ],
)
def test_hopeless_templates_say_why_they_are(source):
    form = derive(source)
    assert not form.exact
    assert form.problem.startswith("the model's chat template cannot be used: ")
    with pytest.raises(InvalidRequestError, match=r"cannot be used: .*name another one with chat_template="):
        form.render([message("user", "a")])


def test_refusals_reach_the_client():
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template(GEMMA).render([message("user", "a"), message("user", "b")], True)
    assert caught.value.field == "messages"


def test_templates_run_in_a_sandbox():
    with pytest.raises(InvalidRequestError, match="unsafe"):
        template("{{ messages.__class__.__mro__ }}").render([message("user", "a")], True)


def test_helpers_of_templates():
    source = "{{ {'a': '<é>'} | tojson }}|{{ strftime_now('%Y') | length }}"
    assert template(source).render([message("user", "a")], True) == '{"a": "<é>"}|4'


def test_a_template_that_is_no_sequence_of_messages_is_not_exact():
    numbered = "{% for m in messages %}[{{ loop.index }}] {{ m.role }}: {{ m.content }}\n{% endfor %}"
    shouting = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper | replace('M0RK', 'M0rk') }}\n{% endfor %}"
    )
    counting = "{{ messages | length }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert not derive(numbered).exact
    assert not derive(shouting).exact
    assert "earlier messages in another way" in str(derive(counting).graph)
