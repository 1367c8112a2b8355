"""What a program may append to its state: text, gens, selects, roles, and sequences of these. All immutable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, overload

from trellis.errors import InvalidRequestError
from trellis.frontend.backends.base import Constraint
from trellis.frontend.choices import ChoiceMethod, choice_method
from trellis.frontend.constraints import check_options, constrained
from trellis.frontend.parameters import (
    check_flag,
    check_logprobs,
    check_samples,
    check_sampling,
    check_timeout,
)
from trellis.frontend.schemas import Reader
from trellis.frontend.suggest import suggests

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trellis.frontend.gen_options import GenOptions, Several, TextOptions

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Expr:
    """Base of all expressions. ``a + b`` is the sequence of both; either side may be a plain string.

    It has no ``str()``: what the model will write is not known yet, and text about it would silently become part of
    the prompt.
    """

    __slots__ = ()

    def __str__(self) -> str:
        raise TypeError(
            "an expression cannot stand inside an f-string; append it with +: f'...' + gen('x') "
            "(repr() shows what it is)"
        )

    def __format__(self, _spec: str) -> str:
        return str(self)

    def __add__(self, other: Appendable) -> ExprList:
        return _sequence(self, as_expr(other))

    def __radd__(self, other: Appendable) -> ExprList:
        return _sequence(as_expr(other), self)

    def leaves(self) -> Iterator[Expr]:
        """The expressions to run, in order."""
        yield self


Appendable: TypeAlias = str | Expr | Sequence[Any]


@dataclass(frozen=True)
class Text(Expr):
    text: str


@dataclass(frozen=True)
class ExprList(Expr):
    items: tuple[Expr, ...]

    def leaves(self) -> Iterator[Expr]:
        for item in self.items:
            yield from item.leaves()


def _sequence(left: Expr, right: Expr) -> ExprList:
    """Flat, so that a long sum of expressions is not a deep tree."""
    before = left.items if isinstance(left, ExprList) else (left,)
    return ExprList(before + (right.items if isinstance(right, ExprList) else (right,)))


@dataclass(frozen=True)
class Gen(Expr, Generic[T_co]):
    """What ``gen`` makes; T is the type of its value: ``state[this]`` is a T.

    sampling: only what this gen sets itself, by ``SamplingOptions`` field; the rest comes from ``run``.
    read: text → value of a gen with a schema or type; None: the value is the text. stops: strings that end the value,
    besides the stop strings. n: samples; more than 1 make each of value, text and meta a list.
    """

    name: str | None
    sampling: tuple[tuple[str, Any], ...]
    constraint: Constraint | None
    return_logprob: bool | None
    top_logprobs_num: int | None
    timeout: float | None
    read: Reader | None = None
    token_healing: bool | None = None
    stops: tuple[str, ...] = ()
    n: int = 1


@dataclass(frozen=True)
class Select(Expr):
    name: str | None
    choices: tuple[str, ...]
    method: ChoiceMethod
    temperature: float
    seed: int | None
    timeout: float | None


@dataclass(frozen=True)
class RoleBegin(Expr):
    role: str


@dataclass(frozen=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True)
class ScopeBegin(Expr):
    """What is said up to its ``ScopeEnd`` becomes the variable ``name``."""

    name: str


@dataclass(frozen=True)
class ScopeEnd(Expr):
    name: str


def as_expr(value: Appendable) -> Expr:
    """A string, an expression, or a list of these. TypeError otherwise."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, (list, tuple)):
        return ExprList(tuple(as_expr(item) for item in value))
    raise TypeError(
        f"cannot append {value!r} ({type(value).__name__}): append a string, gen(...), select(...), a role, "
        "or a list of these"
    )


@overload
def gen(
    name: str | None = None, *, type: type[T], n: Literal[1] | None = None, **options: Unpack[GenOptions]
) -> Gen[T]: ...
@overload
def gen(
    name: str | None = None, *, type: type[T], n: Several, **options: Unpack[GenOptions]
) -> Gen[list[T]]: ...
@overload
def gen(
    name: str | None = None, *, schema: type[T], n: Literal[1] | None = None, **options: Unpack[GenOptions]
) -> Gen[T]: ...
@overload
def gen(
    name: str | None = None, *, schema: type[T], n: Several, **options: Unpack[GenOptions]
) -> Gen[list[T]]: ...
@overload
def gen(
    name: str | None = None, *, n: Literal[1] | None = None, **options: Unpack[TextOptions]
) -> Gen[str]: ...
@overload
def gen(name: str | None = None, *, n: Several, **options: Unpack[TextOptions]) -> Gen[list[str]]: ...
@overload
def gen(
    name: str | None = None,
    *,
    type: Any = None,
    schema: Any = None,
    n: int | None = None,
    **options: Unpack[TextOptions],
) -> Gen[Any]: ...
@suggests
def gen(
    name: str | None = None,
    *,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    ignore_eos: bool | None = None,
    n: int | None = None,
    type: Any = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    schema: Any = None,
    grammar: str | None = None,
    json_spacing: str | None = None,
    strict: bool | None = None,
    logprobs: bool | int | None = None,
    return_logprob: bool | None = None,
    top_logprobs_num: int | None = None,
    token_healing: bool | None = None,
    timeout: float | None = None,
) -> Gen[Any]:
    """Let the model write, and keep what it wrote in the variable ``name``.

    Every argument that is None is inherited from ``run``. The text ends at max_tokens, at an end-of-text token
    (unless ignore_eos), at a stop string or the match of a stop_regex (both are cut off) or a stop token, or when
    the constraint is complete.

    max_tokens, min_tokens: bounds on the tokens of the output (128 and 0 unless ``run`` says otherwise).
    temperature: 0 is greedy. top_p, top_k (-1 is off), min_p: cut the tail of the distribution.
    stop_regex: a pattern, or several; the first match to be complete ends the text (the longest, if several end
        there). No look-around or anchors, at most 256 bytes, and not what matches the empty text.
    frequency_penalty, presence_penalty: -2 to 2, on output tokens. repetition_penalty: above 0, 1 is off.
    logit_bias: token id → what is added to its logit, -100 to 100, after the constraint's mask.
    seed: the same seed gives the same text, in any batch.
    n: so many samples, which share the prompt. With more than one, ``state[name]``, ``state.text(name)`` and
        ``state.meta(name)`` are lists of n, ``state.text_iter(name, sample=i)`` streams one, and the state's text goes
        on with the first. (To go on from each of them, ``fork`` instead.)
    type: the value's type. int, float, bool, str, date, time, datetime, an Enum or a Literal are written bare: ``24``,
        ``red``, ``2024-02-29``; any other type as JSON, as with schema. ``state[name]`` is then of that type. A number
        ends at a blank or the end of the text; it has at most 18 digits before the point and 17 after.
    regex: the whole text matches it, as ``re.fullmatch`` understands it.
    choices: the text is one of these, decoded token by token; ``select`` compares whole options instead.
    schema: the text is JSON of this schema: a dict, JSON text, or a Python type (pydantic model, dataclass,
        TypedDict, Enum, Literal, int, list[str], ``str | None`` ...). ``state[name]`` is then the value, an
        instance of the type or what ``json.loads`` gives, and ``state.text(name)`` the text. A keyword that
        cannot be enforced is an error.
    json_spacing: blanks in the JSON: ``spaced`` (``", "`` and ``": "``, unless said otherwise), ``compact``
        (none), ``any`` (where the model puts them, up to 8 in a row).
    strict: False takes schemas that cannot be enforced in full; ``state.meta(name)`` says what was only
        validated in the finished text (``validated_only``), and if that failed (``constraint_warnings``).
    grammar: the text is of this context-free grammar, in Lark (or GBNF, where the server has it).
    logprobs: True puts the log-probability of each output token in ``state.meta(name)``, a number that of so many
        alternatives, too. (return_logprob and top_logprobs_num are the same, apart.)
    token_healing: text appended just before, if it ends where a longer token could stand (``http:``, where the
        model would write ``://`` as one), is written again in the model's own spelling: on unless ``run`` says
        otherwise. The state's text is the same either way; False goes on after the tokens that the text has.
    timeout: seconds for this gen; the program fails with TimeoutError when they are over.

    Raises InvalidRequestError or ConstraintError at once when an argument is wrong.
    """
    given = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "stop": stop,
        "stop_regex": stop_regex,
        "stop_token_ids": stop_token_ids,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "logit_bias": logit_bias,
        "seed": seed,
        "ignore_eos": ignore_eos,
    }
    limits = constrained(regex, choices, schema, grammar, type, json_spacing, strict)
    logprob, top = check_logprobs("gen", logprobs, return_logprob, top_logprobs_num)
    return Gen(
        name=_check_name("gen", name),
        sampling=tuple(check_sampling("gen", given).items()),
        constraint=limits.constraint,
        read=limits.read,
        return_logprob=logprob,
        top_logprobs_num=top,
        token_healing=check_flag("gen.token_healing", token_healing),
        timeout=check_timeout("gen", timeout),
        stops=limits.stops,
        n=check_samples("gen.n", n),
    )


@suggests
def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    *,
    method: str | ChoiceMethod = "mean",
    temperature: float = 0.0,
    seed: int | None = None,
    timeout: float | None = None,
) -> Select:
    """Score every option as a continuation of the text so far, and append the best, verbatim.

    method: ``mean`` of the option's token log-probabilities (favours long options with predictable tails),
        ``sum`` (the probability of the whole option; favours short ones), ``greedy`` (token by token),
        ``unconditional`` (what the prompt adds to the log-probabilities that the option has without it, so that
        options are not favoured for being common; the most work, as all options are scored twice), ``exact`` (the
        probability that the model would write this option if it could only write options; they add up to 1), or
        a ``ChoiceMethod`` of your own.
    temperature: 0 takes the best; above 0 draws from the probabilities that ``state.meta(name)`` shows, softmax of
        scores / temperature. seed makes the draw repeatable.

    Raises InvalidRequestError at once for no options, an empty option or one that comes twice.
    """
    chosen = choice_method(method)
    heat = check_sampling("select", {"temperature": temperature, "seed": seed})
    if heat.get("temperature", 0.0) > 0 and not chosen.samples:
        raise InvalidRequestError("select.temperature", f"method {chosen.name!r} takes no temperature; use 0")
    return Select(
        name=_check_name("select", name),
        choices=check_options("select.choices", choices),
        method=chosen,
        temperature=heat.get("temperature", 0.0),
        seed=heat.get("seed"),
        timeout=check_timeout("select", timeout),
    )


def role(name: str, expr: Appendable) -> ExprList:
    """A message of the role ``name``. Text around its content is what the model's chat template writes."""
    content = as_expr(expr)
    for leaf in content.leaves():
        if isinstance(leaf, (RoleBegin, RoleEnd)):
            raise InvalidRequestError(
                name,
                f"roles cannot be nested: {leaf.role!r} stands inside {name!r}; append one after the other",
            )
    return ExprList((RoleBegin(name), content, RoleEnd(name)))


def system(expr: Appendable) -> ExprList:
    """A system message."""
    return role("system", expr)


def user(expr: Appendable) -> ExprList:
    """A user message."""
    return role("user", expr)


def assistant(expr: Appendable) -> ExprList:
    """An assistant message; usually holds a gen."""
    return role("assistant", expr)


def system_begin() -> RoleBegin:
    return RoleBegin("system")


def system_end() -> RoleEnd:
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    return RoleBegin("user")


def user_end() -> RoleEnd:
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    return RoleEnd("assistant")


def _check_name(owner: str, name: Any) -> str | None:
    if name is None or (isinstance(name, str) and name):
        return name
    hint = f"; the name comes first: {owner}(name, choices)" if isinstance(name, (list, tuple)) else ""
    raise InvalidRequestError(f"{owner}.name", f"must be a non-empty string or None, got {name!r:.100}{hint}")
