"""Constraints made to hurt, each compiled and walked in this process; a line of JSON about each.

Run as a program by ``test_hostile_engines``, so that what they cost in memory is the peak of one process.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Grammar, GrammarCompiler, Vocabulary
from trellis.runtime.models import load_tokenizer, resolve_model_path


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def defs(count: int, body: Any) -> dict[str, Any]:
    """Definitions that each refer to the next."""
    chain = {f"d{i}": body({"$ref": f"#/$defs/d{i + 1}"}, i) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "integer"}}}


def pair(ref: dict[str, Any], _: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": ref, "b": ref}, "required": ["a", "b"]}


def branch(ref: dict[str, Any], i: int) -> dict[str, Any]:
    return {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]}, ref]}


REGEX = {
    "exponential": "(a|b)*a(a|b){30}",
    "nested repeats": "(((a{0,100}){0,100}){0,100})",
    "200 groups deep": "(" * 200 + "a" + ")" * 200,
    "100,000 alternatives": "|".join(f"w{i}" for i in range(100_000)),
    "NUL": "a\0b",
    "lone surrogate": "a\ud800b",
    "exponential look-ahead": "(?=(a|b)*a(a|b){30}c)[abc]*",
    "contradicting look-aheads": "(?=(a|b)*a(a|b){30}$)(?=(a|b)*b(a|b){30}$)[ab]*",
    "obligations in a loop": "(?:(?=(a|b)*a(a|b){30}c)[abc])*",
    "word boundaries": "\\b\\B" * 2000 + "|a",
    "nested word boundaries": "(?:" * 50 + "\\b\\w?" * 400 + "\\b)?" * 50,
    "8,000 ends": "$" * 8000,
    "alternatives of ends": "(?:a|$)" * 1000,
    "600 obligations": "".join(f"(?=.{{{i}}}x)" for i in range(600)) + ".*",
}
CHOICES = {
    "100,000 options": json.dumps([f"w{i}" for i in range(100_000)]),
    "5 MB of options": json.dumps(["x" * 1000 + str(i) for i in range(5000)]),
    "NUL": '["a\\u0000b", "c"]',
    "lone surrogate": '["\\ud800"]',
}
SCHEMA: dict[str, Any] = {
    "5 MB enum": {"enum": ["x" * 1000 + str(i) for i in range(5000)]},
    "enum of 20,000": {"enum": [f"v{i}" for i in range(20_000)]},
    "200 objects deep": nested(200),
    "60 objects deep": nested(60),
    "100,000 brackets": "[" * 100_000,
    "$ref to itself": {"$ref": "#"},
    "$ref cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "no finite value": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "tree": {"type": "object", "properties": {"x": {"$ref": "#"}}},
    "doubling": defs(30, pair),
    "doubling of cases": defs(25, branch),
    "NUL": {"const": "a\0b"},
    "raw NUL": '{"const": "a\0b"}',
    "lone surrogate": '{"const": "\\ud800"}',
    "100,000 cases": {"anyOf": [{"const": i} for i in range(100_000)]},
    "10,000 optional properties": {"properties": {f"p{i}": {"type": "integer"} for i in range(10_000)}},
    "3,000 optional properties": {"properties": {f"p{i}": {"type": "integer"} for i in range(3_000)}},
    "long minimum": '{"type": "integer", "minimum": ' + "9" * 5000 + "}",
    "a million items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "exponential pattern": {"type": "string", "pattern": "(a|b)*a(a|b){30}"},
}
LARK = {
    "NUL": 'start: "a\0b"',
    "lone surrogate": 'start: "a\ud800b"',
    "100,000 alternatives": "start: " + " | ".join(f'"w{i}"' for i in range(100_000)),
    "20,000 groups deep": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "nested repeats": 'start: ((("a"{0,100}){0,100}){0,100})',
    "no finite text": "start: x\nx: x | start",
    "doubling": "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)), 'r30: "x"']),
    "ambiguous": 'start: start start | "a" |',
}


def cases() -> list[tuple[str, str, ConstraintSpec]]:
    """(backend, name, constraint)"""
    out: list[tuple[str, str, ConstraintSpec]] = []
    for backend in ("compressed", "llguidance"):
        out += [(backend, f"regex: {name}", ConstraintSpec.regex(r)) for name, r in REGEX.items()]
        out += [(backend, f"choices: {name}", ConstraintSpec("choices", c)) for name, c in CHOICES.items()]
    out += [("llguidance", f"schema: {name}", ConstraintSpec.schema(s)) for name, s in SCHEMA.items()]
    out += [("llguidance", f"grammar: {name}", ConstraintSpec.grammar(g)) for name, g in LARK.items()]
    return out


def walk(grammar: Grammar, vocabulary: Vocabulary) -> str:
    """Some tokens by the mask; what is wrong, if anything."""
    matcher, rng = grammar.matcher(), random.Random(5)
    row = np.empty(vocabulary.mask_words, np.int32)
    for step in range(12):
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if not allowed:
            return f"no token is allowed at step {step}"
        if not matcher.accept(rng.choice(allowed)):
            return f"an allowed token was refused at step {step}"
        if matcher.is_finished():
            break
    return "mask"


def peak_mib() -> int:
    """Most memory this process ever held. Not ru_maxrss: that begins with what the parent held when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def main() -> None:
    vocabulary = load_tokenizer(resolve_model_path("smollm2-135m")).vocabulary()
    compilers = {name: GrammarCompiler(vocabulary, backend=name) for name in ("compressed", "llguidance")}
    for number, (backend, name, spec) in enumerate(cases()):
        compiler = compilers[backend]
        try:
            outcome = walk(compiler.compile(spec), vocabulary)
        except ConstraintError as error:
            outcome = error.code
        served = walk(compiler.compile(ConstraintSpec.regex(f"next {number}")), vocabulary) == "mask"
        line = {"case": f"{backend}, {name}", "outcome": outcome, "next": served, "peak_mib": peak_mib()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
