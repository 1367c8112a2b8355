"""What gens and selects ask of the backend, and what becomes of its answers. All of it runs on the loop thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trellis.errors import BackendError, InvalidRequestError
from trellis.frontend.backends.base import Chunk, Completion, GenerateRequest, ScoreResult
from trellis.frontend.backends.checked import checked
from trellis.frontend.choices import decide
from trellis.frontend.choosing import choice_request, chosen_meta
from trellis.frontend.expressions import Gen, Select
from trellis.frontend.failure import Failure
from trellis.frontend.log import log_done, log_sent
from trellis.frontend.loop import Timer
from trellis.frontend.variable import Meta, SelectMeta, Variable

if TYPE_CHECKING:
    from trellis.frontend.executor import Executor


async def answer(executor: Executor, expr: Gen[Any] | Select, variable: Variable) -> None:
    """Ask, append the answer to the transcript, and give the variable its value.

    Fails the state when the expression's own timeout is over, even if the backend ignores cancellation.
    """
    executor.say(executor.transcript.before_answer())
    span = variable.span
    if span is not None:
        span.send()
        log_sent(executor.run.program, span, len(executor.transcript.pieces))
    work = _generate(executor, expr, variable) if isinstance(expr, Gen) else _select(executor, expr, variable)
    await _timed(executor, expr, work)
    if span is not None:
        log_done(executor.run.program, span)


async def _timed(executor: Executor, expr: Gen[Any] | Select, work: Awaitable[None]) -> None:
    timer: Timer | None = None
    if expr.timeout is not None:
        late = TimeoutError(f"no answer within its timeout of {expr.timeout:g} s")
        timer = executor.run.loop.after(expr.timeout, lambda: executor.fail(late, expr.name))
    try:
        await work
    except InvalidRequestError as error:
        if error.field != "prompt" or executor.transcript.pieces:
            raise
        reason = f"{error.reason}; append text before the first {type(expr).__name__.lower()}"
        raise InvalidRequestError("prompt", reason) from None
    finally:
        if timer is not None:
            timer.cancel()


# -- gen ---------------------------------------------------------------------------------------------------------


async def _generate(executor: Executor, gen: Gen[Any], variable: Variable) -> None:
    request = _request(executor, gen, variable)
    started = time.perf_counter()
    found = await _samples(executor, request, gen.n, variable)
    if executor.failure is not None:
        return
    seconds = time.perf_counter() - started
    executor.transcript.add_completion(found[0], variable)
    for sample, completion in enumerate(found):
        executor.show(completion.text[len(variable.feeds[sample].text) :], variable, sample)
    values = [_value(executor, gen, each) for each in found]
    problem = next((problem for _, problem in values if problem is not None), None)
    metas = [Meta.of_gen(each, seconds) for each in found]
    if gen.n == 1:
        variable.resolve(values[0][0], found[0].text, metas[0], problem)
    else:
        variable.resolve([value for value, _ in values], [each.text for each in found], metas, problem)


async def _samples(
    executor: Executor, request: GenerateRequest, n: int, variable: Variable
) -> list[Completion]:
    backend = executor.run.backend
    if executor.run.options.stream:
        return await _streamed(executor, request, n, variable)
    if n == 1:
        return [checked(await backend.generate(request), Completion, backend)]
    found = [checked(each, Completion, backend) for each in await backend.samples(request, n)]
    if len(found) != n:
        raise BackendError(f"{n} samples were asked for, {len(found)} came back")
    return found


async def _streamed(
    executor: Executor, request: GenerateRequest, n: int, variable: Variable
) -> list[Completion]:
    finals: dict[int, Completion] = {}
    backend = executor.run.backend
    chunks = _first_of(backend.stream(request)) if n == 1 else backend.stream_samples(request, n)
    async with _closing(chunks):
        async for index, piece in chunks:
            if executor.failure is not None:
                break
            chunk = checked(piece, Chunk, backend)
            if chunk.text and variable.span is not None:
                variable.span.see()
            executor.show(chunk.text, variable, index)
            if chunk.final is not None:
                if not chunk.final.text.startswith(variable.feeds[index].text):
                    raise BackendError("the streamed pieces do not add up to the final text")
                finals[index] = chunk.final
                if len(finals) == n:
                    return [finals[i] for i in range(n)]
    raise BackendError("the stream ended before the answer was complete")


async def _first_of(chunks: AsyncIterator[Chunk]) -> AsyncIterator[tuple[int, Chunk]]:
    async with _closing(chunks):
        async for chunk in chunks:
            yield 0, chunk


@contextlib.asynccontextmanager
async def _closing(chunks: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Closes the iterator at once when reading stops early, so that the backend aborts the request."""
    try:
        yield
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


def _request(executor: Executor, gen: Gen[Any], variable: Variable) -> GenerateRequest:
    options, transcript = variable.options or executor.run.options, executor.transcript
    sampling = replace(options.sampling, **dict(gen.sampling)) if gen.sampling else options.sampling
    more = [stop for stop in (*gen.stops, *transcript.stops) if stop not in sampling.stop]
    if more:
        sampling = replace(sampling, stop=(*sampling.stop, *more))
    if sampling.min_new_tokens > sampling.max_new_tokens:
        reason = f"{sampling.min_new_tokens} is more than max_tokens = {sampling.max_new_tokens}"
        raise InvalidRequestError("gen.min_tokens", reason)
    top = options.top_logprobs_num if gen.top_logprobs_num is None else gen.top_logprobs_num
    logprob = options.return_logprob if gen.return_logprob is None else gen.return_logprob
    heals = options.token_healing if gen.token_healing is None else gen.token_healing
    speculates = gen.n == 1  # a text that was written already is one sample and not several
    return GenerateRequest(
        prompt=transcript.prompt(),
        sampling=sampling,
        constraint=gen.constraint,
        return_logprob=logprob or top > 0,
        top_logprobs_num=top,
        token_healing=heals and transcript.ends_in_written_text,
        conversation=transcript.conversation() if executor.run.backend.speaks_messages else None,
        spec_tokens=options.num_api_spec_tokens if speculates else 0,
        surplus=transcript.surplus if speculates else None,
    )


def _value(executor: Executor, gen: Gen[Any], completion: Completion) -> tuple[Any, Failure | None]:
    """What the text stands for, or why it stands for nothing: not a failure unless the value is asked for."""
    if gen.read is None:
        return completion.text, None
    try:
        return gen.read(completion.text), None
    except Exception as error:  # whatever the validators of a type raise
        if completion.finish_reason == "length":
            why = "was cut at max_tokens (finish_reason 'length'); raise max_tokens"
        elif completion.matched is not None:
            why = f"was cut at the stop {completion.matched!r}"
        else:
            why = f"is not a value of its schema: {error}"
        reads = "state.text() of the gen has it" if gen.name is None else f"state.text({gen.name!r}) has it"
        reason = ValueError(f"the text {why}; {reads}")
        reason.__cause__ = error
        return None, Failure(executor.run.program, gen.name, reason)


# -- select ------------------------------------------------------------------------------------------------------


async def _select(executor: Executor, select: Select, variable: Variable) -> None:
    backend, transcript = executor.run.backend, executor.transcript
    started = time.perf_counter()
    if backend.speaks_messages:  # which tell no scores
        chosen = await backend.generate(choice_request(select, transcript))
        completion = checked(chosen, Completion, backend)
        meta = chosen_meta(select, completion, time.perf_counter() - started)
        _chosen(executor, completion.text, meta, variable)
        return
    score = backend.score_unconditionally if select.method.unconditional else backend.score
    result = checked(await score(transcript.prompt(), select.choices), ScoreResult, backend)
    if len(result.options) != len(select.choices):
        raise BackendError(f"{len(select.choices)} options were sent, {len(result.options)} came back scored")
    decision = decide(select.method, result.options, select.temperature, select.seed)
    seconds = time.perf_counter() - started
    meta = SelectMeta.of_select(select.choices, select.method.name, result, decision, seconds)
    _chosen(executor, select.choices[decision.index], meta, variable)


def _chosen(executor: Executor, option: str, meta: SelectMeta, variable: Variable) -> None:
    if executor.failure is None:
        executor.transcript.add_text(option, source=variable)
        executor.show(option, variable)
        variable.resolve(option, option, meta)
