"""The ``llguidance`` engine: JSON schemas and Lark grammars; on request also regex and choices.

A pattern is read by the same parser as for the ``compressed`` engine and handed over as a syntax tree, so it
means the same here. A schema is checked and rewritten by ``json_schema`` until llguidance enforces all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm.choices import read_options, writable_options
from trellis.fsm.contract import ConstraintKind, ConstraintSpec, Grammar, Spacing, Vocabulary
from trellis.fsm.deep_stack import with_deep_stack
from trellis.fsm.lark_pattern import options_grammar, pattern_grammar
from trellis.fsm.lark_source import check_lark, place_in
from trellis.fsm.limits import Limits
from trellis.fsm.llguidance_bytes import fault
from trellis.fsm.llguidance_escapes import escape_options
from trellis.fsm.llguidance_matcher import LLGuidanceGrammar
from trellis.fsm.llguidance_tokens import ll_tokens
from trellis.fsm.regex import Regex, refuse

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_OF_LIMITS = ("too large", "too complex", "too many", "too deeply", "limit", "fuel", "exceed")
_SHALLOW = 100  # references that any stack holds
_CHARACTERS_EACH = (
    500  # of a grammar, which take no more stack than a reference: 20,000 names in one list overflow
)
_ITEMS_IN_ROW = 20_000  # what an object with Limits.properties optional properties needs
_LEXER_STATES = 50_000  # up to 2 KB each
_BLANKS = r"[ \n\r\t]{1,8}"
_SPACING: dict[Spacing, dict[str, Any]] = {
    "spaced": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
    "compact": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "any": {"item_separator": ",", "key_separator": ":", "whitespace_pattern": _BLANKS},
}
# Measured: what a parser holds whatever its grammar, and for each character of its grammar.
_PARSER_BYTES = 150_000
_BYTES_PER_CHARACTER = 20


class LLGuidanceEngine:
    """An ``Engine`` (see ``registry``)."""

    name = "llguidance"
    kinds = frozenset({"schema", "grammar", "regex", "choices"})

    def compile(self, spec: ConstraintSpec, vocabulary: Vocabulary, limits: Limits) -> Grammar:
        """Raises ConstraintError: ``syntax``, ``unsupported``, ``limit``, ``empty`` or ``timeout``."""
        if spec.kind == "schema":
            return _schema(spec, vocabulary, limits)
        if spec.kind == "choices":
            options = read_options(spec.source, limits)
            written, warnings = writable_options(options, ll_tokens(vocabulary).alphabet)
            source = _Source(options_grammar(written), options_grammar(options))
        elif spec.kind == "regex":
            source, warnings = _pattern(spec.source, vocabulary, limits), []
        else:
            text = _with_schemas(spec.source, limits)
            source, warnings = _Source(text, text), []
        return _build(spec.kind, source, vocabulary, warnings)


@dataclass(frozen=True)
class _Source:
    """Lark that llguidance compiles. whole: the same language without regard to what the vocabulary can write."""

    text: str
    whole: str


# llguidance would narrow masks to forced tokens of its own. Which those are is decided by ``forced``, the same
# rule for all engines.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def _pattern(pattern: str, vocabulary: Vocabulary, limits: Limits) -> _Source:
    regex = Regex(pattern, limits)
    every = regex.builder()
    whole = regex.tree(every)
    if whole is every.nothing:
        raise refuse("empty", "", "no text matches this pattern")
    builder = regex.builder(ll_tokens(vocabulary).alphabet)
    written = regex.tree(builder)
    if written is builder.nothing:
        raise refuse("empty", "", "every match needs a character that this model's vocabulary cannot write")
    return _Source(pattern_grammar(written), pattern_grammar(whole))


def _schema(spec: ConstraintSpec, vocabulary: Vocabulary, limits: Limits) -> LLGuidanceGrammar:
    from trellis.fsm.json_schema import prepare

    prepared = prepare(spec.source, spec.strict, limits)
    limits.check_wanted()
    text = f"start: {_json_rule(prepared.schema, spec.spacing, limits)}"
    warnings, validated_only = prepared.warnings, prepared.validated_only
    return _build("schema", _Source(text, text), vocabulary, warnings, validated_only, prepared.validate)


def _json_rule(schema: dict[str, Any] | bool, spacing: Spacing, limits: Limits) -> str:
    """A lowered schema as a part of a Lark rule."""
    # Hints of the schema itself, if it has any, give way: they could make the compiler lenient.
    hints = {
        **_SPACING[spacing],
        "lenient": False,
        "coerce_one_of": False,
        **escape_options(schema, limits),
    }
    inner = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return "%json " + json.dumps({**inner, "x-guidance": hints}, ensure_ascii=False)


def _with_schemas(source: str, limits: Limits) -> str:
    """A user's Lark, with every schema in it checked and rewritten as any other. Raises ConstraintError."""
    from trellis.fsm.json_schema import prepare

    out: list[str] = []
    done = 0
    for begin, end in check_lark(source, limits):
        out.append(source[done:begin])
        try:
            prepared = prepare(source[begin + len("%json") : end], True, limits)
            out.append(_json_rule(prepared.schema, "spaced", limits))
        except ConstraintError as error:
            where = f"{place_in(source, begin)}: {error.where}" if error.where else place_in(source, begin)
            raise ConstraintError("grammar", error.code, where, error.detail) from None
        done = end
    return "".join([*out, source[done:]])


def _build(
    kind: ConstraintKind,
    source: _Source,
    vocabulary: Vocabulary,
    warnings: Sequence[str],
    validated_only: Sequence[str] = (),
    check: Callable[[str], str | None] = lambda _: None,
) -> LLGuidanceGrammar:
    tokens = ll_tokens(vocabulary)
    parser = _parser(kind, tokens.tokenizer, source.text)
    # Some limits and an empty language appear only now. Copies of the parser keep what this worked out.
    probe = np.zeros(vocabulary.mask_words, np.int32)
    parser.unsafe_compute_mask_ptr(probe.ctypes.data, probe.nbytes)
    if parser.is_error():
        raise fault(kind, parser)
    return LLGuidanceGrammar(
        kind,
        parser,
        _parser(kind, tokens.bytewise, source.text),
        lambda: _parser(kind, tokens.bytewise, source.whole),
        vocabulary,
        tokens,
        _PARSER_BYTES + _BYTES_PER_CHARACTER * len(source.text),
        [*warnings],
        [*validated_only],
        check,
    )


def _parser(kind: ConstraintKind, tokenizer: Any, text: str) -> Any:
    """A compiled ``LLMatcher``. Raises ConstraintError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=_ITEMS_IN_ROW, max_lexer_states=_LEXER_STATES, verbose_errors=False
    )
    grammar = LLMatcher.grammar_from_lark(text + _OPTIONS)

    def make() -> Any:
        return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)

    # It follows definitions by recursion: a chain of them is as deep as there are references.
    deep = max(text.count('"$ref"'), text.count("\n"), len(text) // _CHARACTERS_EACH) > _SHALLOW
    parser = with_deep_stack(make) if deep else make()
    if parser.is_error():
        raise _refusal(kind, parser.get_error())
    ignored = [warning for warning in parser.get_grammar_warnings() if "nimplemented" in warning]
    if ignored:
        raise ConstraintError(kind, "unsupported", "", _first_line(ignored[0]))
    return parser


def _refusal(kind: ConstraintKind, message: str) -> ConstraintError:
    """llguidance's reason for refusing a grammar, by its kind."""
    place = _PLACE.match(message)
    reason = _first_line(message[place.end() :] if place else message)
    reason = reason.removeprefix("failed to compile JSON schema: ")
    lowered = reason.lower()
    if "unsatisfiable" in lowered:
        code = "empty"
    elif any(word in lowered for word in _OF_LIMITS):
        code = "limit"
    else:
        code = "syntax" if kind == "grammar" and "unimplemented" not in lowered else "unsupported"
    where = f"line {place[1]}, column {place[2]}" if place and kind == "grammar" else ""
    return ConstraintError(kind, code, where, reason)


def _first_line(message: str) -> str:
    line = message.strip().partition("\n")[0].strip().rstrip(":")
    # The text of a regex error stands in its last line.
    if line == "regex parse error":
        line = message.strip().rpartition("error: ")[2].partition("\n")[0]
    return line[:300] or "refused without a reason"
