"""The backends that the language tests run on, and what the mock among them answers."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from trellis.frontend import MockBackend
from trellis.frontend.backends.base import Constraint, GenerateRequest
from trellis.fsm import ConstraintSpec, Vocabulary, compile_grammar

EOS = 256
# What ends a text comes first, so that the walk through a grammar is short.
_PREFERRED = b'"}]0aA' + bytes(range(33, 256)) + bytes(range(33))


@dataclass(frozen=True)
class Language:
    """A backend for the language tests. real: a model answers. tells_stats: ``server_info`` has running_requests."""

    name: str
    backend: Any
    real: bool = True
    tells_stats: bool = True


def mock_language() -> Language:
    return Language(
        "mock", MockBackend(_answer, scores=_scores, alone=_scores), real=False, tells_stats=False
    )


def _answer(request: GenerateRequest) -> str:
    if request.constraint is None:
        return "One sentence. Another one!\nAnd a third."
    return spelled(request.constraint)


def _scores(_prompt: str, options: Any) -> list[list[float]]:
    """The shorter the likelier, a token a word."""
    return [[-0.1 * len(word) for word in MockBackend.tokens(option)] for option in options]


@functools.lru_cache(maxsize=64)
def spelled(constraint: Constraint) -> str:
    """A short text that satisfies a constraint, byte by byte as our own grammars allow it."""
    if constraint.kind == "choices":
        first: str = json.loads(constraint.source)[0]
        return first
    spec = ConstraintSpec(constraint.kind, constraint.source, constraint.spacing, constraint.strict)  # type: ignore[arg-type]
    matcher = compile_grammar(spec, _byte_vocabulary()).matcher()
    written = bytearray()
    row = np.zeros(_byte_vocabulary().mask_words, np.int32)
    while not matcher.is_accepting():
        assert len(written) < 1000, f"no short text of {constraint}"
        matcher.fill_mask(row)
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little")
        byte = next(each for each in _PREFERRED if allowed[each])
        assert matcher.accept(byte)
        written.append(byte)
    return written.decode()


@functools.lru_cache(maxsize=1)
def _byte_vocabulary() -> Vocabulary:
    return Vocabulary(
        token_bytes=[*(bytes([byte]) for byte in range(256)), b""],
        size=257,
        eos_token_ids=frozenset({EOS}),
        encode=lambda text: list(text.encode()),
        fingerprint="bytes of the language tests",
    )
