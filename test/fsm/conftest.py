"""Vocabularies and random patterns that the tests of this folder share."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trellis.fsm import Vocabulary

CORPUS = [
    "the name of the city is Paris and the population is 2,140,000 people; the area is 105.4 km2",
    '{"name": "Anna", "age": 31, "house": "Gryffindor", "alive": true, "wand": {"wood": "holly"}}',
    "2024-11-30T12:34:56Z 192.168.0.1 someone@example.com +49 (30) 123-4567 #ff00aa",
    "Die Größe der Straße: schön, naïve café déjà vu, Ærøskøbing, ñandú, 東京 と 大阪 の 漢字, 한국어, 😀😁🎉",
    "abc abd abcd aab aabb ab ba aaa aaaa bbb cab xyz x y z yes no maybe north south east west",
    "def gen(s): return [i for i in range(10)]\n    # comment\n\n\tx = {}\n",
]


@dataclass(frozen=True)
class Pattern:
    """A random regex and a way to draw texts that it probably matches.

    loops: depth of repeats in repeats; what is deeper takes the backtracking oracle too long.
    """

    text: str
    sample: Callable[[random.Random], str]
    loops: int = 0


def byte_decoder() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def train_tokenizer(vocab_size: int = 700) -> Tokenizer:
    """A small byte-level BPE; the same on every run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer, without: Callable[[bytes], bool], name: str) -> Vocabulary:
    """The tokenizer's vocabulary; tokens for which ``without`` is true stand for nothing."""
    decoder = byte_decoder()
    size = tokenizer.get_vocab_size()
    special = {tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("<pad>")}
    data = [b""] * size
    for text, token in tokenizer.get_vocab().items():
        if token not in special:
            raw = bytes(decoder[c] for c in text)
            data[token] = b"" if without(raw) else raw
    eos = frozenset({tokenizer.token_to_id("<eos>")})
    return Vocabulary(data, size + 5, eos, lambda text: tokenizer.encode(text).ids, name)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return train_tokenizer()


@pytest.fixture(scope="session")
def tiny(tiny_tokenizer: Tokenizer) -> Vocabulary:
    """Byte-level BPE with every byte."""
    return vocabulary_of(tiny_tokenizer, lambda _: False, "tiny")


@pytest.fixture(scope="session")
def gapped(tiny_tokenizer: Tokenizer) -> Vocabulary:
    """Lacks the digit 7 and byte 0xF0 everywhere, and some bytes of longer characters as single tokens."""
    alone = {b"\xa9", b"\xe6", b"\x9d", b"\xbc", b"\xc3"}
    return vocabulary_of(tiny_tokenizer, lambda raw: b"7" in raw or b"\xf0" in raw or raw in alone, "gapped")


@pytest.fixture(scope="session")
def model_vocabulary() -> Vocabulary:
    """The default model's vocabulary."""
    models_module = pytest.importorskip("trellis.runtime.models")
    return models_module.load_tokenizer(models_module.resolve_model_path("smollm2-135m")).vocabulary()


# --- random patterns ---------------------------------------------------------------------------------------

_LETTERS = 'abcxyzKk 01_-.é\u0301ß漢字😀ſKİ\n"{'
_CATEGORIES = {r"\d": "0७9", r"\w": "aZ_é漢0", r"\s": " \n\u00a0", r"\D": "a- ", r"\W": " -😀", r"\S": "a-é"}


def _escape(char: str) -> str:
    return re.escape(char)


def _literal(char: str) -> Pattern:
    return Pattern(_escape(char), lambda rng: rng.choice([char, char, char, char.swapcase()]))


def _category(name: str) -> Pattern:
    return Pattern(name, lambda rng: rng.choice(_CATEGORIES[name]))


def _class(members: list[str], negated: bool) -> Pattern:
    text = "".join(
        f"{_escape(min(m))}-{_escape(max(m))}" if len(m) == 2 else (m if m in _CATEGORIES else _escape(m))
        for m in members
    )
    inside = "".join(_CATEGORIES.get(m, m) for m in members)
    pool = _LETTERS if negated else inside
    return Pattern(f"[{'^' if negated else ''}{text}]", lambda rng: rng.choice(pool))


def _join(parts: list[Pattern]) -> Pattern:
    loops = max(p.loops for p in parts)
    return Pattern("".join(p.text for p in parts), lambda rng: "".join(p.sample(rng) for p in parts), loops)


def _either(parts: list[Pattern], wrap: str) -> Pattern:
    text = wrap + "|".join(p.text for p in parts) + ")"
    return Pattern(text, lambda rng: rng.choice(parts).sample(rng), max(p.loops for p in parts))


def _repeat(body: Pattern, quantifier: tuple[str, int, int], mode: str) -> Pattern:
    text, lo, hi = quantifier
    return Pattern(
        f"(?:{body.text}){text}{mode}",
        lambda rng: "".join(body.sample(rng) for _ in range(rng.randint(lo, hi))),
        body.loops + 1,
    )


_member = st.one_of(
    st.sampled_from(_LETTERS),
    st.sampled_from(["az", "09", "AZ", "Zé", "一龥", "😀🎉", "À\u00ff"]),
    st.sampled_from(sorted(_CATEGORIES)),
)
_atom = st.one_of(
    st.sampled_from(_LETTERS).map(_literal),
    st.sampled_from(_LETTERS).map(_literal),
    st.sampled_from(sorted(_CATEGORIES)).map(_category),
    st.just(Pattern(".", lambda rng: rng.choice(_LETTERS))),
    st.builds(_class, st.lists(_member, min_size=1, max_size=4), st.booleans()),
    st.sampled_from(["", "", "", "^", "$", r"\A", r"\Z"]).map(lambda mark: Pattern(mark, lambda _: "")),
)
_quantifiers = st.sampled_from(
    [("*", 0, 3), ("+", 1, 3), ("?", 0, 1), ("{2}", 2, 2), ("{1,3}", 1, 3), ("{,2}", 0, 2), ("{2,}", 2, 4)]
)
_MODERN = sys.version_info >= (3, 11)  # possessive quantifiers and atomic groups
_wraps = st.sampled_from(
    ["(", "(?:", "(?i:", "(?s:", "(?a:", "(?-i:", "(?ai:", "(?m:", *(["(?>"] if _MODERN else [])]
)
_modes = st.sampled_from(["", "", "?", *(["+"] if _MODERN else [])])


def _grow(inner: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
    return st.one_of(
        st.lists(inner, min_size=2, max_size=4).map(_join),
        st.builds(_either, st.lists(inner, min_size=1, max_size=3), _wraps),
        st.builds(_repeat, inner.filter(lambda p: p.loops < 2), _quantifiers, _modes),
    )


def _framed(body: Pattern, start: str, end: str, flags: str) -> Pattern:
    text = f"{flags}{start}(?:{body.text}){end}"
    return Pattern(text, lambda rng: body.sample(rng) + rng.choice(["", "", "", "\n"]))


PATTERNS = st.builds(
    _framed,
    st.recursive(_atom, _grow, max_leaves=8),
    st.sampled_from(["", "", "^", r"\A"]),
    st.sampled_from(["", "", "$", r"\Z"]),
    st.sampled_from(["", "", "", "(?i)", "(?s)", "(?a)", "(?m)"]),
)


def mutate(text: str, rng: random.Random) -> str:
    """A text near this one."""
    at = rng.randrange(len(text) + 1)
    return rng.choice(
        [
            text[:at] + text[at + 1 :],
            text[:at] + rng.choice(_LETTERS) + text[at:],
            text + text[at:],
            text[at:],
        ]
    )


@dataclass(frozen=True)
class RandomPatterns:
    """strategy: hypothesis strategy of ``Pattern``; texts: texts near a pattern, about half of them matches."""

    strategy: st.SearchStrategy[Pattern] = PATTERNS

    def texts(self, pattern: Pattern, rng: random.Random, count: int) -> list[str]:
        out = []
        for _ in range(count):
            text = pattern.sample(rng)
            out += [text, mutate(text, rng)]
        return [text for text in out if len(text) < 20]


@pytest.fixture(scope="session")
def patterns() -> RandomPatterns:
    return RandomPatterns()
