"""What a constraint costs and saves: time to compile and to mask, and the share of tokens that is forced.

    python -m benchmark.constraints [--model smollm2-135m] [--repeat 5] [--json FILE]

Columns: ready = compile and first mask (median, ms; a grammar nobody has compiled before); cold = the slowest
later mask along the sample (ms); warm = a mask that is kept (median, µs); forced = share of the sample's tokens
that took no choice; jumps = forced runs; states and KiB of the automaton after the sample.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from trellis.fsm import ConstraintSpec, Grammar, Matcher, Vocabulary, compile_grammar
from trellis.runtime.models import load_tokenizer, resolve_model_path


@dataclass(frozen=True)
class Case:
    """A constraint and a text that satisfies it."""

    name: str
    spec: ConstraintSpec
    sample: str


@dataclass(frozen=True)
class Row:
    name: str
    ready_ms: float
    cold_ms: float
    warm_us: float
    tokens: int
    forced_share: float
    jumps: int
    kib: int


CHARACTER = (
    r'\{\n    "name": "[\w ]{1,16}",\n    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    r'    "wand": \{\n        "wood": "[\w ]{1,16}",\n        "core": "[\w ]{1,16}",\n'
    r'        "length": [0-9]{1,2}\.[0-9]{0,2}\n    \},\n    "alive": "(Alive|Deceased)",\n'
    r'    "patronus": "[\w ]{1,16}",\n    "bogart": "[\w ]{1,16}"\n\}'
)
CHARACTER_SAMPLE = """{
    "name": "Hermione Granger",
    "house": "Gryffindor",
    "blood status": "Muggle-born",
    "occupation": "student",
    "wand": {
        "wood": "vine",
        "core": "dragon heart",
        "length": 10.75
    },
    "alive": "Alive",
    "patronus": "otter",
    "bogart": "failure"
}"""
CITY = (
    r'\{"name": "[^"\n]{1,40}", "country": "[^"\n]{1,40}", "latitude": -?\d{1,2}\.\d{1,4}, '
    r'"longitude": -?\d{1,3}\.\d{1,4}, "population": \d{1,9}, "top 3 landmarks": '
    r'\["[^"\n]{1,40}", "[^"\n]{1,40}", "[^"\n]{1,40}"\]\}'
)
CITY_SAMPLE = (
    '{"name": "Paris", "country": "France", "latitude": 48.8566, "longitude": 2.3522, "population": 2148000, '
    '"top 3 landmarks": ["Eiffel Tower", "Louvre Museum", "Notre-Dame"]}'
)


def regex(name: str, pattern: str, sample: str) -> Case:
    return Case(name, ConstraintSpec.regex(pattern), sample)


def words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    parts = [
        "an",
        "ber",
        "co",
        "da",
        "el",
        "fi",
        "gor",
        "hu",
        "in",
        "ka",
        "lo",
        "mi",
        "na",
        "or",
        "pe",
        "st",
        "tu",
    ]
    return sorted({"".join(rng.choices(parts, k=rng.randint(2, 6))) for _ in range(count * 2)})[:count]


def cases() -> list[Case]:
    fifty, many = words(50, 1), words(10_000, 2)
    email = r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*\.[a-zA-Z]{2,}"
    octet = r"(25[0-5]|2[0-4]\d|1?\d?\d)"
    prose = "Once upon a time there was a small town by the sea, and nobody knew its name. " * 3
    return [
        regex("e-mail", email, "ada.lovelace@analytical-engine.org"),
        regex("IPv4", rf"({octet}\.){{3}}{octet}", "192.168.100.254"),
        regex("date", r"\d{4}-\d{2}-\d{2}", "2024-11-30"),
        regex("phone", r"\(\d{3}\) \d{3}-\d{4}", "(212) 555-0187"),
        Case("50 choices", ConstraintSpec.choices(fifty), fifty[25]),
        Case("10,000 choices", ConstraintSpec.choices(many), many[5000]),
        regex("quoted string", r'"[^"\n]*"', f'"{prose.strip()}"'),
        regex(".{0,1000}", r".{0,1000}", prose.strip()),
        regex(r"(\w+\s?){1,100}", r"(\w+\s?){1,100}", prose.replace(",", "").replace(".", "").strip()),
        regex("character sheet", CHARACTER, CHARACTER_SAMPLE),
        regex("city", CITY, CITY_SAMPLE),
    ]


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def follow(matcher: Matcher, ids: list[int], row: np.ndarray) -> tuple[float, int, int]:
    """Slowest mask, forced tokens and jumps along the tokens of the sample."""
    slowest, forced, jumps, at = 0.0, 0, 0, 0
    while at < len(ids):
        run = matcher.forced()
        if run:
            forced, jumps = forced + len(run), jumps + 1
        else:
            slowest = max(slowest, timed(lambda: matcher.fill_mask(row)))
        for token in run or ids[at : at + 1]:
            if token != ids[at] or not matcher.accept(token):
                raise SystemExit(f"token {at} of the sample: {token} where the model spells {ids[at]}")
            at += 1
    return slowest, forced, jumps


def measure(case: Case, vocabulary: Vocabulary, repeat: int) -> Row:
    row = np.empty(vocabulary.mask_words, np.int32)
    made: list[Grammar] = []

    def make_ready() -> None:
        made.append(compile_grammar(case.spec, vocabulary))
        made[-1].matcher().fill_mask(row)

    ready = statistics.median(timed(make_ready) for _ in range(repeat))
    grammar = made[-1]
    if not grammar.accepts(case.sample):
        raise SystemExit(f"{case.name}: the sample does not satisfy the constraint")
    ids = vocabulary.encode(case.sample)
    slowest, forced, jumps = follow(grammar.matcher(), ids, row)
    matcher = grammar.matcher()
    warm = statistics.median(timed(lambda: matcher.fill_mask(row)) for _ in range(2000))
    return Row(
        case.name,
        ready * 1e3,
        slowest * 1e3,
        warm * 1e6,
        len(ids),
        forced / len(ids),
        jumps,
        grammar.nbytes >> 10,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m", help="name or path; only its tokenizer is read")
    parser.add_argument("--repeat", type=int, default=5, help="compiles a constraint this often")
    parser.add_argument("--json", type=Path, help="write the rows as JSON lines")
    options = parser.parse_args()
    vocabulary = load_tokenizer(resolve_model_path(options.model)).vocabulary()
    shared = timed(lambda: compile_grammar(ConstraintSpec.regex(r"(?i)\w\d\s"), vocabulary))
    print(
        f"{options.model}: {vocabulary.size} tokens; trie and character tables, once: {shared * 1e3:.0f} ms"
    )
    print(
        f"{'constraint':18} {'ready ms':>9} {'cold ms':>8} {'warm µs':>8} {'tokens':>7} {'forced':>7} {'jumps':>6} {'KiB':>7}"
    )
    rows = [measure(case, vocabulary, options.repeat) for case in cases()]
    for r in rows:
        print(
            f"{r.name:18} {r.ready_ms:9.2f} {r.cold_ms:8.2f} {r.warm_us:8.2f} {r.tokens:7} "
            f"{r.forced_share:7.0%} {r.jumps:6} {r.kib:7}"
        )
    if options.json:
        options.json.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))


if __name__ == "__main__":
    main()
