"""Python regular expressions to the syntax tree, by way of Python's own parser.

The meaning is that of ``re.fullmatch``: ``.`` excludes the newline, ``\\d \\w \\s`` are Unicode, lazy
quantifiers match what greedy ones do. What is not regular, or not supported, is refused by name.

Anchors are resolved in the tree where that is easy. Where it is not, and in patterns with look-around, they are
assertions like any other (see ``assertions``), and the tree is one for ``look_states``.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from trellis.errors import ConstraintError
from trellis.fsm import anchors, assertions, atomic, scan
from trellis.fsm.assertions import settle
from trellis.fsm.charset import (
    EVERYTHING,
    Ranges,
    category,
    complement,
    ignore_case,
    normalize,
    single,
    union,
)
from trellis.fsm.limits import Budget, Limits
from trellis.fsm.syntax import INF, Builder, MarkKind, Node

_NEWLINE = single(10)
# Characters in classes under IGNORECASE: Python's compiler looks at every one of them.
_CASE_WORK = 4 * 0x110000

_NOT_REGULAR = {
    "GROUPREF": ("back-reference", r"\\[1-9]|\(\?P="),
    "GROUPREF_EXISTS": ("conditional group", r"\(\?\("),
    "GROUPREF_IGNORE": ("back-reference", r"\\[1-9]|\(\?P="),
}
_MARKS: dict[str, tuple[MarkKind, MarkKind]] = {  # without and with MULTILINE
    "AT_BEGINNING": ("begin", "line_begin"),
    "AT_BEGINNING_STRING": ("begin", "begin"),
    "AT_END": ("text_end", "line_end"),
    "AT_END_STRING": ("end", "end"),
}
# Whether these are supported depends on what stands around them.
_CONTEXTUAL = frozenset({"ATOMIC_GROUP", "POSSESSIVE_REPEAT"})
_LOOKS = frozenset({"ASSERT", "ASSERT_NOT"})
_BOUNDARIES = frozenset({"AT_BOUNDARY", "AT_NON_BOUNDARY"})


def refuse(code: str, where: int | str, reason: str) -> ConstraintError:
    place = f"position {where}" if isinstance(where, int) else where
    return ConstraintError("regex", code, place, reason)


@lru_cache(maxsize=1)
def _parser() -> Any:
    return importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


class Regex:
    """A pattern that Python accepts and that is small enough; ``tree`` gives its syntax tree.

    Raises ConstraintError: ``limit`` for its size, ``syntax`` if Python refuses it, ``unsupported``.
    has_assertions: are there anchors, word boundaries or look-around in it?
    """

    def __init__(self, pattern: str, limits: Limits) -> None:
        self.pattern = pattern
        self._limits = limits
        nbytes = len(pattern.encode("utf-8", "surrogatepass"))
        if nbytes > limits.pattern_bytes:
            raise refuse(
                "limit", "", f"the pattern has {nbytes} bytes; at most {limits.pattern_bytes} are allowed"
            )
        depth = scan.nesting(pattern)
        if depth > limits.nesting:
            raise refuse("limit", "", f"groups are nested {depth} deep; at most {limits.nesting} are allowed")
        try:
            self._parsed = _parser().parse(pattern)
            self.flags = int(self._parsed.state.flags)
            _check_case_work(self._parsed, self.flags)
            re.compile(pattern)
        except re.error as error:
            where = f"position {error.pos}" if error.pos is not None else ""
            raise refuse("syntax", where, f"not a valid regex: {error.msg}") from error
        except (OverflowError, ValueError) as error:  # the bounds of a repeat: too large, or too many digits
            reason = str(error).partition(";")[0]
            raise refuse("limit", "", f"not a valid regex: {reason}") from error
        except RecursionError as error:
            raise refuse("limit", "", "the pattern is nested too deeply") from error

        operators = list(_operators(self._parsed))
        self._looks = any(op in _LOOKS or (op == "AT" and arg.name in _BOUNDARIES) for op, arg in operators)
        self.has_assertions = self._looks or any(op == "AT" for op, _ in operators)
        self._misplaced: anchors.MisplacedAnchor | None = None
        if self.has_assertions and not self._looks:
            self._try_anchors()
        if any(op in _CONTEXTUAL or op in _NOT_REGULAR for op, _ in operators):
            # Whether it is supported must not depend on what a vocabulary can write.
            self.asserting_tree(self.builder())

    def builder(self, alphabet: Ranges = EVERYTHING) -> Builder:
        """For a tree of it, whose construction is ended with ConstraintError (``timeout``) if it takes long."""
        budget = Budget("regex", self._limits)
        budget.start(self._limits.compile_s)
        return Builder(alphabet, budget.tick)

    def _try_anchors(self) -> None:
        """Can the anchors be resolved in the tree?"""
        builder = self.builder()
        try:
            anchors.resolve(self._without_atomic(builder, asserting=False), builder)
        except anchors.MisplacedAnchor as error:
            self._misplaced = error

    def _without_atomic(self, builder: Builder, asserting: bool) -> Node:
        node = _Converter(self, builder, asserting).sequence(self._parsed, self.flags)
        if node.atomic:
            resolved = atomic.resolve(node, builder)
            if resolved is None:
                raise self.not_plain()
            node = resolved
        return node

    def asserting_tree(self, builder: Builder) -> Node:
        """The syntax tree without anchors and atomic groups, perhaps with assertions (see ``Node.looks``).

        Raises ``unsupported`` or ``limit``.
        """
        asserting = self._looks or self._misplaced is not None
        node = self._without_atomic(builder, asserting)
        if asserting:
            return settle(node, builder)
        return anchors.resolve(node, builder) if node.marked else node

    def tree(self, builder: Builder) -> Node:
        """The tree for engines that know no assertions; ``unsupported`` says where one is left."""
        node = self.asserting_tree(builder)
        if not node.looks:
            return node
        if self._misplaced is not None:
            raise refuse("unsupported", self._place(self._misplaced.kind), str(self._misplaced))
        place = scan.find(self.pattern, r"\(\?<?[=!]|\\[bB]")
        raise refuse(
            "unsupported", place, "look-around and word boundaries are for the compressed engine only"
        )

    def not_plain(self) -> ConstraintError:
        reason = (
            "a possessive quantifier or atomic group that may differ from the plain form is not supported"
        )
        return refuse("unsupported", scan.find_possessive(self.pattern), reason)

    def _place(self, kind: MarkKind) -> int:
        return scan.find(self.pattern, r"\^|\\A" if kind in ("begin", "line_begin") else r"\$|\\[Zz]")


class _Converter:
    """From the parser's (operator, argument) pairs to nodes."""

    def __init__(self, regex: Regex, builder: Builder, asserting: bool = False) -> None:
        """asserting: anchors become assertions."""
        self._regex = regex
        self._builder = builder
        self._asserting = asserting
        self._boundaries: dict[tuple[bool, bool], Node] = {}

    def sequence(self, items: Any, flags: int) -> Node:
        return self._builder.cat([self._item(op.name, arg, flags) for op, arg in items])

    def _item(self, op: str, arg: Any, flags: int) -> Node:
        build = self._builder
        if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return build.chars(_chars(op, arg, flags))
        if op == "BRANCH":
            return build.alt([self.sequence(branch, flags) for branch in arg[1]])
        if op == "SUBPATTERN":
            _, add, remove, body = arg
            return self.sequence(body, _scoped(flags, add, remove))
        if op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            return self._repeat(op, arg, flags)
        if op == "ATOMIC_GROUP":
            self._refuse_lazy(arg)
            return build.atomic(self.sequence(arg, flags))
        if op == "AT":
            return self._anchor(arg.name, flags)
        if op in _LOOKS:
            body = self.sequence(arg[1], flags)
            return build.look(body, ahead=arg[0] > 0, negative=op == "ASSERT_NOT")
        if op == "FAILURE":  # (?!), in some versions of Python
            return build.nothing
        raise self._unsupported(op)

    def _anchor(self, name: str, flags: int) -> Node:
        if name in _BOUNDARIES:
            ascii_only, negative = bool(flags & re.ASCII), name == "AT_NON_BOUNDARY"
            if (ascii_only, negative) not in self._boundaries:
                word = category("w", ascii_only)
                found = assertions.boundary(word, self._builder, negative)
                self._boundaries[ascii_only, negative] = found
            return self._boundaries[ascii_only, negative]
        if name not in _MARKS:
            raise self._unsupported(name)
        plain, multiline = _MARKS[name]
        kind = multiline if flags & re.MULTILINE else plain
        return assertions.of_mark(kind, self._builder) if self._asserting else self._builder.mark(kind)

    def _repeat(self, op: str, arg: Any, flags: int) -> Node:
        lo, hi, body = arg
        build, limit = self._builder, self._regex._limits.repeat
        unbounded = hi == _parser().MAXREPEAT
        largest = int(lo) if unbounded else int(hi)
        if largest > limit:
            place = scan.find(self._regex.pattern, r"\{")
            raise refuse("limit", place, f"a repeat of {largest}; bounds may be at most {limit}")
        copy = self.sequence(body, flags)
        bounds = int(lo), INF if unbounded else int(hi)
        if op == "POSSESSIVE_REPEAT":
            self._refuse_lazy(body)
            # Python also commits to each copy as it is matched.
            return build.atomic(build.rep(build.atomic(copy), *bounds))
        return build.rep(copy, *bounds)

    def _refuse_lazy(self, items: Any) -> None:
        """Inside an atomic group a lazy quantifier commits to the fewest copies: not its plain language."""
        if any(op == "MIN_REPEAT" and arg[0] != arg[1] for op, arg in _operators(items)):
            raise self._regex.not_plain()

    def _unsupported(self, op: str) -> ConstraintError:
        name, wanted = _NOT_REGULAR.get(op, (op.lower().replace("_", " "), r"\("))
        return refuse("unsupported", scan.find(self._regex.pattern, wanted), f"{name} is not supported")


def _scoped(flags: int, add: int, remove: int) -> int:
    """Flags inside ``(?aims-x:...)``; a, u and L replace each other."""
    if add & (re.ASCII | re.UNICODE):
        flags &= ~(re.ASCII | re.UNICODE)
    return (flags | add) & ~remove


def _operators(items: Any) -> Iterator[tuple[str, Any]]:
    """(name, argument) of every operator in a parsed sequence, at any depth."""
    for op, arg in items:
        yield op.name, arg
        for body in _bodies(op.name, arg):
            yield from _operators(body)


def _bodies(op: str, arg: Any) -> Sequence[Any]:
    """The sequences inside one operator's argument."""
    if op == "BRANCH":
        return arg[1]  # type: ignore[no-any-return]
    if op == "SUBPATTERN":
        return [arg[3]]
    if op.endswith("_REPEAT"):
        return [arg[2]]
    if op == "ATOMIC_GROUP":
        return [arg]
    if op.startswith("ASSERT"):
        return [arg[1]]
    if op == "GROUPREF_EXISTS":
        return [branch for branch in arg[1:] if branch is not None]
    return []


def _check_case_work(items: Any, flags: int) -> None:
    """Python's compiler visits every character of a class under IGNORECASE: bound that before it runs."""
    work = _case_work(items, flags)
    if work > _CASE_WORK:
        raise refuse("limit", "", f"classes under the flag (?i) hold {work} characters; at most {_CASE_WORK}")


def _case_work(items: Any, flags: int) -> int:
    """Characters in ranges under IGNORECASE."""
    total = 0
    for op, arg in items:
        if op.name == "IN" and flags & re.IGNORECASE:
            total += sum(item[1] - item[0] + 1 for kind, item in arg if kind.name == "RANGE")
        inner = _scoped(flags, arg[1], arg[2]) if op.name == "SUBPATTERN" else flags
        total += sum(_case_work(body, inner) for body in _bodies(op.name, arg))
    return total


def _chars(op: str, arg: Any, flags: int) -> Ranges:
    if op == "ANY":
        return EVERYTHING if flags & re.DOTALL else complement(_NEWLINE)
    items = arg if op == "IN" else [(_parser().LITERAL, arg)]
    negated = op == "NOT_LITERAL" or (op == "IN" and items[0][0].name == "NEGATE")
    ascii_only = bool(flags & re.ASCII)
    members = [_class_item(kind.name, value, ascii_only) for kind, value in items if kind.name != "NEGATE"]
    ranges = union(member for member, _ in members)
    if negated:
        ranges = complement(ranges)
    if flags & re.IGNORECASE:
        text = "".join(source for _, source in members)
        return ignore_case(ranges, f"[{'^' if negated else ''}{text}]", ascii_only)
    return ranges


def _class_item(kind: str, value: Any, ascii_only: bool) -> tuple[Ranges, str]:
    """One member of a class: its set, and its text for a class in brackets."""
    if kind == "LITERAL":
        return normalize([(value, value)]), f"\\U{value:08x}"
    if kind == "RANGE":
        return normalize([(value[0], value[1])]), f"\\U{value[0]:08x}-\\U{value[1]:08x}"
    name = value.name  # CATEGORY_DIGIT, CATEGORY_NOT_SPACE, ...
    letter = name.rsplit("_", 1)[1][0].lower()
    letter = letter.upper() if "_NOT_" in name else letter
    return category(letter, ascii_only), f"\\{letter}"
