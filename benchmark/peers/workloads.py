"""What is measured: requests that depend on a workload and a seed alone, and what counts as a good answer.

Prompts are random tokens, new for every pair of runs, so that nobody finds them in a cache; those of W4 are questions in
the model's chat format, behind a number that is new as well.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jsonschema

from benchmark.peers.wire import Output, Request

FIRST_TOKEN, LAST_TOKEN = 100, 40_000  # ordinary text in the default model's vocabulary
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "hobbies": {
                "type": "array",
                "items": {"type": "string", "maxLength": 20},
                "minItems": 3,
                "maxItems": 3,
            },
        },
        "required": ["name", "age", "hobbies"],
        "additionalProperties": False,
    }
)
SHEET_TOKENS = 160  # more than any answer of that schema takes
JOBS = ("baker", "pilot", "teacher", "farmer", "nurse", "painter", "sailor", "tailor")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Workload:
    """measures: the requests are sent once for each of them, one after the other, each measured.

    make: a seed and a tokenizer → requests. unit: of ``value``. first: so many requests are sent ahead, alone, by a
    peer; Trellis gets all at once.
    """

    name: str
    title: str
    unit: str
    make: Callable[[random.Random, Encode], list[Request]]
    measures: tuple[str, ...] = ("",)
    first: int = 0

    @property
    def constrained(self) -> bool:
        return self.unit == "characters/s"

    @property
    def higher_is_better(self) -> bool:
        return self.unit != "s"

    def value(self, seconds: float, requests: Sequence[Request], outputs: Sequence[Output]) -> float:
        """What the table shows, in ``unit``."""
        if self.unit == "s":
            return seconds
        if self.unit == "prompt tokens/s":
            return sum(len(each.prompt) for each in requests) / seconds
        if self.constrained:
            return sum(characters(each.text) for each in outputs) / seconds
        return sum(each.tokens for each in outputs) / seconds


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def _plain(count: int, prompt: int, output: int) -> Callable[[random.Random, Encode], list[Request]]:
    return lambda rng, _: [Request(random_tokens(rng, prompt), output) for _ in range(count)]


def _shared_prefix(rng: random.Random, _: Encode) -> list[Request]:
    prefix = random_tokens(rng, 1_000)
    return [Request(prefix + random_tokens(rng, 40), 16) for _ in range(32)]


def _sheets(rng: random.Random, encode: Encode) -> list[Request]:
    texts = (
        f"<|im_start|>system\nFile {rng.randrange(10**6)}. Answer in JSON with name, age and three hobbies.<|im_end|>\n"
        f"<|im_start|>user\nInvent a {job}.<|im_end|>\n<|im_start|>assistant\n"
        for job in JOBS
    )
    return [Request(encode(text), SHEET_TOKENS, SCHEMA) for text in texts]


WORKLOADS = (
    Workload("W1", "one stream, 128 in, 128 out", "tokens/s", _plain(1, 128, 128)),
    Workload("W2-8", "8 at once, 128 in, 64 out", "tokens/s", _plain(8, 128, 64)),
    Workload("W2-32", "32 at once, 128 in, 64 out", "tokens/s", _plain(32, 128, 64)),
    Workload("W3", "32 at once, new common prefix of 1,000", "s", _shared_prefix, ("cold", "warm repeat")),
    Workload("W3-primed", "the same, the peer is sent one ahead", "s", _shared_prefix, first=1),
    Workload("W4", "8 JSON records of a schema", "characters/s", _sheets),
    Workload("W5", "prefill of 2,048, 1 out", "prompt tokens/s", _plain(1, 2_048, 1)),
)


def characters(text: str) -> int:
    """Of a JSON text in one spelling, so that blanks count for nobody; of anything else, runs of blanks count once."""
    try:
        return len(json.dumps(json.loads(text), ensure_ascii=False))
    except ValueError:
        return len(re.sub(r"\s+", " ", text))


def valid(text: str, schema: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), json.loads(schema))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def valid_answers(requests: Sequence[Request], outputs: Sequence[Output]) -> int:
    """How many do what their schema says. ValueError for an answer that is missing or not as long as was asked."""
    if len(outputs) != len(requests):
        raise ValueError(f"{len(requests)} requests got {len(outputs)} answers")
    found = 0
    for at, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        if request.schema is None and output.tokens != request.max_tokens:
            raise ValueError(f"answer {at} has {output.tokens} tokens instead of {request.max_tokens}")
        found += request.schema is None or valid(output.text, request.schema)
    return found
