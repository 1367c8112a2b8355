"""A runtime without a model: tokens are bytes, and the answer to a prompt is the prompt itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from trellis.chat_format import ChatFormat
from trellis.runtime.config import ServerConfig
from trellis.runtime.messages import (
    Counts,
    DetokenizeOptions,
    FinishReason,
    GenerateCommand,
    TokenOutput,
)

EOS = 256
CONTEXT = 200


class ByteTokenizer:
    """Ids 0-255 are the bytes, 256 is EOS (special), 257 is "he" (so that texts can merge across a boundary)."""

    vocab_size = 258
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({EOS})
    bos_token_id = None

    def __init__(self) -> None:
        self.token_bytes = [bytes([i]) for i in range(256)] + [b"<eos>", b"he"]
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        self.encoded.append(text)
        parts = text.encode().split(b"he")
        ids = list(parts[0])
        for part in parts[1:]:
            ids += [257, *part]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_token_ids)]
        return b"".join(self.token_bytes[i] for i in kept).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        said = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return said + "assistant:" * add_generation_prompt

    def chat_format(self) -> ChatFormat:
        roles = {role: (f"{role}:", "\n") for role in ("system", "user", "assistant")}
        return ChatFormat(roles)


class EchoScheduler:
    """Answers every prompt with its own tokens, over and over, one token a step, until max_new_tokens.

    The log-probability of a token is minus a hundredth of its id. A regex that begins with "(" is refused as
    the real scheduler would. ``gate``: steps wait while it is cleared. ``explode``: the next step raises.
    """

    def __init__(self) -> None:
        self.running: dict[str, tuple[GenerateCommand, int]] = {}
        self.batches: list[list[str]] = []  # what arrived together
        self.commands: list[GenerateCommand] = []
        self.aborted: list[str] = []
        self.refused: deque[TokenOutput] = deque()
        self.flushes = 0
        self.policy = "lpm"
        self.gate = threading.Event()
        self.gate.set()
        self.explode = False

    def add(self, commands: list[GenerateCommand]) -> None:
        self.batches.append([command.rid for command in commands])
        self.commands += commands
        for command in commands:
            if command.constraint is not None and command.constraint.source.startswith("("):
                message = f"{command.constraint.kind}: unterminated group (at position 0)"
                finish = FinishReason("abort", message=message, status=400, code="syntax")
                self.refused.append(
                    TokenOutput(rid=command.rid, token_ids=[], counts=Counts(), finish=finish)
                )
            else:
                self.running[command.rid] = (command, 0)

    def abort(self, rid: str) -> None:
        if self.running.pop(rid, None) is not None:
            self.aborted.append(rid)
            finish = FinishReason("abort", message="the request was aborted")
            self.refused.append(TokenOutput(rid=rid, token_ids=[], counts=Counts(), finish=finish))

    def has_work(self) -> bool:
        return bool(self.refused or (self.running and self.gate.is_set()))

    def step(self) -> list[TokenOutput]:
        if self.explode:
            raise RuntimeError("boom")
        outputs = list(self.refused)
        self.refused.clear()
        if self.gate.is_set():
            outputs += [self._advance(rid) for rid in list(self.running)]
        return outputs

    def _advance(self, rid: str) -> TokenOutput:
        command, done = self.running[rid]
        prompt, params = command.token_ids, command.params
        token = [prompt[done % len(prompt)]] if params.max_new_tokens else []
        total = done + len(token)
        finish = None
        if token and token[0] in params.stop_token_ids:
            finish = FinishReason("stop", matched=token[0])
        elif total >= params.max_new_tokens:
            finish = FinishReason("length")
        wanted = prompt[command.logprob_start :] if command.logprob_start >= 0 and done == 0 else None
        first = command.logprob_start == 0
        if finish is None:
            self.running[rid] = (command, total)
        else:
            del self.running[rid]
        return TokenOutput(
            rid=rid,
            token_ids=token,
            counts=Counts(prompt_tokens=len(prompt), completion_tokens=total, sampled_tokens=total),
            options=DetokenizeOptions(params.stop, params.skip_special_tokens) if done == 0 else None,
            logprobs=[-i / 100 for i in token] if command.return_logprob else None,
            top_logprobs=[[(i, -i / 100)] * command.top_logprobs_num for i in token]
            if command.return_logprob and command.top_logprobs_num
            else None,
            input_logprobs=None
            if wanted is None
            else [None if first and k == 0 else -i / 100 for k, i in enumerate(wanted)],
            input_top_logprobs=None
            if wanted is None or not command.top_logprobs_num
            else [
                None if first and k == 0 else [(i, -i / 100)] * command.top_logprobs_num
                for k, i in enumerate(wanted)
            ],
            finish=finish,
        )

    def flush_cache(self) -> dict[str, Any]:
        self.flushes += 1
        return {"freed_tokens": 7}

    def stats(self) -> dict[str, Any]:
        return {"running_requests": len(self.running), "waiting_requests": 0}

    def set_policy(self, name: str) -> None:
        self.policy = name

    def cache_snapshot(self, limit: int, edge_tokens: int, namespace: str | None) -> Any:
        """A root with a child: the prompt "hello", and two bytes in a namespace whose text is secret."""
        self.asked = (limit, edge_tokens, namespace)
        node = {"id": 0, "parent": None, "depth": 0, "length": 5, "locks": 1, "hits": 2, "children": 0}
        times = {"idle_s": 1.5, "age_s": 3.0}
        return {
            "nodes": 2,
            "tokens": 7,
            "shown": [
                {**node, **times, "namespace": "", "token_ids": [*b"hello"]},
                {**node, **times, "id": 1, "length": 2, "namespace": "0badcafe", "token_ids": None},
            ],
        }


def echo_build(
    scheduler: EchoScheduler, tokenizer: ByteTokenizer | None = None
) -> Callable[[ServerConfig, Callable[[], None]], Any]:
    """The ``build`` argument of an InProcessEngine that runs on the echo scheduler."""

    def build(config: ServerConfig, wake: Callable[[], None]) -> Any:
        gate = scheduler.gate

        def open_gate() -> None:
            gate.set()
            wake()

        scheduler.open_gate = open_gate  # type: ignore[attr-defined]
        return SimpleNamespace(
            config=replace(config, context_length=CONTEXT, max_total_tokens=CONTEXT),
            tokenizer=tokenizer or ByteTokenizer(),
            scheduler=scheduler,
            close=lambda: None,
        )

    return build
