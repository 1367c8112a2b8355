"""Values that only a run will have: what stands for them while a program is traced, and how a run computes them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from trellis.frontend.expressions import Appendable, Expr, ExprList, Gen, Select, Text, as_expr
from trellis.frontend.tracing.stop import Untraceable

_DEEPEST = 150
_SHOWN = 60  # characters of a constant that ``shown`` keeps


class Values(Protocol):
    """What one run knows."""

    def argument(self, name: str) -> Any: ...
    def reading(self, reading: Reading) -> Any: ...


class Symbol(Expr):
    """A value of the run. It can be appended, added, formatted, and asked for attributes, items and strings'
    methods; whatever needs the value itself (a length, a comparison, iteration) ends the trace."""

    depth = 1
    """How many symbols stand inside each other."""

    def __post_init__(self) -> None:
        depth = 1 + max((each.depth for each in self.inner() if isinstance(each, Symbol)), default=0)
        if depth > _DEEPEST:
            raise Untraceable(f"a symbolic value is nested more than {_DEEPEST} deep")
        object.__setattr__(self, "depth", depth)

    def inner(self) -> tuple[Any, ...]:
        """The values that this one is computed from."""
        return ()

    def evaluate(self, values: Values) -> Any:
        """The value in a run. Raises what computing it raises."""
        raise NotImplementedError

    def shown(self) -> str:
        """For people, e.g. ``{question}``."""
        raise NotImplementedError

    def __add__(self, other: Any) -> Any:
        return _plus(self, other)

    def __radd__(self, other: Any) -> Any:
        return _plus(other, self)


def _needs_the_value(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Symbol, *_: Any) -> NoReturn:
        raise Untraceable(f"{what} of {self.shown()} depends on its value")

    return refuse


_ARITHMETIC = [
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
    "matmul",
    "rsub",
    "rmul",
    "rtruediv",
    "rfloordiv",
    "rmod",
    "rpow",
    "rlshift",
    "rrshift",
    "rand",
    "ror",
    "rxor",
    "rmatmul",
    "neg",
    "pos",
    "invert",
    "abs",
    "round",
]
_REFUSED = {
    **dict.fromkeys(("bool",), "the truth"),
    **dict.fromkeys(("len", "length_hint"), "the length"),
    **dict.fromkeys(("iter", "next", "reversed"), "iteration"),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "contains", "hash"), "a comparison"),
    **dict.fromkeys(("int", "float", "index", "complex"), "the number"),
    **dict.fromkeys(("str", "repr", "format", "bytes"), "the text"),
    **dict.fromkeys(("call",), "a call"),
    **dict.fromkeys(_ARITHMETIC, "arithmetic"),
    **dict.fromkeys(("getitem", "setitem", "delitem"), "an item"),
    **dict.fromkeys(("enter", "exit"), "a with block"),
}
for _name, _what in _REFUSED.items():
    setattr(Symbol, f"__{_name}__", _needs_the_value(_what))


@dataclass(frozen=True, eq=False, repr=False)
class Argument(Symbol):
    """An argument of the program."""

    name: str

    def evaluate(self, values: Values) -> Any:
        return values.argument(self.name)

    def shown(self) -> str:
        return "{" + self.name + "}"


@dataclass(frozen=True, eq=False, repr=False)
class Reading(Symbol):
    """What the program read of a state. what: ``value`` | ``text`` | ``meta`` of the variable that key names, or
    ``whole`` (the state's text) or ``messages``, without a key. slot: the number of this reading; state: of which.
    branches: of so many branches it was joined, or so many samples it has, so that it is a list."""

    slot: int
    state: int
    key: str | Gen[Any] | Select | None
    what: str
    branches: int | None = None

    @property
    def of_state(self) -> bool:
        """It is of all that the state has said, not of one variable."""
        return self.key is None

    @property
    def name(self) -> str:
        """Of the variable, for people."""
        return self.key if isinstance(self.key, str) else (self.key and self.key.name) or ""

    def evaluate(self, values: Values) -> Any:
        return values.reading(self)

    def shown(self) -> str:
        if self.of_state:
            return "{s.messages()}" if self.what == "messages" else "{s.text()}"
        call = f's["{self.name}"]' if self.what == "value" else f's.{self.what}("{self.name}")'
        return "{" + call + "}"


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Symbol):
    """The parts, added from left to right."""

    parts: tuple[Any, ...]

    def inner(self) -> tuple[Any, ...]:
        return self.parts

    def evaluate(self, values: Values) -> Any:
        total = evaluate(self.parts[0], values)
        for part in self.parts[1:]:
            total = total + evaluate(part, values)
        return total

    def shown(self) -> str:
        return "".join(shown(part) for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class Formatted(Symbol):
    """An f-string: constant strings and fields."""

    parts: tuple[str | Field, ...]

    def inner(self) -> tuple[Any, ...]:
        return tuple(x for p in self.parts if isinstance(p, Field) for x in (p.value, p.spec))

    def evaluate(self, values: Values) -> str:
        return "".join(part if isinstance(part, str) else part.evaluate(values) for part in self.parts)

    def shown(self) -> str:
        return "".join(shown(part if isinstance(part, str) else part.value) for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class Field:
    """``{value!conversion:spec}``; conversion as in ``ast.FormattedValue`` (-1: none)."""

    value: Any
    conversion: int
    spec: Any

    def evaluate(self, values: Values) -> str:
        return format_field(evaluate(self.value, values), self.conversion, evaluate(self.spec, values))


@dataclass(frozen=True, eq=False, repr=False)
class Computed(Symbol):
    """A pure function of values: ``function(*args, **kwargs)``. label: how it is shown."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    label: str

    def inner(self) -> tuple[Any, ...]:
        return (*self.args, *self.kwargs.values())

    def evaluate(self, values: Values) -> Any:
        return self.function(*evaluate(self.args, values), **evaluate(dict(self.kwargs), values))

    def shown(self) -> str:
        return "{" + self.label + "}"


@dataclass(frozen=True, eq=False, repr=False)
class Deferred(Expr):
    """An expression whose arguments are symbolic: ``gen("x", max_tokens=n)``. A run builds it."""

    function: Callable[..., Appendable]
    name: str | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def inner(self) -> tuple[Any, ...]:
        return (*self.args, *self.kwargs.values())

    def evaluate(self, values: Values) -> Appendable:
        return self.function(*evaluate(self.args, values), **evaluate(dict(self.kwargs), values))

    def shown(self) -> str:
        listed = [*map(shown, self.args), *(f"{name}={shown(value)}" for name, value in self.kwargs.items())]
        return f"{self.function.__name__}({', '.join(listed)})"


def formatted(parts: Sequence[str | Field]) -> Formatted:
    """An f-string. What is not symbolic is formatted now, and an f-string that stands in it as a plain field is taken
    apart, so that texts that grow do not get deep."""
    flat: list[str | Field] = []
    for part in parts:
        if isinstance(part, str):
            flat.append(part)
        elif not is_symbolic((part.value, part.spec)):
            flat.append(format_field(part.value, part.conversion, part.spec))
        elif isinstance(part.value, Formatted) and part.conversion < 0 and part.spec == "":
            flat.extend(part.value.parts)
        else:
            flat.append(Field(frozen(part.value), part.conversion, part.spec))
    return Formatted(tuple(flat))


def attribute(value: Symbol, name: str) -> Symbol:
    return Computed(getattr, (value, name), {}, f"{inside(value)}.{name}")


def item(value: Symbol, key: Any) -> Symbol:
    return Computed(operator.getitem, (value, key), {}, f"{inside(value)}[{_key(key)}]")


def method(value: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Symbol:
    """``value.name(*args)``, called once in the run."""

    def call(receiver: Any, *given: Any, **named: Any) -> Any:
        return getattr(receiver, name)(*given, **named)

    return Computed(call, (value, *frozen(args)), frozen(dict(kwargs)), f"{inside(value)}.{name}(...)")


def applied(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Symbol:
    return Computed(
        function, frozen(args), frozen(dict(kwargs)), f"{function.__name__}({', '.join(map(inside, args))})"
    )


def format_field(value: Any, conversion: int, spec: str) -> str:
    if conversion == ord("s"):
        value = str(value)
    elif conversion == ord("r"):
        value = repr(value)
    elif conversion == ord("a"):
        value = ascii(value)
    return format(value, spec)


def evaluate(value: Any, values: Values) -> Any:
    """The value in a run: symbols are computed, also inside lists, tuples, dicts and sets, which are copied."""
    if isinstance(value, (Symbol, Deferred)):
        return value.evaluate(values)
    if type(value) is list:
        return [evaluate(each, values) for each in value]
    if type(value) is tuple:
        return tuple(evaluate(each, values) for each in value)
    if type(value) is set:
        return set(value)
    if type(value) is dict:
        return {key: evaluate(each, values) for key, each in value.items()}
    if isinstance(value, ExprList):
        return ExprList(tuple(leaf for e in value.items for leaf in as_expr(evaluate(e, values)).leaves()))
    return value


def frozen(value: Any) -> Any:
    """A copy of lists, tuples, dicts and sets, which the program may change later."""
    if type(value) in (list, tuple, set):
        return type(value)(frozen(each) for each in value)
    if type(value) is dict:
        return {key: frozen(each) for key, each in value.items()}
    return value


def symbols_of(value: Any) -> Iterator[Symbol | Deferred]:
    """Every symbol that a value holds or is computed from; one that is reached twice comes once."""
    seen: set[int] = set()
    found = [value]
    while found:
        one = found.pop()
        if isinstance(one, (Symbol, Deferred)):
            if id(one) in seen:
                continue
            seen.add(id(one))
            yield one
            found.extend(one.inner())
        elif isinstance(one, (list, tuple, set, frozenset)):
            found.extend(one)
        elif isinstance(one, dict):
            found.extend(one.values())
        elif isinstance(one, ExprList):
            found.extend(one.items)


def is_symbolic(value: Any) -> bool:
    return next(symbols_of(value), None) is not None


def is_text(value: Any) -> bool:
    """Whether a value is certainly a string, or makes whoever computes it fail."""
    if isinstance(value, Sum):
        return is_text(value.parts[0])
    if isinstance(value, Computed):
        return value.function in (str, repr, format)
    return isinstance(value, (str, Formatted))


def shown(value: Any) -> str:
    """A value as people see it in a graph."""
    if isinstance(value, (Symbol, Deferred)):
        return value.shown()
    if isinstance(value, Text):
        return value.text
    if isinstance(value, str):
        return value
    if type(value) in (list, tuple) and is_symbolic(value):
        return f"[{', '.join(map(inside, value))}]"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def inside(value: Any) -> str:
    """``shown``, to stand inside the braces of another symbol."""
    if isinstance(value, (Argument, Reading, Computed)):
        return value.shown()[1:-1]
    return f"f{shown(value)!r}" if isinstance(value, Symbol) else _key(value)


def _key(value: Any) -> str:
    return shown(value) if is_symbolic(value) else shown(repr(value))


def _plus(left: Any, right: Any) -> Any:
    """``left + right`` where one of them is a symbol."""
    if any(isinstance(side, Expr) and not isinstance(side, Symbol) for side in (left, right)):
        items = [e.items if isinstance(e, ExprList) else (e,) for e in (as_expr(left), as_expr(right))]
        return ExprList((*items[0], *items[1]))
    before = left.parts if isinstance(left, Sum) else (frozen(left),)
    return Sum((*before, frozen(right)))
