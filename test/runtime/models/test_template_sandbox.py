"""Chat templates are programs from somewhere: what they may reach and use is bounded, what they commonly do is not."""

from __future__ import annotations

import re

import pytest

from trellis.errors import InvalidRequestError
from trellis.runtime.models import chat_format, template_sandbox
from trellis.runtime.models.chat_format import derive_chat_format
from trellis.runtime.models.chat_template import ChatTemplate

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDLESS = "{% set x = range(100000) %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}%s{% endfor %}{{ n.x }}"


def render(source: str, content: str = "hello") -> str:
    return ChatTemplate(source, {"bos_token": ""}).render([{"role": "user", "content": content}], True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__init__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_nothing_behind_the_values_can_be_reached(source: str) -> None:
    try:
        text = render(source)
    except InvalidRequestError as error:
        text = error.reason.removeprefix("the model's chat template says: ")
    assert re.search("^$|is unsafe|no loader|denied", text)


@pytest.mark.parametrize(
    "source",
    [ENDLESS, "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}"],
)
def test_a_template_that_does_not_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.05)
    with pytest.raises(InvalidRequestError, match="takes more than"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ ([0] * 10000000000) | length }}",
        "{{ 9 ** 9999999 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=9999999999) }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ 'x' | batch(9999999999, 'y') | list }}",
        "{{ messages | tojson(indent=9999999999) }}",
        "{% set x = 'a' * 5000000 %}{{ ([x] * 100000) | join }}",
        "{% set x = 'a' * 5000000 %}{{ x.join(['a'] * 100000) }}",
        "{% set x = 'a' * 5000000 %}{{ x | replace('a', x) }}",
        DOUBLING.replace("%s", "{% set n.x = n.x ~ n.x %}"),
        DOUBLING.replace("%s", "{% set n.x = n.x + n.x %}"),
        DOUBLING.replace("%s", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
        DOUBLING.replace("%s", "{% set n.x = [n.x, n.x] %}"),
        DOUBLING.replace("%s", "{% set n.x = [n.x, n.x] %}").replace("{{ n.x }}", "{{ n.x | tojson }}"),
    ],
)
def test_a_template_cannot_fill_the_memory(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"more than|that is an argument"):
        render(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '**%s** %5d' % (messages[0].role, 7) }}", "**user**     7"),
        ("{{ messages[0].content.split('</think>')[-1] | length }}", "400000"),
        ("{{ messages[0].content | replace('<|im_end|>', '') | default('none') | length }}", "400000"),
        ("{{ messages[0].content.startswith('<tool_response>') }}", "False"),
        ("{{ ['a', 'b'] | join(', ') ~ 1 ~ none }}", "a, b1None"),
        ("{{ (messages[0].content ~ 'x') | length }}", "400001"),
        ("{% for m in messages %}{% set x = m %}{{ loop.index }}{% endfor %}", "1"),
        ("{{ {'a': [1]} | tojson }}", '{"a": [1]}'),
    ],
)
def test_what_templates_do_is_left_alone(source: str, expected: str) -> None:
    assert render(source, "z" * 400_000) == expected


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (ENDLESS + PLAIN, "takes more than"),
        ("{% if messages[-1].role == 'assistant' %}" + ENDLESS + "{% endif %}" + PLAIN, "takes more than"),
        ("{{ 'x' * 8000000 }}" + PLAIN, "writes 80000.. characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_format_that_costs_too_much_to_derive_is_a_problem_with_a_reason(
    source: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.05)
    monkeypatch.setattr(chat_format, "SECONDS", 1.0)
    form = derive_chat_format(ChatTemplate(source, {"bos_token": ""}), "")
    assert not form.exact
    with pytest.raises(InvalidRequestError, match=problem):
        form.render([{"role": "user", "content": "x"}])
