"""xgrammar's compiler in a process of its own, where a grammar can cost no more than its budget.

Native code that compiles what a client sent cannot be interrupted and may fail without an exception. So one
helper process a vocabulary loads xgrammar once and forks a child for each grammar; the child has a limit of
CPU time and memory, compiles, tries some masks and hands the result back as text. However it ends, the helper
is ready for the next grammar.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from trellis.errors import ConstraintError, RequestAborted

_START_S = 120.0  # wall seconds to load xgrammar (which loads torch and transformers)
_PATIENCE_S = 60.0  # wall seconds on top of the CPU time: the machine may be busy
_GLANCE_S = 0.05  # wall seconds between two looks whether the grammar is still wanted
_MEMORY_BYTES = 768 << 20  # address space that a child may add to what the helper has
_PROBES = 24  # masks on a walk through the new grammar

_OK = b"k"
_CODES = {b"s": "syntax", b"l": "limit", b"t": "timeout", b"u": "unsupported"}
_GIVE_UP = signal.SIGUSR1  # to the helper: end the child
_OUT_OF_TIME = frozenset({signal.SIGPROF, signal.SIGXCPU})
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


@dataclass(frozen=True)
class Job:
    """text: the grammar. tokens: for the vocabulary, or for single bytes only. compile_s, mask_s: CPU seconds."""

    text: str
    tokens: bool
    compile_s: float
    mask_s: float


class CompilerProcess:
    """The helper, started with the first grammar. Thread-safe; grammars are compiled one after the other."""

    def __init__(self, token_bytes: Sequence[bytes], size: int, stop: Sequence[int]) -> None:
        self._vocabulary = (list(token_bytes), size, list(stop))
        self._lock = threading.Lock()
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the helper, if it was started."""
        return self._process.pid if self._process is not None else None

    def compile(self, job: Job, wanted: Callable[[], None] = lambda: None) -> str:
        """The compiled grammar, serialised. Raises ConstraintError, and what ``wanted`` raises when it is not."""
        with self._lock:
            wanted()
            pipe = self._ready()
            try:
                pipe.send(job)
                answer = self._answer(pipe, job.compile_s + _PATIENCE_S, wanted)
            except (OSError, EOFError) as error:
                self._stop()
                raise refused("limit", f"the grammar compiler ended: {error or 'end of file'}") from error
        status, text = answer[:1], answer[1:].decode(errors="replace")
        if status == _OK:
            return text
        raise refused(_CODES[status], text)

    def _answer(self, pipe: Connection, seconds: float, wanted: Callable[[], None]) -> bytes:
        until = time.monotonic() + seconds
        while not pipe.poll(_GLANCE_S):
            try:
                wanted()
            except RequestAborted:
                assert self._process is not None
                self._process.send_signal(_GIVE_UP)
                if pipe.poll(_PATIENCE_S):
                    pipe.recv_bytes()  # the helper is ready for the next grammar
                    raise
                raise EOFError("no answer") from None
            if time.monotonic() > until:
                raise EOFError("no answer")
        return pipe.recv_bytes()

    def _ready(self) -> Connection:
        if self._process is not None and self._process.poll() is None and self._pipe is not None:
            return self._pipe
        self._stop()
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt from the keyboard is for the server
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        theirs.close()
        self._process, self._pipe = process, ours
        weakref.finalize(self, _end, process, ours)
        try:
            ours.send(self._vocabulary)
            if not ours.poll(_START_S):
                raise EOFError("no answer")
            ours.recv_bytes()
        except (OSError, EOFError) as error:
            self._stop()
            raise refused("unsupported", f"the xgrammar engine could not be started: {error}") from error
        return ours

    def _stop(self) -> None:
        if self._process is not None and self._pipe is not None:
            _end(self._process, self._pipe)
        self._process = self._pipe = None


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    """The helper ends by itself when its pipe closes; one that hangs is killed."""
    with contextlib.suppress(OSError):
        pipe.close()
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def refused(code: str, reason: str) -> ConstraintError:
    return ConstraintError("grammar", code, "", reason)


# --- the helper ---------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Compile what comes over the pipe until it closes."""
    import xgrammar

    children: list[int] = []  # the one at work

    def give_up(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)

    signal.signal(_GIVE_UP, give_up)
    pipe = Connection(descriptor)
    tokens, size, stop = pipe.recv()
    raw = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo(tokens, raw, vocab_size=size, stop_token_ids=stop)
    bare = xgrammar.TokenizerInfo([], raw)
    compilers = {
        with_tokens: xgrammar.GrammarCompiler(of, max_threads=1, cache_enabled=False)
        for with_tokens, of in ((True, info), (False, bare))
    }
    pipe.send_bytes(b"ready")
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(_isolated(job, compilers[job.tokens], size, children))


def _isolated(job: Job, compiler: Any, size: int, children: list[int]) -> bytes:
    """The answer of a child that does the work, or one that says how the child died."""
    result = os.memfd_create("grammar")
    try:
        child = os.fork()
        if child == 0:
            _work(job, compiler, size, result)
        children.append(child)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        children.clear()  # before the number can be given to another process
        _, status = os.waitpid(child, 0)
        os.lseek(result, 0, os.SEEK_SET)
        with os.fdopen(os.dup(result), "rb") as file:
            answer = file.read()
    finally:
        os.close(result)
    if answer and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return answer
    return _died(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, job).encode()


def _died(by: int, job: Job) -> str:
    if by in _OUT_OF_TIME:
        return f"tneeds more than {job.compile_s:g} s of CPU time; simplify it"
    if by in _CRASHES:
        return "uthe parser library crashes on it; rules that may refer to themselves alone are a known cause"
    if by == signal.SIGKILL:
        return "lits compilation was killed from outside, as when the machine runs out of memory; simplify it"
    return f"lneeds more than {_MEMORY_BYTES >> 20} MiB of memory; simplify it"


def _work(job: Job, compiler: Any, size: int, result: int) -> None:
    """In the child; does not return."""
    status = 1
    try:
        _confine(job.compile_s)
        answer = _compile(job, compiler, size)
        with os.fdopen(result, "wb", closefd=False) as file:
            file.write(answer)
        status = 0
    finally:
        os._exit(status)


def _confine(cpu_s: float) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + cpu_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        room = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def _compile(job: Job, compiler: Any, size: int) -> bytes:
    try:
        compiled = compiler.compile_grammar(job.text)
    except MemoryError:
        raise
    except Exception as error:
        message = str(error).partition("error")[2].lstrip(": ") or str(error)
        return f"snot a valid grammar: {message.strip()[:300]}".encode()
    if job.tokens and (slowest := _slowest_mask(compiled, size)) > job.mask_s:
        return f"ta mask takes {slowest:.1f} s; at most {job.mask_s:g} s are allowed; simplify it".encode()
    return _OK + str(compiled.serialize_json()).encode()


def _slowest_mask(compiled: Any, size: int) -> float:
    """CPU seconds of the slowest mask along a walk that takes another allowed token each time."""
    import numpy as np
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    row = np.zeros((1, (size + 31) // 32), np.int32)
    slowest = 0.0
    for step in range(_PROBES):
        began = time.process_time()
        matcher.fill_next_token_bitmask(row)
        matcher.find_jump_forward_string()
        slowest = max(slowest, time.process_time() - began)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size])
        if not len(allowed) or not matcher.accept_token(int(allowed[step * 7919 % len(allowed)])):
            break
        if matcher.is_terminated():
            break
    return slowest
