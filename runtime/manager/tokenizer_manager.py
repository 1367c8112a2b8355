"""The front of the runtime: checks and tokenizes requests, sends them down, brings the answers back.

It has no event loop of its own: every call is awaited on the loop it was made on, and outputs arrive from
another thread through ``deliver``.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

import msgspec

from trellis.errors import (
    CapacityError,
    InvalidRequestError,
    RequestAborted,
    TrellisError,
)
from trellis.runtime.manager.bounds import check_sent, check_sequences, in_thread
from trellis.runtime.manager.calls import Call
from trellis.runtime.manager.constraints import check_constraint
from trellis.runtime.manager.fields import brief, check_text
from trellis.runtime.manager.outcomes import error_of
from trellis.runtime.manager.prompts import EncodedPrompt, PromptEncoder, PromptTokenizer, is_long
from trellis.runtime.manager.scoring import score_inputs, score_output, scored
from trellis.runtime.manager.transport import ChannelFull, Sender
from trellis.runtime.manager.truncation import LONGEST, prompt_limit, shortened
from trellis.runtime.manager.types import GenerateInput, GenerateResult, Prompt, ScoreOutput
from trellis.runtime.manager.validation import check_params
from trellis.runtime.messages import (
    AbortCommand,
    GenerateCommand,
    TextOutput,
)

MAX_TOP_LOGPROBS = 128

logger = logging.getLogger(__name__)
Command = GenerateCommand | AbortCommand


class TokenizerManager:
    """Thread-safe; usable from any number of event loops at once.

    context_length: most tokens, prompt and output, of one sequence. max_requests: most sequences in flight;
    one more gets a CapacityError. jump_forward: False switches it off for all. auto_truncate: cut prompts that are too
    long instead of refusing them (see runtime/manager/truncation.py), but none whose own logprobs are asked for.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        *,
        context_length: int,
        max_requests: int,
        jump_forward: bool = True,
        auto_truncate: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, context_length, LONGEST if auto_truncate else 1)
        self._auto_truncate = auto_truncate
        self._truncated = False  # whether a prompt was cut, and that was logged
        self._context_length = context_length
        self._max_requests = max_requests
        self._jump_forward = jump_forward
        self._lock = threading.Lock()
        self._calls: dict[str, Call] = {}  # wire id → who waits for it
        self._wires: dict[str, list[str]] = {}  # public id → wire ids; what may be aborted by name
        self._serial = itertools.count()
        self._sender: Sender[Command] | None = None
        self._down: TrellisError | None = CapacityError("the model is still being loaded; try again soon")
        self._unsent_aborts: list[AbortCommand] = []

    @property
    def in_flight(self) -> int:
        """Sequences that were sent and are not finished."""
        return len(self._calls)

    def connect(self, sender: Sender[Command]) -> None:
        """From now on requests go down this channel."""
        with self._lock:
            if sender is not self._sender:
                self._unsent_aborts.clear()  # they were meant for another scheduler
            self._sender, self._down = sender, None

    def suspend(self, error: TrellisError) -> None:
        """Answer new calls with ``error`` until ``connect``; aborts still go down the channel."""
        with self._lock:
            self._down = error

    def disconnect(self, error: TrellisError) -> None:
        """The scheduler is gone: as ``suspend``, and nothing goes down any more."""
        with self._lock:
            self._sender, self._down = None, error

    def fail_in_flight(self, error: TrellisError) -> None:
        """End every request in flight with ``error``; a scheduler that still has them is told to forget them."""
        with self._lock:
            calls = set(self._calls.values())
            wires = list(self._calls)
            self._calls.clear()
            self._wires.clear()
        for call in calls:
            _on_loop(call, call.fail, error)
        self._send_aborts(wires)

    async def generate(self, request: GenerateInput) -> GenerateResult:
        """One sequence, to its end.

        Raises InvalidRequestError and ConstraintError for mistakes of the caller, CapacityError when there is
        no room, BackendError when the runtime failed, RequestAborted. Cancelling it aborts the request.
        """
        [result] = await self.generate_many([request])
        if result.finish is not None and result.finish.type == "abort":
            raise RequestAborted(result.finish.message or "the request was aborted")
        return result

    async def stream(self, request: GenerateInput) -> AsyncGenerator[GenerateResult, None]:
        """As ``generate``, in deltas; the last one has ``finish``. Leaving the iteration aborts the request."""
        async with aclosing(self.stream_many([request])) as deltas:
            async for _, delta in deltas:
                if delta.finish is not None and delta.finish.type == "abort":
                    raise RequestAborted(delta.finish.message or "the request was aborted")
                yield delta

    async def generate_many(self, requests: Sequence[GenerateInput]) -> list[GenerateResult]:
        """Several sequences that the scheduler sees in one step. An aborted one is a result, not an error."""
        results: dict[int, GenerateResult] = {}
        async with aclosing(self._run(await self._prepare(requests, stream=False))) as deltas:
            async for index, delta in deltas:
                if index in results:
                    results[index].add(delta)
                else:
                    results[index] = delta
        return [results[i] for i in range(len(requests))]

    async def stream_many(
        self, requests: Sequence[GenerateInput]
    ) -> AsyncGenerator[tuple[int, GenerateResult], None]:
        """(index of the request, delta) of several sequences, as they come.

        The first that fails ends the call with its error and aborts the others.
        """
        async with aclosing(self._run(await self._prepare(requests))) as deltas:
            async for item in deltas:
                yield item

    async def score(
        self,
        prompt: Prompt,
        options: Sequence[str],
        namespace: str = "",
        prompt_field: str = "prompt",
        unconditional: bool = False,
    ) -> ScoreOutput:
        """Log-probabilities of every option after the prompt; all options share one step.

        Each option is tokenized together with the prompt, and the scored part of all of them begins at the
        same place; see ``PromptEncoder.joint``. unconditional: that part is also scored with nothing before it.
        """
        if not options:
            raise InvalidRequestError("options", "must have at least one option")
        check_sequences(len(options) * (1 + unconditional), self._max_requests, "options")
        encode = partial(self._encoder.joint, prompt, options, prompt_field)
        long = is_long([*options, *[prompt] * len(options)])
        alone, sequences, start = await in_thread(encode) if long else encode()
        self._room_after(len(alone), prompt_field)
        wanted = scored(sequences, start, self._tokenizer.encode("") if unconditional else None)
        inputs = score_inputs(wanted, namespace)
        results = await self.generate_many(inputs) if inputs else []
        if any(result.finish is not None and result.finish.type == "abort" for result in results):
            raise RequestAborted("the request was aborted")
        return score_output(wanted, len(options), results)

    def abort(self, rid: str) -> bool:
        """End the request with exactly this id; its caller gets what there is. False: there is none."""
        with self._lock:
            wires = self._wires.pop(rid, [])
            call = self._calls.get(wires[0]) if wires else None
            for wire in wires:
                self._calls.pop(wire, None)
        if call is None:
            return False
        _on_loop(call, call.abort, wires)
        self._send_aborts(wires)
        return True

    def abort_all(self) -> int:
        """Abort every request in flight; how many ids there were."""
        return sum(self.abort(rid) for rid in list(self._wires))

    def deliver(self, outputs: Sequence[TextOutput]) -> None:
        """Hand outputs to those who wait for them; those of unknown requests are dropped. Any thread."""
        batches: dict[Call, list[TextOutput]] = {}
        cut: list[str] = []
        with self._lock:
            for output in outputs:
                call = self._calls.get(output.rid)
                if call is None:
                    continue
                batches.setdefault(call, []).append(output)
                if output.finish is not None:
                    self._forget(output.rid, call)
                    # A stop string may be found in text that the scheduler cannot see; then it still decodes.
                    if isinstance(output.finish.matched, str):
                        cut.append(output.rid)
        for call, batch in batches.items():
            _on_loop(call, call.push, batch)
        self._send_aborts(cut)

    async def _prepare(self, requests: Sequence[GenerateInput], stream: bool = True) -> Call:
        """Check, tokenize and send."""
        if not requests:
            raise InvalidRequestError("prompt", "must have at least one prompt")
        field = requests[0].prompt_field.partition("[")[0]
        check_sequences(len(requests), self._max_requests, field)
        encode = partial(self._encoder.encode_all, requests)
        long = is_long(each.prompt for each in requests)
        encoded = await in_thread(encode) if long else encode()
        names = [uuid.uuid4().hex if each.rid is None else check_text(each.rid, "rid") for each in requests]
        commands = [
            self._command(request, name, prompt, stream)
            for request, name, prompt in zip(requests, names, encoded, strict=True)
        ]
        check_sent(commands, field)
        cut = [len(e.ids) - len(command.token_ids) for e, command in zip(encoded, commands, strict=True)]
        if any(cut):
            self._log_truncation(max(cut))
        return self._send(commands, names, cut)

    def _command(
        self, request: GenerateInput, name: str, prompt: EncodedPrompt, stream: bool
    ) -> GenerateCommand:
        ids, params = prompt.ids, request.params
        if not request.params_checked:
            params = check_params(params, self._tokenizer.vocab_size)
        if request.until_context:
            params = msgspec.structs.replace(params, max_new_tokens=self._context_length)
        if self._auto_truncate and request.logprob_start < 0:
            limit = prompt_limit(self._context_length, params.max_new_tokens, request.strict_length)
            if limit < 1 and len(ids) >= self._context_length:
                raise InvalidRequestError(
                    "max_tokens",
                    f"{params.max_new_tokens} leave no room for a prompt in the context length of {self._context_length}",
                )
            ids = shortened(ids, limit, self._tokenizer.encode("")) if len(ids) > limit else ids
        room = self._room_after(len(ids), request.prompt_field)
        if request.strict_length and params.max_new_tokens > room:
            raise InvalidRequestError(
                "max_tokens",
                f"the prompt has {len(ids)} tokens, so at most {room} more fit into the context length of "
                f"{self._context_length}, not {params.max_new_tokens}",
            )
        if not 0 <= request.top_logprobs_num <= MAX_TOP_LOGPROBS:
            reason = f"must be from 0 to {MAX_TOP_LOGPROBS}, not {brief(request.top_logprobs_num)}"
            raise InvalidRequestError("top_logprobs_num", reason)
        if not -1 <= request.logprob_start <= len(ids):
            raise InvalidRequestError(
                "logprob_start_len",
                f"must be -1 or a position in the prompt of {len(ids)} tokens",
            )
        return GenerateCommand(
            rid=f"{name}#{next(self._serial)}",
            token_ids=ids,
            params=params,
            constraint=check_constraint(request.constraint),
            return_logprob=request.return_logprob,
            top_logprobs_num=request.top_logprobs_num,
            logprob_start=request.logprob_start,
            namespace=check_text(request.namespace, "cache_salt"),
            jump_forward=self._jump_forward and request.jump_forward,
            stream=stream,
            healing=[count for count in prompt.healing if count < len(ids)],
        )

    def _room_after(self, prompt: int, field: str) -> int:
        """How many tokens fit after a prompt of this many; at least one, or InvalidRequestError."""
        if prompt == 0:
            raise InvalidRequestError(field, "is empty; a prompt must have at least one token")
        room = self._context_length - prompt
        if room < 1:
            raise InvalidRequestError(
                field,
                f"has {prompt} tokens; the context length is {self._context_length}, "
                f"so a prompt may have at most {self._context_length - 1}",
            )
        return room

    def _log_truncation(self, tokens: int) -> None:
        """Once; clients are told each time."""
        if not self._truncated:
            self._truncated = True
            logger.warning(
                "--allow-auto-truncate: a prompt lost its first %d tokens; others that are too long will, too",
                tokens,
            )

    def _send(self, commands: list[GenerateCommand], names: list[str], cut: list[int]) -> Call:
        call = Call(commands, names, asyncio.get_running_loop(), cut)
        with self._lock:
            if self._down is not None:
                raise copy.copy(self._down)
            assert self._sender is not None  # connect sets both
            self._check_room(len(commands))
            for name in dict.fromkeys(names):
                if name in self._wires:
                    raise InvalidRequestError("rid", f"{name!r} is the id of another request in flight")
            for name, command in zip(names, commands, strict=True):
                self._calls[command.rid] = call
                self._wires.setdefault(name, []).append(command.rid)
            sender = self._sender
        try:
            sender.send(commands)  # not under the lock: a large message takes its time
        except BaseException as error:
            self._withdraw(call)
            if isinstance(error, ChannelFull):
                raise CapacityError(f"the server cannot keep up: {error}; try again later") from None
            raise
        with self._lock:
            ended = [command.rid for command in commands if self._calls.get(command.rid) is not call]
        # An abort that came before the message went down was told to a scheduler that did not know them yet.
        self._send_aborts(ended)
        return call

    def _check_room(self, more: int) -> None:
        limit = self._max_requests
        if len(self._calls) + more > limit:
            raise CapacityError(
                f"{len(self._calls)} requests are in flight and this server takes at most {limit}; try again later"
            )

    async def _run(self, call: Call) -> AsyncGenerator[tuple[int, GenerateResult], None]:
        unfinished = len(call.commands)
        try:
            while unfinished:
                for index, delta in (await call.take()).items():
                    if delta.finish is not None:
                        unfinished -= 1
                        if error := error_of(delta.finish, call.commands[index]):
                            raise error
                    yield index, delta
        finally:
            self._release(call)

    def _release(self, call: Call) -> None:
        """Abort what is still open of a call that nobody waits for any more."""
        self._send_aborts(self._withdraw(call))

    def _withdraw(self, call: Call) -> list[str]:
        """Take the call out of the books; its wire ids that were still in them."""
        with self._lock:
            wires = [wire for wire in call.open if self._calls.get(wire) is call]
            for wire in wires:
                self._forget(wire, call)
        return wires

    def _forget(self, wire: str, call: Call) -> None:
        del self._calls[wire]
        name = call.names[call.index[wire]]
        self._wires[name].remove(wire)
        if not self._wires[name]:
            del self._wires[name]

    def _send_aborts(self, wires: Sequence[str]) -> None:
        """An abort is never lost: what does not fit into the channel now is sent along with the next ones."""
        with self._lock:
            self._unsent_aborts += [AbortCommand(wire) for wire in wires]
            if self._sender is None:
                self._unsent_aborts.clear()
            if not self._unsent_aborts or self._sender is None:
                return
            try:
                self._sender.send(self._unsent_aborts)
                self._unsent_aborts = []
            except ChannelFull:
                logger.warning("%d aborts wait for room in the channel", len(self._unsent_aborts))


def _on_loop(call: Call, function: Callable[..., None], *args: object) -> None:
    try:
        call.loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # the loop was closed with the call still open: nobody waits
        logger.debug("an output came for an event loop that is closed")
