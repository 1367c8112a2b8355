"""JSON schemas with instances: what is compiled, what is refused, whether masks are right, and what they cost.

    python -m benchmark.structured --data FILE [--engine auto] [--no-strict] [--spacing spaced] [--limit N] [--json OUT]

FILE holds JSON lines ``{id, schema, tests: [{valid, data}]}``. Every schema is compiled in a worker process that
is replaced when it crashes or overruns the deadline. An instance counts as accepted if masks let one of its
spellings through: as it is given, with the members of its objects in another order (a search looks for one),
with whole numbers written as integers. What passes is also validated; with ``--no-strict`` that is part
of the answer, in strict mode the masks alone must be right.

Times are CPU seconds of the worker's one thread. Masks are timed along the valid instances.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.spellings import accepted_spelling, write
from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Grammar, Vocabulary, compile_grammar
from trellis.runtime.models import load_tokenizer, resolve_model_path

_START_S = 120.0  # for a worker to load the tokenizer and to build its tables
_TRIES_VALID, _TRIES_INVALID = 200, 20
_SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":"), "any": (", ", ": ")}


@dataclass(frozen=True)
class Job:
    engine: str
    strict: bool
    spacing: str
    model: str


@dataclass
class Outcome:
    """What became of one schema. status: compiled, refused, timeout or crash. reason: why not compiled.

    rejected, accepted: positions of valid instances that were rejected and of invalid ones that were accepted.
    unvalidated: positions of instances whose final check disagrees with the label. compile_s: CPU seconds, with
    the first mask. mask_s: of every mask. tokens, forced: along the valid instances.
    """

    id: str
    status: str
    reason: str = ""
    valid: int = 0
    invalid: int = 0
    rejected: list[int] = field(default_factory=list)
    reordered: int = 0
    accepted: list[int] = field(default_factory=list)
    unvalidated: list[int] = field(default_factory=list)
    compile_s: float = 0.0
    mask_s: list[float] = field(default_factory=list)
    tokens: int = 0
    forced: int = 0
    validated_only: list[str] = field(default_factory=list)


class Judge:
    """Compiles the schemas of one worker and follows their instances."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._vocabulary: Vocabulary = load_tokenizer(resolve_model_path(job.model)).vocabulary()
        self._row = np.zeros(self._vocabulary.mask_words, np.int32)
        self._compile(ConstraintSpec.schema({"type": "object"}))  # builds the tables of the vocabulary

    def _compile(self, spec: ConstraintSpec) -> Grammar:
        return compile_grammar(spec, self._vocabulary, self._job.engine)

    def __call__(self, case: dict[str, Any]) -> Outcome:
        outcome = Outcome(case["id"], "compiled")
        source = json.dumps(case["schema"], ensure_ascii=False)
        spec = ConstraintSpec("schema", source, self._job.spacing, self._job.strict)  # type: ignore[arg-type]
        started = time.thread_time()
        try:
            grammar = self._compile(spec)
            grammar.matcher().fill_mask(self._row)
        except ConstraintError as refusal:
            outcome.status = "timeout" if refusal.code == "timeout" else "refused"
            outcome.reason = f"{refusal.code}: {refusal}"
            return outcome
        finally:
            outcome.compile_s = time.thread_time() - started
        outcome.validated_only = list(getattr(grammar, "validated_only", []))
        for i, test in enumerate(case["tests"]):
            self._instance(i, test, case["schema"], grammar, outcome)
        return outcome

    def _instance(
        self, i: int, test: dict[str, Any], schema: Any, grammar: Grammar, outcome: Outcome
    ) -> None:
        validate = getattr(grammar, "validate", lambda _text: None)
        separators = _SEPARATORS[self._job.spacing]
        checked = validate(write(test["data"], separators).text) is None
        tries = _TRIES_VALID if test["valid"] else _TRIES_INVALID
        text, as_given = accepted_spelling(
            test["data"], schema, separators, tries, lambda text: self._reach(grammar, text)
        )
        if checked != test["valid"]:
            outcome.unvalidated.append(i)
        if text is not None and test["valid"]:
            outcome.reordered += not as_given
            self._measure(grammar, text, outcome)
        accepted = text is not None and (checked or self._job.strict)
        if test["valid"]:
            outcome.valid += 1
            if not accepted:
                outcome.rejected.append(i)
        else:
            outcome.invalid += 1
            if accepted:
                outcome.accepted.append(i)

    def _reach(self, grammar: Grammar, text: str) -> int:
        """Characters that the masks let through; one more than there are if the text may end there."""
        matcher, ids = grammar.matcher(), self._vocabulary.encode(text)
        for at, token in enumerate(ids):
            if not matcher.accept(token):
                passed = b"".join(self._vocabulary.token_bytes[token] for token in ids[:at])
                return len(passed.decode("utf-8", "ignore"))
        return len(text) + matcher.is_accepting()

    def _measure(self, grammar: Grammar, text: str, outcome: Outcome) -> None:
        matcher, ids, at = grammar.matcher(), self._vocabulary.encode(text), 0
        while at < len(ids):
            run = matcher.forced()
            if run:
                outcome.forced += len(run)
            else:
                started = time.thread_time()
                matcher.fill_mask(self._row)
                outcome.mask_s.append(time.thread_time() - started)
                run = ids[at : at + 1]
            for token in run:
                matcher.accept(token)
            at += len(run)
        outcome.tokens += len(ids)


def work(job: Job, pipe: Connection) -> None:
    judge = Judge(job)
    pipe.send(None)
    while True:
        case = pipe.recv()
        if case is None:
            return
        try:
            pipe.send(judge(case))
        except Exception as error:
            pipe.send(Outcome(case["id"], "crash", f"{type(error).__name__}: {error}"))


class Worker:
    """A process that judges one case after another, and is replaced when it does not answer."""

    def __init__(self, job: Job, deadline_s: float) -> None:
        self._job = job
        self._deadline_s = deadline_s
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._pipe, far = self._context.Pipe()
        self._process = self._context.Process(target=work, args=(self._job, far), daemon=True)
        self._process.start()
        far.close()
        if not self._pipe.poll(_START_S):
            raise SystemExit("the worker process does not start")
        self._pipe.recv()

    def judge(self, case: dict[str, Any]) -> Outcome:
        self._pipe.send(case)
        try:
            if self._pipe.poll(self._deadline_s):
                outcome: Outcome = self._pipe.recv()
                return outcome
            outcome = Outcome(case["id"], "timeout", f"no answer within {self._deadline_s:g} s")
        except (EOFError, OSError):
            outcome = Outcome(case["id"], "crash", "the process died")
        self._process.kill()
        self._process.join()
        self._start()
        return outcome

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def refused_for(reason: str) -> str:
    """The keyword that a refusal names, or its code."""
    found = re.search(r"keyword '([^']*)'", reason)
    return found[1] if found else reason.partition(":")[0]


def summary(job: Job, outcomes: list[Outcome]) -> list[str]:
    count = Counter(outcome.status for outcome in outcomes)
    compiled = [outcome for outcome in outcomes if outcome.status == "compiled"]
    valid, invalid = sum(o.valid for o in compiled), sum(o.invalid for o in compiled)
    rejected, accepted = sum(len(o.rejected) for o in compiled), sum(len(o.accepted) for o in compiled)
    reordered = sum(o.reordered for o in compiled)
    right = sum(not o.rejected and not o.accepted for o in compiled)
    masks = [seconds for outcome in compiled for seconds in outcome.mask_s]
    compiles = [outcome.compile_s for outcome in outcomes]
    tokens, forced = sum(o.tokens for o in compiled), sum(o.forced for o in compiled)
    total = len(outcomes)
    lines = [
        f"engine {job.engine}, {'strict' if job.strict else 'not strict'}, spacing {job.spacing}: {total} schemas",
        f"  compiled {count['compiled']} ({count['compiled'] / total:.1%}), refused {count['refused']}, "
        f"timed out {count['timeout']}, crashed {count['crash']}",
        f"  valid instances rejected {rejected} of {valid} ({rejected / max(1, valid):.2%}) in any order; "
        f"with the members as given {rejected + reordered} ({(rejected + reordered) / max(1, valid):.2%}), the rest "
        "of which is accepted in another order of members or spelling of numbers",
        f"  invalid instances accepted {accepted} of {invalid}",
        f"  schemas right on all their instances {right} ({right / total:.1%})",
        f"  final check disagrees with the label on {sum(len(o.unvalidated) for o in compiled)} instances",
        f"  schemas with keywords that are only validated {sum(bool(o.validated_only) for o in compiled)}",
        f"  compile ms p50 {percentile(compiles, 0.5) * 1e3:.2f}  p99 {percentile(compiles, 0.99) * 1e3:.2f}  "
        f"max {max(compiles, default=0.0) * 1e3:.1f}",
        f"  mask us p50 {percentile(masks, 0.5) * 1e6:.1f}  p99 {percentile(masks, 0.99) * 1e6:.1f}  "
        f"max {max(masks, default=0.0) * 1e6:.0f}  ({len(masks)} masks)",
        f"  forced {forced} of {tokens} tokens ({forced / max(1, tokens):.1%})",
    ]
    refusals = Counter(refused_for(o.reason) for o in outcomes if o.status == "refused")
    lines.append(
        "  refused for: " + (", ".join(f"{name} {n}" for name, n in refusals.most_common()) or "nothing")
    )
    return lines


def details(outcomes: list[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.status != "compiled":
            yield f"  {outcome.status:8} {outcome.id}: {outcome.reason[:160]}"
        if outcome.rejected:
            yield f"  valid rejected   {outcome.id}: instances {outcome.rejected}"
        if outcome.accepted:
            yield f"  invalid accepted {outcome.id}: instances {outcome.accepted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--data", type=Path, required=True, help="JSON lines {id, schema, tests: [{valid, data}]}"
    )
    parser.add_argument("--engine", action="append", help="may be given several times; default: auto")
    parser.add_argument("--strict", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--spacing", choices=sorted(_SEPARATORS), default="spaced")
    parser.add_argument("--model", default="smollm2-135m", help="name or path; only its tokenizer is read")
    parser.add_argument(
        "--deadline", type=float, default=30.0, help="seconds for one schema and its instances"
    )
    parser.add_argument("--limit", type=int, help="only the first so many schemas")
    parser.add_argument("--details", action="store_true", help="list what was refused or wrong")
    parser.add_argument("--json", type=Path, help="write an outcome a line")
    options = parser.parse_args()
    with options.data.open(encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines][: options.limit]
    written: list[str] = []
    for engine in options.engine or ["auto"]:
        job = Job(engine, options.strict, options.spacing, options.model)
        worker = Worker(job, options.deadline)
        outcomes = [worker.judge(case) for case in cases]
        worker.close()
        print("\n".join(summary(job, outcomes)), flush=True)
        if options.details:
            print("\n".join(details(outcomes)), flush=True)
        written += [
            json.dumps({"engine": engine, **asdict(outcome)}, ensure_ascii=False) for outcome in outcomes
        ]
    if options.json:
        options.json.write_text("".join(line + "\n" for line in written), encoding="utf-8")


if __name__ == "__main__":
    main()
