"""What the radix tree, same-step sharing and jump-forward save: ``python -m benchmark.sharing``.

Each line runs the same requests on the same engine with one idea switched off and on, in alternation, and
prints seconds and their ratio. "Off" for the cache means a namespace of its own for every request.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

from benchmark.harness import Comparison, compare, report
from trellis.runtime.config import ServerConfig
from trellis.runtime.engine import InProcessEngine
from trellis.runtime.manager.types import GenerateInput
from trellis.runtime.messages import Constraint, SamplingParams

SHEET = (
    r'\{"name": "[A-Z][a-z]{2,12}", "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)", '
    r'"blood status": "(Pure-blood|Half-blood|Muggle-born)", "occupation": "(student|teacher|healer)", '
    r'"wand": \{"wood": "[a-z]{3,10}", "length": [0-9]{2}\}, "alive": "(Alive|Deceased)"\}'
)


def run(engine: InProcessEngine, inputs: list[GenerateInput]) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*(engine.manager.generate(each) for each in inputs))

    engine.control("flush_cache")
    return asyncio.run(together())


def tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(n)]


def shared_prefix(engine: InProcessEngine, requests: int, rounds: int) -> Comparison:
    """Requests that arrive together with one new 1,000-token prefix and 40-token suffixes, 16 tokens out."""
    rng = random.Random(0)
    prefix = tokens(rng, 1_000)
    prompts = [prefix + tokens(rng, 40) for _ in range(requests)]
    params = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)

    def inputs(isolated: bool) -> list[GenerateInput]:
        return [
            GenerateInput(prompt=p, params=params, namespace=str(i) if isolated else "")
            for i, p in enumerate(prompts)
        ]

    return compare(
        f"{requests} requests, common new prefix: no cache ÷ radix",
        lambda: run(engine, inputs(True)),
        lambda: run(engine, inputs(False)),
        rounds,
    )


def jump_forward(engine: InProcessEngine, requests: int, rounds: int) -> Comparison:
    """A character sheet by regex, eight at once: every token sampled against forced runs in one extend."""
    params = SamplingParams(max_new_tokens=160, temperature=0.0)
    names = [
        "Harry Potter",
        "Severus Snape",
        "Luna Lovegood",
        "Ron Weasley",
        "Draco Malfoy",
        "Minerva",
        "Hagrid",
        "Dobby",
    ]

    def inputs(jump: bool) -> list[GenerateInput]:
        return [
            GenerateInput(
                prompt=f"{name} is a character. As JSON: ",
                params=params,
                constraint=Constraint("regex", SHEET),
                jump_forward=jump,
            )
            for name in names[:requests]
        ]

    passes = {jump: sum(r.counts.forward_passes for r in run(engine, inputs(jump))) for jump in (False, True)}
    return compare(
        f"{requests} character sheets: no jump ÷ jump-forward",
        lambda: run(engine, inputs(False)),
        lambda: run(engine, inputs(True)),
        rounds,
        note=f"forward passes {passes[False]} ÷ {passes[True]} = {passes[False] / passes[True]:.2f}x",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    engine = InProcessEngine(ServerConfig(model_path=options.model_path, max_total_tokens=24_576))
    try:
        report(
            "sharing",
            [
                shared_prefix(engine, options.requests, options.rounds),
                jump_forward(engine, 8, options.rounds),
            ],
            f"{'':<44} {'without':>11} {'with':>11}   ratio (spread)",
        )
    finally:
        engine.close()


if __name__ == "__main__":
    main()
