"""The parent's side of the server: starts the processes, joins them up, and mends what dies."""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any

from trellis.errors import BackendError, CapacityError
from trellis.runtime.assembly import settled_context_length
from trellis.runtime.config import ServerConfig
from trellis.runtime.distributed.contract import inbox_of
from trellis.runtime.loop import Command, Health
from trellis.runtime.manager.tokenizer_manager import TokenizerManager
from trellis.runtime.manager.transport import SocketDirectory, ZmqReceiver, ZmqSender
from trellis.runtime.messages import TextOutput
from trellis.runtime.models import Tokenizer
from trellis.runtime.server.child import Settings
from trellis.runtime.server.control import call_control
from trellis.runtime.server.processes import Child

SCHEDULER, DETOKENIZER = "scheduler", "detokenizer"
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0  # seconds before a restart; doubles with every death in a row
HEALTHY_AFTER = 60.0  # seconds in service after which a death counts as the first
STOP_GRACE = 5.0  # seconds that a child has to end in good order
HEARTBEAT_EVERY = 1.0  # seconds

logger = logging.getLogger(__name__)


class Supervisor:
    """A scheduler and a detokenizer process behind a TokenizerManager, and with ``tp_size`` the other ranks of the model, which
    start, and end, with the scheduler, rank 0.

    All work is done on one thread, which sleeps until a child speaks, a child ends, or ``stop``. When a child
    dies, every request in flight ends with an error at once and the child is started again, after a delay
    that grows with every death. A scheduler comes back on new sockets, together with its detokenizer, so that
    nothing that was under way to the old ones reaches the new ones.

    The children are started at once, and load the model while ``load`` makes the tokenizer of this process; if it
    raises, they are ended and the error goes on.

    config: settled. on_ready: called each time all children are ready. on_fatal(message, user_error): called
    once if the first start fails; there is no second attempt then.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: Callable[[], Tokenizer],
        on_ready: Callable[[], None],
        on_fatal: Callable[[str, bool], None],
    ) -> None:
        self.config = config
        self._on_ready, self._on_fatal = on_ready, on_fatal
        self._sockets = SocketDirectory()
        self._texts: ZmqReceiver[TextOutput] = ZmqReceiver(self._sockets.address("manager"), TextOutput)
        self._sender: ZmqSender[Command] | None = None
        self._children: dict[str, Child] = {}
        self._ranks = {f"rank-{rank}": rank for rank in range(1, config.tp_size)}
        self._names = (SCHEDULER, DETOKENIZER, *self._ranks)
        self._generation = 0
        self._state = Health("starting", "the model is being loaded")
        self._heartbeat: tuple[float, float] | None = None  # (age when asked, time of asking)
        self._deaths = 0
        self._ready_at = 0.0
        self._retry_at: float | None = 0.0
        self._stopping = threading.Event()
        self._wake_in, self._wake_out = os.pipe()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (
                ("supervisor", self._supervise),
                ("outputs", self._receive),
                ("heartbeat", self._watch_heartbeat),
            )
        ]
        self._start_missing()
        try:
            self.tokenizer = load()
            self.manager = TokenizerManager(
                self.tokenizer,
                context_length=settled_context_length(config),
                max_requests=config.max_requests,
                jump_forward=not config.disable_jump_forward,
                auto_truncate=config.allow_auto_truncate,
            )
        except BaseException:
            self._end_children(force=True)
            self._texts.close()
            self._sockets.remove()
            raise

    def start(self) -> None:
        """Returns at once; ``health`` says when the server is ready."""
        for thread in self._threads:
            thread.start()

    def health(self) -> Health:
        """Never waits: the heartbeat is asked for in the background."""
        state, heartbeat = self._state, self._heartbeat
        if not state.ok or heartbeat is None:
            return state
        return Health.of_heartbeat(heartbeat[0] + time.monotonic() - heartbeat[1])

    def control(self, command: str, timeout: float = 60.0, **arguments: Any) -> Any:
        """Run a command in the scheduler process; see ``SchedulerLoop.control``. Waits."""
        if not self._state.ok:
            raise CapacityError(f"the server is {self._state.status}: {self._state.detail}")
        return call_control(self._control_path(), command, timeout, arguments)

    def drain(self) -> None:
        """Take no new requests; those in flight go on."""
        self._state = Health("draining", "the server is shutting down")
        self.manager.suspend(CapacityError("the server is shutting down"))

    def stop(self) -> None:
        """End everything that was started. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.write(self._wake_out, b"w")
        self._texts.wake()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._end_children()  # there are some left if ``start`` was never called
        error = CapacityError("the server is shutting down")
        self.manager.disconnect(error)
        self.manager.fail_in_flight(error)
        self._texts.close()
        if self._sender is not None:
            self._sender.close()
        self._sockets.remove()

    def _supervise(self) -> None:
        try:
            self._watch_children()
        except Exception as error:
            logger.exception("the supervisor ended with an error")
            self._end(f"the supervisor ended with {type(error).__name__}: {error}", False)
        self._end_children()

    def _end_children(self, force: bool = False) -> None:
        """The ranks last, as the scheduler may be in a step that it cannot end without them."""
        ranks = [child for child in self._children.values() if child.name in self._ranks]
        for some in ([child for child in self._children.values() if child not in ranks], ranks):
            for child in some:
                child.end(force)
            for child in some:
                logger.info("%s: %s", child.name, child.reap(STOP_GRACE))
        self._children.clear()

    def _watch_children(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_in, selectors.EVENT_READ)
            while not self._stopping.is_set():
                self._start_missing()
                self._listen(selector)
                for key, _ in selector.select(self._patience()):
                    child: Child | None = key.data
                    # A child may have been ended by what was done about another one of this round.
                    if child is not None and self._children.get(child.name) is child:
                        self._attend(child, selector)

    def _patience(self) -> float | None:
        return None if self._retry_at is None else max(self._retry_at - time.monotonic(), 0.0)

    def _listen(self, selector: selectors.BaseSelector) -> None:
        """To the children that were started since."""
        for child in self._children.values():
            if child.fd not in selector.get_map():
                selector.register(child.fd, selectors.EVENT_READ, child)

    def _start_missing(self) -> None:
        if self._retry_at is None or time.monotonic() < self._retry_at:
            return
        self._retry_at = None
        if SCHEDULER not in self._children:
            self._generation += 1
        for name in self._names:
            if name not in self._children:
                self._children[name] = Child(name, self._settings(name))

    def _settings(self, name: str) -> Settings:
        config = {f: getattr(self.config, f) for f in self.config.__dataclass_fields__} | {"api_key": None}
        scheduler, detokenizer = (
            self._sockets.address(f"{each}-{self._generation}") for each in (SCHEDULER, DETOKENIZER)
        )
        if name == DETOKENIZER:
            return Settings(config, detokenizer, self._sockets.address("manager"))
        group = str(self._sockets.path / f"group-{self._generation}") if self._ranks else ""
        if name == SCHEDULER:
            return Settings(config, scheduler, detokenizer, self._control_path(), group=group)
        rank = self._ranks[name]
        return Settings(config, inbox_of(group, rank), "", rank=rank, group=group)

    def _control_path(self) -> str:
        return str(self._sockets.path / f"control-{self._generation}")

    def _attend(self, child: Child, selector: selectors.BaseSelector) -> None:
        alive = child.read()
        if not alive:
            self._bury(child, selector)
        elif len(self._children) == len(self._names) and all(each.ready for each in self._children.values()):
            self._join_up()

    def _join_up(self) -> None:
        """All are ready: let requests through."""
        if self._state.ok or self._state.status == "draining":
            return
        address = self._sockets.address(f"{SCHEDULER}-{self._generation}")
        if self._sender is None:
            self._sender = ZmqSender(address)
        self._ready_at = time.monotonic()
        self._heartbeat = (0.0, self._ready_at)
        self._state = Health("ok")
        self.manager.connect(self._sender)
        self._on_ready()

    def _bury(self, child: Child, selector: selectors.BaseSelector) -> None:
        """A child has ended, unasked."""
        selector.unregister(child.fd)
        del self._children[child.name]
        how = child.reap(STOP_GRACE)
        if self._ready_at == 0.0:
            self._give_up(child, how, selector)
            return
        logger.error("the %s process died (%s); restarting it", child.name, how)
        draining = self._state.status == "draining"
        if not draining:
            self._state = Health("restarting", f"the {child.name} process died ({how})")
        lost = BackendError(f"the {child.name} process died ({how}) and the request with it", 500)
        later = CapacityError(f"the {child.name} process is being restarted; try again soon")
        self.manager.suspend(later)
        if child.name != DETOKENIZER:
            self.manager.disconnect(later)
            self._drop_generation(selector)
        self.manager.fail_in_flight(lost)
        if not draining:
            self._retry_at = time.monotonic() + self._delay()

    def _drop_generation(self, selector: selectors.BaseSelector) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        for child in list(self._children.values()):
            selector.unregister(child.fd)
            child.end(force=True)
            child.reap(STOP_GRACE)
        self._children.clear()

    def _delay(self) -> float:
        if time.monotonic() - self._ready_at > HEALTHY_AFTER:
            self._deaths = 0
        self._deaths += 1
        return min(FIRST_DELAY * 2.0 ** (self._deaths - 1), LONGEST_DELAY)

    def _give_up(self, child: Child, how: str, selector: selectors.BaseSelector) -> None:
        """It never worked, so starting it again would not help."""
        answer = child.report
        message = answer.error if answer and answer.error else f"the {child.name} process ended ({how})"
        self._drop_generation(selector)
        self._end(message, bool(answer and answer.user_error))

    def _end(self, message: str, user_error: bool) -> None:
        """For good."""
        self._state = Health("ended", message)
        self.manager.disconnect(BackendError(message, 500))
        self.manager.fail_in_flight(BackendError(message, 500))
        self._on_fatal(message, user_error)

    def _receive(self) -> None:
        while not self._stopping.is_set():
            try:
                self.manager.deliver(self._texts.receive(None))
            except Exception:
                logger.exception("outputs could not be delivered")

    def _watch_heartbeat(self) -> None:
        while not self._stopping.wait(HEARTBEAT_EVERY):
            if not self._state.ok:
                continue
            asked = time.monotonic()
            try:
                age = call_control(self._control_path(), "health", HEARTBEAT_EVERY, {})["heartbeat_age_s"]
            except BackendError as error:
                logger.debug("no heartbeat: %s", error)  # the last one grows old, which health() shows
                self._end_stuck_group()
                continue
            if self._state.ok:
                self._heartbeat = (age, asked)

    def _end_stuck_group(self) -> None:
        """Rank 0 notices when another one is stuck; if it is stuck itself, the others may wait for ever."""
        rank_0 = self._children.get(SCHEDULER)
        if self._ranks and rank_0 is not None and self.health().status == "stuck":
            logger.error("the scheduler process is stuck; ending it")
            rank_0.end(force=True)
