"""The side of every rank but 0: compute what it says."""

from __future__ import annotations

import threading

import torch

from trellis.runtime.distributed.contract import GroupBroken
from trellis.runtime.distributed.group import Group
from trellis.runtime.distributed.wire import End, Message, Rows, Step, StepDecoder
from trellis.runtime.executor.model_runner import StepRunner
from trellis.runtime.executor.step import LogitsRows
from trellis.runtime.manager.transport import Receiver


class Follower:
    """runner: this rank's part of the model."""

    def __init__(self, runner: StepRunner, group: Group) -> None:
        self._runner = runner
        self._group = group
        self._decoder = StepDecoder()
        self._steps = 0
        self._rows: LogitsRows | None = None

    def run(self, inbox: Receiver[Message], stopping: threading.Event) -> None:
        """Until rank 0 says so, or ``stopping`` is set and the inbox woken. Any failure is GroupBroken, as the others cannot go on either."""
        try:
            while not stopping.is_set():
                for message in inbox.receive(None):
                    if isinstance(message, End):
                        return
                    self._attend(message)
        except Exception as error:
            raise GroupBroken(f"rank {self._group.rank} failed: {type(error).__name__}: {error}") from error

    @torch.inference_mode()
    def _attend(self, message: Message) -> None:
        if isinstance(message, Step):
            self._steps += 1
            self._rows = None  # before the next ones are made
            extends = self._decoder.decode(message)
            self._group.share_followed(self._runner.followed, extends)
            self._rows = self._runner.forward(extends)
        elif isinstance(message, Rows):
            if self._rows is None or message.step != self._steps:
                raise ValueError(
                    f"rows of step {message.step} are wanted, and the last one was {self._steps}"
                )
            self._rows.take(message.rows)
        else:
            self._group.meet()
