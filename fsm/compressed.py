"""The ``compressed`` engine: regex and choices by a byte automaton that is built lazily and compressed.

A pattern becomes a syntax tree (``regex``); its states are sets of what is still to be matched
(``continuations``), spelled in UTF-8 (``utf8``), numbered and tabulated on demand (``dfa``), and seen through
the vocabulary's trie (``token_automaton``). A chain of states with one way on is one edge of bytes, which
``forced`` turns into tokens.
"""

from __future__ import annotations

import json
from typing import Any

from trellis.errors import ConstraintError
from trellis.fsm.automaton import DEAD, START
from trellis.fsm.contract import ConstraintSpec, Grammar, Vocabulary
from trellis.fsm.dfa import LazyDfa
from trellis.fsm.limits import Budget, Limits
from trellis.fsm.matcher import CompressedGrammar
from trellis.fsm.options import OptionsAutomaton
from trellis.fsm.regex import Regex, refuse
from trellis.fsm.regex_source import RegexSource
from trellis.fsm.spelling import spelling_of, writable
from trellis.fsm.syntax import Builder
from trellis.fsm.token_automaton import TokenAutomaton
from trellis.fsm.trie import trie_of


class CompressedEngine:
    """An ``Engine`` (see ``registry``) for regular expressions and lists of options."""

    name = "compressed"
    kinds = frozenset({"regex", "choices"})

    def compile(self, spec: ConstraintSpec, vocabulary: Vocabulary, limits: Limits) -> Grammar:
        """Raises ConstraintError: ``syntax``, ``unsupported``, ``limit``, ``empty`` or ``timeout``."""
        compiled = _choices if spec.kind == "choices" else _regex
        return compiled(spec.source, vocabulary, limits)


def _regex(pattern: str, vocabulary: Vocabulary, limits: Limits) -> CompressedGrammar:
    regex = Regex(pattern, limits)
    spelling = spelling_of(vocabulary)

    def make() -> TokenAutomaton:
        budget = Budget("regex", limits)
        budget.start(limits.compile_s)
        builder = Builder(spelling.alphabet)
        root = regex.tree(builder)
        if root is builder.nothing:
            raise _nothing(regex)
        automaton = LazyDfa(RegexSource(root, builder, budget), budget)
        return TokenAutomaton(automaton, trie_of(vocabulary), spelling.bytewise, budget)

    return CompressedGrammar(make, _RegexLanguage(regex, limits), vocabulary, [])


def _nothing(regex: Regex) -> ConstraintError:
    builder = Builder()
    if regex.tree(builder) is builder.nothing:
        return refuse("empty", "", "no text matches this pattern")
    return refuse("empty", "", "every match needs a character that this model's vocabulary cannot write")


class _RegexLanguage:
    """The pattern's language over all characters, built when first asked for."""

    def __init__(self, regex: Regex, limits: Limits) -> None:
        self._regex = regex
        self._limits = limits
        self._budget = Budget("regex", limits)
        self._dfa: LazyDfa | None = None

    def __call__(self, data: bytes) -> bool:
        self._budget.start(self._limits.compile_s)
        try:
            return self._accepts(data)
        except ConstraintError as error:
            if error.code != "limit":
                raise
            self._dfa = None  # used up by earlier texts: once more with an empty automaton
            return self._accepts(data)

    def _accepts(self, data: bytes) -> bool:
        if self._dfa is None:
            builder = Builder()
            self._budget = Budget("regex", self._limits)
            self._dfa = LazyDfa(RegexSource(self._regex.tree(builder), builder, self._budget), self._budget)
        state = self._dfa.step(START, data)
        return state != DEAD and self._dfa.accepting(state)


def _choices(source: str, vocabulary: Vocabulary, limits: Limits) -> CompressedGrammar:
    options = _options(source, limits)
    spelling = spelling_of(vocabulary)
    everything = writable(spelling.alphabet, "".join(options))
    written = options if everything else [o for o in options if writable(spelling.alphabet, o)]
    if not any(written):
        raise _refuse(
            "empty", "", "no option can be written with this model's vocabulary, which lacks some bytes"
        )
    warnings = []
    if len(written) < len(options):
        lost = len(options) - len(written)
        warnings.append(f"choices: {lost} options need bytes that the vocabulary lacks and are left out")
    exact = frozenset(option.encode() for option in options)

    def make() -> TokenAutomaton:
        budget = Budget("choices", limits)
        return TokenAutomaton(OptionsAutomaton(written), trie_of(vocabulary), spelling.bytewise, budget)

    return CompressedGrammar(make, exact.__contains__, vocabulary, warnings)


def _options(source: str, limits: Limits) -> list[str]:
    """The options of a ``choices`` constraint, without duplicates, or a ConstraintError.

    An empty option among others is allowed: the text may then end at once. Alone it leaves nothing to generate.
    """
    try:
        parsed: Any = json.loads(source)
    except (ValueError, RecursionError) as error:
        where = f"position {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise _refuse("syntax", where, "not a JSON array of strings") from error
    if not isinstance(parsed, list):
        raise _refuse("syntax", "", f"must be a JSON array of strings, not {type(parsed).__name__}")
    if len(parsed) > limits.choices:
        raise _refuse("limit", "", f"{len(parsed)} options; at most {limits.choices} are allowed")
    total = 0
    for index, option in enumerate(parsed):
        if not isinstance(option, str):
            raise _refuse("syntax", f"option {index}", f"must be a string, not {type(option).__name__}")
        try:
            total += len(option.encode())
        except UnicodeEncodeError as error:
            reason = "holds a lone surrogate, which UTF-8 text cannot carry"
            raise _refuse("syntax", f"option {index}", reason) from error
    if total > limits.choices_bytes:
        raise _refuse(
            "limit", "", f"the options have {total} bytes; at most {limits.choices_bytes} are allowed"
        )
    if not any(parsed):
        raise _refuse("empty", "", "there must be at least one option that is not the empty string")
    return list(dict.fromkeys(parsed))


def _refuse(code: str, where: str, reason: str) -> ConstraintError:
    return ConstraintError("choices", code, where, reason)
