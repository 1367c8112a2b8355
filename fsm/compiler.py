"""Compiling off the scheduler's loop: a small pool, one compile for equal constraints, a bounded cache."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from trellis.errors import CapacityError, ConstraintError, TrellisError
from trellis.fsm.contract import ConstraintSpec, Grammar, Vocabulary
from trellis.fsm.limits import Limits
from trellis.fsm.registry import AUTO, compile_grammar

_REFUSAL_S = 60.0
_REFUSALS_KEPT = 1024
_MAX_QUEUED = 1024
_GRAMMARS_KEPT = 4096


@dataclass
class _Job:
    """One compile and everybody who waits for it. work is set once the pool has it; stop: when all have left."""

    waiters: list[Future[Grammar]] = field(default_factory=list)
    work: Future[None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)


class GrammarCompiler:
    """Compiles constraints for one vocabulary in a thread pool and remembers what came of it.

    Equal constraints that are in work are compiled once, and given up when nobody waits for them any longer (an
    equal one that comes later starts anew). Grammars are kept, least recently used out first, within
    ``cache_bytes``; refusals are kept for a minute. Thread-safe.

    backend: an engine's name or ``auto``. clock: seconds; tests pass their own.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        workers: int = 2,
        cache_bytes: int = 256 << 20,
        backend: str = AUTO,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocabulary = vocabulary
        self._cache_bytes = cache_bytes
        self._backend = backend
        self._limits = limits or Limits()
        self._clock = clock
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._refusals: OrderedDict[str, tuple[float, TrellisError]] = OrderedDict()
        self._jobs: dict[str, _Job] = {}
        self._counts = {
            "hits": 0,
            "refusal_hits": 0,
            "shared": 0,
            "compiled": 0,
            "refused": 0,
            "cancelled": 0,
        }
        self._seconds = 0.0
        self._closed = False
        self._pool.submit(self._warm_up)  # so that the first request does not wait for what all share

    def submit(self, spec: ConstraintSpec) -> Future[Grammar]:
        """A future of the grammar, or of its ConstraintError. Cancelling it when nobody else waits for the
        same constraint takes the compile out of the queue, or stops it. Raises CapacityError when the queue is
        full."""
        key = self._key(spec)
        waiter: Future[Grammar] = Future()
        with self._lock:
            known = self._grammars.get(key)
            refusal = None if known is not None else self._refusal(key)
            if known is not None:
                self._grammars.move_to_end(key)
                self._counts["hits"] += 1
            elif refusal is not None:
                self._counts["refusal_hits"] += 1
            else:
                self._enqueue(key, spec, waiter)
        if known is not None:
            waiter.set_result(known)
        elif refusal is not None:
            waiter.set_exception(refusal)
        else:
            waiter.add_done_callback(lambda done: self._left(key, done))
        return waiter

    def compile(self, spec: ConstraintSpec) -> Grammar:
        """Wait for the grammar; raises ConstraintError."""
        return self.submit(spec).result()

    def clear(self) -> None:
        """Forget all grammars and refusals; requests that hold one go on with it."""
        with self._lock:
            self._grammars.clear()
            self._refusals.clear()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what is held now."""
        with self._lock:
            return {
                **self._counts,
                "in_flight": len(self._jobs),
                "cached": len(self._grammars),
                "cached_bytes": sum(g.nbytes for g in self._grammars.values()),
                "compile_seconds": self._seconds,
            }

    def close(self) -> None:
        """Take no more; what is queued is cancelled, what is in work is told to stop."""
        with self._lock:
            self._closed = True
            waiters = [waiter for job in self._jobs.values() for waiter in job.waiters]
        for waiter in waiters:
            waiter.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _key(self, spec: ConstraintSpec) -> str:
        digest = hashlib.sha256(spec.source.encode("utf-8", "surrogatepass")).hexdigest()
        how = f"{spec.kind}/{spec.spacing}/{spec.strict}"
        return f"{self._vocabulary.fingerprint}/{self._backend}/{how}/{digest}"

    def _refusal(self, key: str) -> TrellisError | None:
        found = self._refusals.get(key)
        if found is None:
            return None
        until, error = found
        if self._clock() >= until:
            del self._refusals[key]
            return None
        return _fresh(error)

    def _enqueue(self, key: str, spec: ConstraintSpec, waiter: Future[Grammar]) -> None:
        if self._closed:
            raise CapacityError("the grammar compiler is closed")
        job = self._jobs.get(key)
        if job is not None:
            self._counts["shared"] += 1
            job.waiters.append(waiter)
            return
        if len(self._jobs) >= _MAX_QUEUED:
            raise CapacityError(f"{_MAX_QUEUED} constraints wait to be compiled; try again")
        job = self._jobs[key] = _Job([waiter])
        job.work = self._pool.submit(self._work, key, spec, job)

    def _left(self, key: str, waiter: Future[Grammar]) -> None:
        """A waiter is done; if it was cancelled and was the last, the compile is not needed."""
        if not waiter.cancelled():
            return
        with self._lock:
            job = self._jobs.get(key)
            if job is None or waiter not in job.waiters:
                return
            job.waiters.remove(waiter)
            if not job.waiters:
                del self._jobs[key]
                job.stop.set()
                self._counts["cancelled"] += 1
                if job.work is not None:
                    job.work.cancel()

    def _work(self, key: str, spec: ConstraintSpec, job: _Job) -> None:
        started = time.perf_counter()
        grammar: Grammar | None = None
        error: TrellisError | None = None
        try:
            grammar = self._compile(spec, replace(self._limits, stop=job.stop))
        except TrellisError as refused:
            error = refused
        except Exception as bug:  # never leave a waiter without an answer
            error = TrellisError(f"compiling the {spec.kind} constraint failed: {type(bug).__name__}: {bug}")
            error.__cause__ = bug
        with self._lock:
            self._seconds += time.perf_counter() - started
            if job.stop.is_set():  # whatever came of it, nobody asked for it
                return
            del self._jobs[key]
            self._remember(key, grammar, error)
        for waiter in job.waiters:
            if not waiter.set_running_or_notify_cancel():
                continue
            if grammar is not None:
                waiter.set_result(grammar)
            else:
                assert error is not None
                waiter.set_exception(_fresh(error))

    def _warm_up(self) -> None:
        for spec in (ConstraintSpec.regex(r"\w\d\s."), ConstraintSpec.schema({"type": "string"})):
            with contextlib.suppress(ConstraintError):  # the backend may not know this kind
                self._compile(spec, self._limits)

    def _compile(self, spec: ConstraintSpec, limits: Limits) -> Grammar:
        grammar = compile_grammar(spec, self._vocabulary, self._backend, limits)
        # Some errors show only in the first mask; the mask is kept, so the probe is no lost work.
        grammar.matcher().fill_mask(np.empty(self._vocabulary.mask_words, np.int32))
        return grammar

    def _remember(self, key: str, grammar: Grammar | None, error: TrellisError | None) -> None:
        if grammar is not None:
            self._counts["compiled"] += 1
            self._grammars[key] = grammar
            held = sum(g.nbytes for g in self._grammars.values())
            while held > self._cache_bytes or len(self._grammars) > _GRAMMARS_KEPT:
                _, dropped = self._grammars.popitem(last=False)
                held -= dropped.nbytes
        elif isinstance(error, ConstraintError):
            self._counts["refused"] += 1
            self._refusals[key] = (self._clock() + _REFUSAL_S, error)
            while len(self._refusals) > _REFUSALS_KEPT:
                self._refusals.popitem(last=False)


def _fresh(error: TrellisError) -> TrellisError:
    """A copy to raise: one exception object raised in many places would collect all their tracebacks."""
    if isinstance(error, ConstraintError):
        return ConstraintError(error.kind, error.code, error.where, error.detail)
    return error
