"""``trellis grammar``: what a constraint means, without a server.

``check`` compiles a constraint as the server would and says which texts it accepts and what it would force;
``show`` draws the automaton of a regex or of choices.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trellis.errors import ConstraintError, ModelLoadError

if TYPE_CHECKING:
    from trellis.fsm import ConstraintSpec, Grammar, Vocabulary
    from trellis.fsm.diagnose import Failure

OK, REFUSED, USAGE = 0, 1, 2
FORMATS = {"": "dot", ".dot": "dot", ".gv": "dot", ".svg": "svg"}  # by the ending of --output
_AROUND = 50  # characters shown on each side of a place
_JSON_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_SEPARATORS = {"spaced": {",": ", ", ":": ": "}, "compact": {}}


class UsageError(Exception):
    """A mistake in the arguments: exit status 2."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``grammar`` to the command line."""
    grammar = commands.add_parser("grammar", help="check constraints against texts, or draw them")
    verbs = grammar.add_subparsers(required=True, metavar="verb")
    check = verbs.add_parser(
        "check",
        help="compile a constraint and try texts on it",
        description="Compile a constraint as the server would. Exit status: 0 if it compiles and accepts every "
        "text, 1 if not, 2 for a mistake in the arguments.",
    )
    given = _add_constraint(check)
    given.add_argument("--schema", metavar="FILE", help="a JSON schema")
    given.add_argument("--grammar", metavar="FILE", help="a context-free grammar, in Lark or GBNF")
    check.add_argument(
        "--instance",
        metavar="FILE",
        action="append",
        default=[],
        help="a text to try; a newline at its end is not part of it, and with --schema JSON gets the blanks of "
        "--spacing. May be given more than once",
    )
    check.add_argument("--text", action="append", default=[], help="a text to try, exactly as it stands")
    check.add_argument(
        "--model",
        default="smollm2-135m",
        help="the model whose tokens are used (smollm2-135m), or `bytes` for one token a byte",
    )
    check.add_argument(
        "--spacing", choices=["spaced", "compact", "any"], default="spaced", help="blanks in JSON"
    )
    check.add_argument(
        "--no-strict", action="store_true", help="let a schema validate what it cannot enforce"
    )
    check.add_argument("--backend", default="auto", help="the engine, as in `serve --grammar-backend` (auto)")
    check.set_defaults(run=_guarded(_check))
    show = verbs.add_parser("show", help="draw the automaton of a regex or of choices")
    _add_constraint(show)
    show.add_argument(
        "--format", choices=["dot", "svg"], help="default: by the ending of the file's name, else dot"
    )
    show.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    show.add_argument("--before", action="store_true", help="before compression: chains are not joined")
    show.add_argument("--bytes", action="store_true", help="an edge for each byte and not for each character")
    show.add_argument("--limit", type=int, default=200, help="states to draw at most (200)")
    show.set_defaults(run=_guarded(_show))


def _add_constraint(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--regex", metavar="R", help="a regular expression, as Python's re.fullmatch reads it")
    given.add_argument("--choices", metavar="FILE|JSON", help="a JSON array of strings, or a file with one")
    return given


def _guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def guarded(options: argparse.Namespace) -> int:
        try:
            return run(options)
        except (UsageError, ModelLoadError) as error:
            print(f"trellis grammar: {error}", file=sys.stderr)
            return USAGE
        except ModuleNotFoundError as error:
            print(f"trellis grammar: {error}: pip install 'trellis-lm[runtime]'", file=sys.stderr)
            return USAGE

    return guarded


# --- check --------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    from trellis.fsm import backend_names

    if options.backend not in backend_names():
        raise UsageError(f"unknown backend {options.backend!r}; there are: {', '.join(backend_names())}")
    spec = _spec(options)
    texts = [(repr(text), text) for text in options.text]
    texts += [(name, _instance(name, spec)) for name in options.instance]
    vocabulary = _vocabulary(options.model)
    try:
        _compile(spec, vocabulary, options.backend)  # also loads what an engine does once for a vocabulary
        grammar, times = _compile(spec, vocabulary, options.backend)
    except ConstraintError as error:
        print(_refusal(spec, error))
        return REFUSED
    verdicts = [_try(grammar, vocabulary, name, text) for name, text in texts]
    print("\n".join([_summary(spec, grammar, times), *(line for _, line in verdicts)]))
    return OK if all(accepted for accepted, _ in verdicts) else REFUSED


def _spec(options: argparse.Namespace) -> ConstraintSpec:
    from trellis.fsm import ConstraintSpec

    if options.regex is not None:
        return ConstraintSpec.regex(options.regex)
    if options.choices is not None:
        array = options.choices.lstrip().startswith("[")
        return ConstraintSpec("choices", options.choices if array else _read(options.choices))
    if options.schema is not None:
        return ConstraintSpec.schema(_read(options.schema), options.spacing, not options.no_strict)
    return ConstraintSpec.grammar(_read(options.grammar))


def _read(name: str) -> str:
    try:
        return Path(name).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {name}: {error}") from error


def _instance(name: str, spec: ConstraintSpec) -> str:
    text = _read(name).removesuffix("\n").removesuffix("\r")
    if spec.kind != "schema" or spec.spacing == "any":
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text  # to be rejected where it stops being JSON
    blanks = _SEPARATORS[spec.spacing]
    return "".join(blanks.get(part, part) for part in _JSON_PARTS.findall(text))


def _vocabulary(model: str) -> Vocabulary:
    from trellis.fsm import Vocabulary

    if model == "bytes":
        tokens = [bytes([byte]) for byte in range(256)]
        return Vocabulary([*tokens, b""], 257, frozenset({256}), lambda text: list(text.encode()), "bytes")
    from trellis.runtime.models import load_tokenizer, resolve_model_path

    return load_tokenizer(resolve_model_path(model)).vocabulary()


def _compile(
    spec: ConstraintSpec, vocabulary: Vocabulary, backend: str
) -> tuple[Grammar, tuple[float, float]]:
    """The grammar, and the seconds for it and for its first mask."""
    import numpy as np

    from trellis.fsm import compile_grammar

    began = time.perf_counter()
    grammar = compile_grammar(spec, vocabulary, backend)
    compiled = time.perf_counter()
    grammar.matcher().fill_mask(np.empty(vocabulary.mask_words, np.int32))
    return grammar, (compiled - began, time.perf_counter() - compiled)


def _summary(spec: ConstraintSpec, grammar: Grammar, times: tuple[float, float]) -> str:
    from trellis.fsm.contract import ChecksText
    from trellis.fsm.matcher import CompressedGrammar

    states = f", {grammar.automaton.states:,} states" if isinstance(grammar, CompressedGrammar) else ""
    lines = [
        f"compiled  {spec.kind}, engine {grammar.engine}{states}, {grammar.nbytes:,} bytes, "
        f"in {times[0] * 1e3:.1f} ms and the first mask in {times[1] * 1e3:.1f} ms"
    ]
    lines += [f"warning   {warning}" for warning in grammar.warnings]
    if isinstance(grammar, ChecksText):
        lines += [f"only validated in the finished text: {place}" for place in grammar.validated_only]
    return "\n".join(lines)


def _try(grammar: Grammar, vocabulary: Vocabulary, name: str, text: str) -> tuple[bool, str]:
    """Is the text accepted, and the lines that say so."""
    from trellis.fsm.contract import ChecksText
    from trellis.fsm.diagnose import trace

    try:
        accepted = grammar.accepts(text)
        found = trace(grammar, vocabulary, text)
    except ConstraintError as error:
        return False, f"failed    {name}: {error}"
    except UnicodeEncodeError:
        return False, f"rejected  {name}: it holds a lone surrogate, which UTF-8 text cannot carry"
    wrong = grammar.validate(text) if isinstance(grammar, ChecksText) else None
    if accepted and wrong is None:
        share = f" ({found.forced / found.tokens:.0%})" if found.tokens else ""
        note = "" if found.failure is None else "; this model's vocabulary cannot write it"
        tokens = f"{found.tokens} token{'s' * (found.tokens != 1)}"
        return True, f"accepted  {name}: {tokens}, {found.forced} of them forced{share}{note}"
    if found.failure is None:
        return False, f"rejected  {name}: {wrong or 'the finished text does not satisfy the constraint'}"
    return False, f"rejected  {name}: {_failure(found.failure, text)}"


def _failure(failure: Failure, text: str) -> str:
    from trellis.fsm.diagnose import describe

    before = text.encode()[: failure.at].decode(errors="ignore")
    at = len(before)
    place = f"after {at} characters" if at >= len(text) else f"at character {at} (byte {failure.at})"
    if at >= len(text):
        place = f"it ends too early, {place}"
    elif "\n" in before:
        place += f", line {before.count(chr(10)) + 1}"
    return f"{place}\n{_caret(text, at)}\n          expected {describe(failure)}"


def _caret(text: str, at: int) -> str:
    """The line of this place, and a mark below it."""
    begin = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    left, right = max(begin, at - _AROUND), min(end, at + _AROUND)
    cut_left, cut_right = "…" if left > begin else "", "…" if right < end else ""
    shown = "".join(char if char.isprintable() else "·" for char in text[left:right])
    return f"          {cut_left}{shown}{cut_right}\n          {' ' * (len(cut_left) + at - left)}^"


def _refusal(spec: ConstraintSpec, error: ConstraintError) -> str:
    lines = [
        f"refused   {spec.kind} ({error.code}): {error.detail}"
        + (f" (at {error.where})" if error.where else "")
    ]
    position = re.fullmatch(r"position (\d+)", error.where)
    line = re.match(r"line (\d+)(?:, column (\d+))?", error.where)
    if position and len(spec.source) >= int(position[1]):
        lines.append(_caret(spec.source, int(position[1])))
    elif line:
        starts = [0, *(match.end() for match in re.finditer("\n", spec.source))]
        row = min(int(line[1]), len(starts)) - 1
        lines.append(_caret(spec.source, starts[row] + int(line[2] or 1) - 1))
    elif error.where.startswith("#") and (part := _at_pointer(spec.source, error.where)) is not None:
        lines.append(f"          {part}")
    return "\n".join(lines)


def _at_pointer(schema: str, pointer: str) -> str | None:
    """The part of a JSON text that a pointer names, cut to a line."""
    from urllib.parse import unquote

    try:
        part = json.loads(schema)
        for step in pointer.lstrip("#").split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            part = part[int(key)] if isinstance(part, list) else part[key]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    text = json.dumps(part, ensure_ascii=False)
    return text if len(text) <= 2 * _AROUND else text[: 2 * _AROUND] + "…"


# --- show ---------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    from trellis.fsm import Limits
    from trellis.fsm.compressed import byte_automaton
    from trellis.fsm.dot import dot
    from trellis.fsm.drawing import draw, explore
    from trellis.fsm.svg import svg

    if options.limit < 1:
        raise UsageError("--limit must be at least 1")
    form = options.format or FORMATS.get(Path(options.output or "").suffix)
    if form is None:
        raise UsageError(
            f"--output: cannot tell a format from '{options.output}'; end it in .dot or .svg, or give --format"
        )
    spec = _spec(options)
    try:
        explored = explore(byte_automaton(spec, Limits()), options.bytes)
        before, after = draw(explored, compressed=False), draw(explored)
        diagram = draw(explored, not options.before, options.limit)
    except ConstraintError as error:
        print(_refusal(spec, error), file=sys.stderr)
        return REFUSED
    title = (
        spec.source
        if diagram.whole
        else f"{spec.source}   (the {len(diagram.states)} nearest states of more)"
    )
    picture = (svg if form == "svg" else dot)(diagram, title)
    if options.output is None:
        print(picture, end="")
    else:
        _write(options.output, picture)
    more = "" if before.whole else "at least "
    print(
        f"{more}{len(before.states)} states before compression, {more}{len(after.states)} after; drawn: "
        f"{len(diagram.states)} states and {len(diagram.edges)} edges"
        + (
            ""
            if diagram.whole
            else f"; dashed states have edges that are not drawn (--limit {options.limit})"
        ),
        file=sys.stderr,
    )
    return OK


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error}") from error
