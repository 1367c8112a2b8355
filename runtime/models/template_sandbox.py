"""The sandbox that chat templates run in: a template comes with a model from somewhere, and is a program.

Jinja's own sandbox keeps it from everything but values and their harmless methods. This one also bounds what it may
use: the processor's time, the text that it writes, and the size of the values that it makes on the way.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SECONDS = 2.0  # of processor time for one conversation
MAX_SIZE = 8 << 20  # characters or elements of one value
MAX_ELEMENTS = 200_000  # of a list or object that is spelled out, with all that is inside
MAX_WRITTEN = 64 << 20  # characters of one conversation, those of macros and {% set %} blocks included
MAX_BITS = 1 << 16  # of an integer
_TICKS_PER_CLOCK = 32
_SPELLING = ("tojson", "string", "join", "pprint", "urlencode", "escape", "e", "forceescape", "safe")
# Filters, and methods of texts, that make more of a value than it was.
_GROWING = frozenset(
    [
        "replace",
        "join",
        "center",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "format",
        "format_map",
        "translate",
        "indent",
        "batch",
        "slice",
        "round",
        "tojson",
    ]
)
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*[0-9]{6}")
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*([0-9]*\.)?(\*|[0-9]{6})")


class TemplateLimit(jinja2.TemplateRuntimeError):
    """The template would use more than it may."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """filters: besides Jinja's own. Renderings in several threads at once have a budget each: begin each with ``start``."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.globals.pop("lipsum")  # as much text as one asks for
        self.filters.pop("wordwrap")  # takes the square of a long word
        self.filters.update(filters)
        self.filters = {name: _bounded(name, made) for name, made in self.filters.items()}
        self._used = threading.local()

    def start(self) -> None:
        """The rendering that begins now in this thread has a whole budget."""
        used = self._used
        used.deadline, used.ticks, used.written = time.thread_time() + SECONDS, 0, 0

    def tick(self) -> None:
        """Once a turn of a loop and once a call."""
        used = self._used
        used.ticks = getattr(used, "ticks", 0) + 1
        if used.ticks % _TICKS_PER_CLOCK == 0 and time.thread_time() > getattr(used, "deadline", 0.0):
            raise TemplateLimit(f"it takes more than {SECONDS:g} s for this conversation")

    def written(self, value: Any) -> Any:
        """Every value on its way into text."""
        self._used.written = getattr(self._used, "written", 0) + _spelled(value)
        if self._used.written > MAX_WRITTEN:
            raise TemplateLimit(f"it writes more than {MAX_WRITTEN} characters")
        return value

    def joined(self, *values: Any) -> str:
        """What ``~`` means."""
        _check_size(sum(map(_spelled, values)))
        return "".join(map(str, values))

    def call(self, context: Context, callee: Any, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        owner = getattr(callee, "__self__", None)
        if isinstance(owner, (str, bytes)):
            _check_growth(getattr(callee, "__name__", ""), owner, args, kwargs)
        return super().call(context, callee, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as the sandbox has it."""
        form = super().wrap_str_format(value)
        if form is None:
            return None
        safe, owner = form, value.__self__

        @wraps(safe)
        def checked(*args: Any, **kwargs: Any) -> str:
            _check_growth("format", owner, args, kwargs)
            return safe(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        watched: nodes.Template = _Watched(self).visit(tree)
        return watched


class _Watched(NodeTransformer):
    """Puts the budget's checks into a template's syntax tree."""

    def __init__(self, environment: TemplateEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call(node, "tick", [])).set_lineno(node.lineno, True))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call(node, "joined", node.nodes)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            each if isinstance(each, nodes.TemplateData) else self._call(node, "written", [each])
            for each in node.nodes
        ]
        return node

    def _call(self, node: nodes.Node, name: str, arguments: list[nodes.Expr]) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
        call.set_lineno(node.lineno, True).set_environment(self._environment)
        return call


def _bounded(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses to make something huge of its value and arguments."""
    skipped = 1 if hasattr(made, "jinja_pass_arg") else 0  # the context, or the like

    @wraps(made)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if len(given) > skipped:
            value = given[skipped]
            if isinstance(value, Iterator):  # its elements count, so it has to be a list
                given[skipped] = value = list(value)
            if name in _SPELLING:
                _check_size(_spelled(value))
            _check_growth(name, value, given[skipped + 1 :], kwargs)
        return made(*given, **kwargs)

    return checked


def _check_growth(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """What a filter or method makes of a value: at most that every character or element takes up an argument."""
    if name not in _GROWING:
        return
    if name == "replace" and isinstance(value, str) and len(args) > 1 and args[0]:
        _check_size(len(value) + value.count(str(args[0])) * _factor(args[1]))
        return
    _check_size(_size(value) * max(map(_factor, [*args, *kwargs.values()]), default=1))
    if name == "format" and isinstance(value, str):
        _check_widths(value)


def _check_widths(text: str) -> None:
    if _WIDE_FORMAT.search(text) or _WIDE_PERCENT.search(text):
        raise TemplateLimit("a format with a width of more than 5 digits, or that is an argument")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, (str, bytes)):
        _check_widths(left if isinstance(left, str) else left.decode("latin-1"))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
        if operator in ("*", "**") and bits > MAX_BITS:
            raise TemplateLimit(f"an integer of more than {MAX_BITS} bits")
    elif operator == "+":
        _check_size(_size(left) + _size(right))
    elif operator == "*":
        _check_size(_size(left) * _factor(right))
        _check_size(_size(right) * _factor(left))


def _size(value: Any) -> int:
    """Characters of a text, elements of anything else."""
    return len(value) if hasattr(value, "__len__") else 1


def _spelled(value: Any) -> int:
    """About how many characters spell a value; raises if they are too many. Counts as long as it takes to know: a list
    that holds another twice, which holds another twice, and so on, is small and has no end."""
    if isinstance(value, str):
        return len(value)
    size, elements, rest = 0, 0, [value]
    while rest:
        each = rest.pop()
        if isinstance(each, Namespace):
            each = each._Namespace__attrs
        if isinstance(each, dict):
            rest += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            rest += each
        size += len(each) if isinstance(each, str) else 1
        elements += 1
        if size > MAX_SIZE or elements + len(rest) > MAX_ELEMENTS:
            raise TemplateLimit(f"a value that takes more than {MAX_SIZE} characters to write")
    return size


def _factor(value: Any) -> int:
    if isinstance(value, int):
        return max(int(value), 1)
    return max(len(value), 1) if isinstance(value, (str, bytes, list, tuple)) else 1


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimit(f"a value of more than {MAX_SIZE} characters or elements")
