"""What the language itself costs: ``python -m benchmark.language``.

1,000 program states at the same time on the mock backend, which answers after one millisecond; every state makes
its gens one after the other and reads each. Prints gens a second and the most memory that the process ever had
resident, each kind in a fresh process, the kinds in turns, medians of the rounds. Then the time that
``import trellis`` takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmark.harness import RESULTS

LATENCY = 0.001  # seconds


@dataclass(frozen=True)
class Outcome:
    """gens: gens a second, wall time. cpu: microseconds of processor time a gen. megabytes: peak resident."""

    kind: str
    gens: float
    cpu: float
    megabytes: float


def threads(states: int, gens: int) -> None:
    """Plain programs, a thread each, so that all states are there at the same time."""
    from trellis import MockBackend, ProgramState, function, gen

    @function
    def program(s: ProgramState, item: int) -> None:
        s += f"item {item}: "
        for index in range(gens):
            s += f"q{index} " + gen("answer")
            s["answer"]

    backend = MockBackend("an answer", latency=LATENCY)
    program.run_batch([(item,) for item in range(states)], num_threads=states, backend=backend)
    assert len(backend.requests) == states * gens


def appended(states: int, gens: int) -> None:
    """One plain program that forks the states, appends to all of them, and reads when all has been appended."""
    from trellis import MockBackend, ProgramState, function, gen

    @function
    def program(s: ProgramState) -> None:
        branches = s.fork(states)
        for index in range(gens):
            branches += lambda item, index=index: f"{item} q{index} " + gen("answer")
        branches.join()

    backend = MockBackend("an answer", latency=LATENCY)
    program.run(backend=backend)
    assert len(backend.requests) == states * gens


def tasks(states: int, gens: int, inside: bool) -> None:
    """Async programs; inside: called from a running event loop."""
    from trellis import AsyncProgramState, MockBackend, function, gen

    @function
    async def program(s: AsyncProgramState, item: int) -> None:
        s += f"item {item}: "
        for index in range(gens):
            s += f"q{index} " + gen("answer")
            await s["answer"]

    backend = MockBackend("an answer", latency=LATENCY)
    items = [(item,) for item in range(states)]
    if inside:
        asyncio.run(program.run_batch_async(items, num_threads=states, backend=backend))
    else:
        program.run_batch(items, num_threads=states, backend=backend)
    assert len(backend.requests) == states * gens


KINDS: dict[str, Callable[[int, int], None]] = {
    "run_batch, plain programs": threads,
    "fork, plain program": appended,
    "run_batch, async programs": lambda states, gens: tasks(states, gens, inside=False),
    "run_batch_async, async programs": lambda states, gens: tasks(states, gens, inside=True),
}


def measure(kind: str, states: int, gens: int) -> Outcome:
    """In this process, which should be a fresh one."""
    wall, cpu = time.perf_counter(), time.process_time()
    KINDS[kind](states, gens)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    count = states * gens
    return Outcome(kind, count / wall, cpu / count * 1e6, peak)


def in_turns(states: int, gens: int, rounds: int) -> list[Outcome]:
    """Medians of the rounds, kind by kind."""
    found: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            command = [sys.executable, "-m", "benchmark.language", "--only", kind]
            command += ["--states", str(states), "--gens", str(gens)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[kind].append(Outcome(**json.loads(done.stdout)))
    return [
        Outcome(
            kind,
            statistics.median(o.gens for o in outcomes),
            statistics.median(o.cpu for o in outcomes),
            statistics.median(o.megabytes for o in outcomes),
        )
        for kind, outcomes in found.items()
    ]


def import_milliseconds(statement: str, rounds: int) -> float:
    """Median over fresh interpreters of what ``-X importtime`` says of the last line: the package and all below."""
    found = []
    for _ in range(rounds):
        command = [sys.executable, "-X", "importtime", "-c", statement]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
        own = [line for line in lines if line.split("|")[-1].strip().startswith("trellis")]
        roots = [line for line in own if not line.split("|")[-1].startswith("  ")]
        found.append(sum(int(line.split("|")[1]) for line in roots) / 1000)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--gens", type=int, default=10, help="gens a state, one after the other")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=KINDS, help="measure one kind, in this process; prints JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(asdict(measure(options.only, options.states, options.gens))))
        return
    outcomes = in_turns(options.states, options.gens, options.rounds)
    print(
        f"{options.states} states, {options.gens} gens each, latency {LATENCY * 1000:g} ms; medians of {options.rounds}"
    )
    print(f"{'':<34} {'gens/s':>8} {'CPU us/gen':>11} {'peak MB':>8}")
    for o in outcomes:
        print(f"{o.kind:<34} {o.gens:8.0f} {o.cpu:11.0f} {o.megabytes:8.1f}")
    imports = {s: import_milliseconds(s, 7) for s in ("import trellis", "from trellis import function")}
    for statement, milliseconds in imports.items():
        print(f"{statement:<34} {milliseconds:8.1f} ms, median of 7")
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "language.jsonl").open("a", encoding="utf-8") as lines:
        for o in outcomes:
            record = {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "states": options.states, **asdict(o)}
            lines.write(json.dumps(record) + "\n")
        lines.write(json.dumps({"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "import_ms": imports}) + "\n")


if __name__ == "__main__":
    main()
