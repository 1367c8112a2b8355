"""What forced runs save on character sheets and cities: ``python -m benchmark.jump_forward``.

For each task: forward passes of all requests without and with jump-forward; for how many prompts both give the
same token ids (greedy; in float32, as batches of other shapes round otherwise); and the time of ``--concurrent``
requests that run together, without ÷ with.
"""

from __future__ import annotations

import argparse

from benchmark.harness import Comparison, compare, report
from benchmark.sharing import run
from benchmark.tasks import Task, character_sheets, cities
from trellis.runtime.config import ServerConfig
from trellis.runtime.engine import InProcessEngine
from trellis.runtime.manager.types import GenerateInput
from trellis.runtime.messages import Constraint, SamplingParams


def inputs(task: Task, jump: bool, count: int | None = None) -> list[GenerateInput]:
    params = SamplingParams(max_new_tokens=task.max_new_tokens, temperature=0.0)
    constraint = Constraint("regex", task.pattern)
    return [
        GenerateInput(prompt=prompt, params=params, constraint=constraint, jump_forward=jump)
        for prompt in task.prompts[:count]
    ]


def same_ids(engine: InProcessEngine, task: Task) -> None:
    """Run all prompts both ways; print passes and agreement, and every pair that differs."""
    without, jumped = (run(engine, inputs(task, jump)) for jump in (False, True))
    pairs = list(zip(task.prompts, without, jumped, strict=True))
    same = sum(a.token_ids == b.token_ids for _, a, b in pairs)
    cut = sum(r.finish is None or r.finish.type != "stop" for r in jumped)
    passes = [sum(r.counts.forward_passes for r in results) for results in (without, jumped)]
    tokens = sum(r.counts.completion_tokens for r in jumped)
    forced = sum(r.counts.forced_tokens for r in jumped)
    print(
        f"{task.name}: {len(pairs)} prompts, {same} with the same ids; {tokens} tokens, {forced / tokens:.0%} forced; "
        f"forward passes {passes[0]} ÷ {passes[1]} = {passes[0] / passes[1]:.2f}x; {cut} not finished"
    )
    for prompt, a, b in pairs:
        if a.token_ids != b.token_ids:
            print(f"  differs: {prompt!r}\n    without: {a.text!r}\n    with:    {b.text!r}")


def speed(engine: InProcessEngine, task: Task, concurrent: int, rounds: int) -> Comparison:
    return compare(
        f"{concurrent} at once, {task.name}: no jump ÷ jump",
        lambda: run(engine, inputs(task, False, concurrent)),
        lambda: run(engine, inputs(task, True, concurrent)),
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=100, help="0 leaves the comparison of ids out")
    parser.add_argument("--concurrent", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="0 leaves the timing out")
    options = parser.parse_args()
    if options.prompts:
        engine = InProcessEngine(ServerConfig(model_path=options.model_path, dtype="float32"))
        try:
            for task in (character_sheets(options.prompts), cities(options.prompts)):
                same_ids(engine, task)
        finally:
            engine.close()
    if options.rounds:
        engine = InProcessEngine(ServerConfig(model_path=options.model_path))
        try:
            timed = [
                speed(engine, task, options.concurrent, options.rounds)
                for task in (character_sheets(options.concurrent), cities(options.concurrent))
            ]
        finally:
            engine.close()
        report("jump_forward", timed, f"{'':<44} {'without':>11} {'with':>11}   ratio (spread)")


if __name__ == "__main__":
    main()
