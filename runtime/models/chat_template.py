"""Chat templates: messages to text by the model's own Jinja template, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from trellis.errors import InvalidRequestError
from trellis.runtime.models.template_sandbox import TemplateEnvironment

Messages = Sequence[Mapping[str, str]]

# For models without a template: the same words that the language uses where a backend has no format of its own.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


class ChatTemplate:
    """A compiled template. variables: what templates may refer to besides the messages (``bos_token``, ...)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self.variables = dict(variables)
        self._environment = _environment()
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Raises InvalidRequestError when the template refuses the messages (or is itself broken)."""
        try:
            if self._compiled is None:
                self._compiled = self._environment.from_string(self.source)
            self._environment.start()
            return self._compiled.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.variables,
            )
        except Exception as error:  # a template is a program: anything may come out of it
            reason = str(error) or type(error).__name__
            raise InvalidRequestError("messages", f"the model's chat template says: {reason}") from error


def check_template(source: str, name: str) -> None:
    """Raises InvalidRequestError for a source that is no Jinja; name: where it comes from."""
    try:
        _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError("chat_template", f"{name}, line {error.lineno}: {error.message}") from error


def _environment() -> TemplateEnvironment:
    environment = TemplateEnvironment({"tojson": _to_json})
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Not Jinja's own filter: that one escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
