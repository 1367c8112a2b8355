"""The control plane: commands to the scheduler process over rpyc on a private unix socket.

Arguments and answers are JSON text, so that no object of one process is ever reachable from the other.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

import msgspec
import rpyc
from rpyc.utils.factory import unix_connect
from rpyc.utils.server import ThreadedServer

from trellis.errors import BackendError, InvalidRequestError, TrellisError
from trellis.runtime.loop import SchedulerLoop

logger = logging.getLogger(__name__)


class Answer(msgspec.Struct):
    """result, or error; field is set for a client's mistake."""

    result: Any = None
    error: str = ""
    field: str = ""


class _Server(ThreadedServer):  # type: ignore[misc]
    """A connection for which the system has no thread is closed, and the next ones are accepted all the same."""

    def _accept_method(self, sock: socket.socket) -> None:
        try:
            super()._accept_method(sock)
        except RuntimeError as error:
            logger.warning("a control connection was closed: %s", error)
            self.clients.discard(sock)
            sock.close()


class ControlServer:
    """Answers in the scheduler process, each connection on a thread of its own.

    Commands: those of ``SchedulerLoop.control``, and ``shutdown``.
    """

    def __init__(self, path: str, loop: SchedulerLoop) -> None:
        self._loop = loop
        call = self.call

        class Service(rpyc.Service):  # type: ignore[misc]
            def exposed_call(self, command: str, arguments: str, timeout: float) -> str:
                return call(command, arguments, timeout)

        quiet = logger.getChild("rpyc")  # it reports every connection
        quiet.setLevel(logging.WARNING)
        self._server = _Server(Service(), socket_path=path, logger=quiet)

    def start(self) -> None:
        threading.Thread(target=self._server.start, name="control", daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def call(self, command: str, arguments: str, timeout: float) -> str:
        return msgspec.json.encode(self._answer(command, arguments, timeout)).decode()

    def _answer(self, command: str, arguments: str, timeout: float) -> Answer:
        try:
            if command == "shutdown":
                self._loop.stop()
                return Answer()
            return Answer(self._loop.control(command, timeout, **msgspec.json.decode(arguments)))
        except InvalidRequestError as error:
            return Answer(error=error.reason, field=error.field)
        except TrellisError as error:
            return Answer(error=str(error))
        except Exception as error:
            logger.exception("control command %r failed", command)
            return Answer(error=f"{type(error).__name__}: {error}")


def call_control(path: str, command: str, timeout: float, arguments: dict[str, Any]) -> Any:
    """Ask the scheduler process. A connection a call: a call that hangs holds up no other.

    Raises InvalidRequestError for a client's mistake, BackendError when there is no answer in ``timeout``
    seconds or the answer is a failure.
    """
    try:
        connection = unix_connect(path, config={"sync_request_timeout": timeout + 1.0})
        try:
            text = connection.root.call(command, msgspec.json.encode(arguments).decode(), timeout)
        finally:
            connection.close()
    except (OSError, EOFError, TimeoutError) as error:
        raise BackendError(f"the scheduler process does not answer {command!r}: {error}", 503) from error
    answer = msgspec.json.decode(text, type=Answer)
    if answer.field:
        raise InvalidRequestError(answer.field, answer.error)
    if answer.error:
        raise BackendError(answer.error, 500)
    return answer.result
