"""One-way channels for lists of messages: a queue in memory, or zmq between processes.

A message is a list of structs; it is sent whole, arrives whole and in order. Every channel has a bound.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import zmq

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)
T_out = TypeVar("T_out", covariant=True)

DEFAULT_BOUND = 4096  # messages


class ChannelFull(Exception):
    """The receiver is this many messages behind."""


class Sender(Protocol[T_in]):
    def send(self, items: Sequence[T_in], timeout: float = 0.0) -> None:
        """Thread-safe. Raises ChannelFull if there is no room within ``timeout`` seconds."""

    def close(self) -> None: ...


class Receiver(Protocol[T_out]):
    def receive(self, timeout: float | None) -> Sequence[T_out]:
        """All items that have arrived, in order; waits up to ``timeout`` seconds (None: for ever) for the first.

        Empty after a timeout, a ``wake`` or a ``close``. For one thread only.
        """

    def wake(self) -> None:
        """End the current or the next wait of ``receive``. Thread-safe."""

    def close(self) -> None: ...


class MemoryChannel(Generic[T]):
    """Sender and receiver within one process."""

    def __init__(self, bound: int = DEFAULT_BOUND) -> None:
        self._bound = bound
        self._messages: deque[Sequence[T]] = deque()
        self._changed = threading.Condition()
        self._woken = False

    def send(self, items: Sequence[T], timeout: float = 0.0) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._messages) < self._bound, timeout):
                raise ChannelFull(f"{self._bound} messages wait for the receiver")
            self._messages.append(items)
            self._changed.notify_all()

    def receive(self, timeout: float | None) -> Sequence[T]:
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._woken, timeout)
            self._woken = False
            items = [item for message in self._messages for item in message]
            self._messages.clear()
            self._changed.notify_all()
            return items

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        self.wake()


class ZmqSender(Generic[T]):
    """PUSH end. Connects (or binds) to an ``ipc://`` address."""

    def __init__(self, address: str, bind: bool = False, bound: int = DEFAULT_BOUND) -> None:
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, bound)
        _attach(self._socket, address, bind)

    def send(self, items: Sequence[T], timeout: float = 0.0) -> None:
        payload = self._encoder.encode(items)
        with self._lock:
            if self._socket.closed:
                raise ChannelFull("the channel is closed")
            try:
                self._socket.setsockopt(zmq.SNDTIMEO, round(timeout * 1000))
                self._socket.send(payload, copy=False)
            except zmq.Again:
                raise ChannelFull("the receiving process is too far behind") from None

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class ZmqReceiver(Generic[T]):
    """PULL end. item_type: the struct (or union of tagged structs) that messages are lists of."""

    def __init__(self, address: str, item_type: Any, bind: bool = True, bound: int = DEFAULT_BOUND) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[item_type])
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, bound)
        _attach(self._socket, address, bind)
        # zmq sockets belong to one thread; other threads end a wait through this pair.
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_in, zmq.POLLIN)

    def receive(self, timeout: float | None) -> Sequence[T]:
        ready = dict(self._poller.poll(None if timeout is None else round(timeout * 1000)))
        if self._wake_in.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
        items: list[T] = []
        if self._socket in ready:
            # Bounded, so that a fast sender cannot keep the receiver from its work.
            for _ in range(DEFAULT_BOUND):
                try:
                    items += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
        return items

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is pending already; closed: nobody waits
            self._wake_out.send(b"w")

    def close(self) -> None:
        self._socket.close()
        self._wake_in.close()
        self._wake_out.close()


class SocketDirectory:
    """A new directory that only its owner may enter, for the unix sockets of one server."""

    _LONGEST_NAME = 40  # file names in it; the whole path of a unix socket has to fit into 107 bytes

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) + len("/trellis-xxxxxxxx/") + self._LONGEST_NAME > 107:
            parent = "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix="trellis-", dir=parent))  # mode 0700

    def address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _attach(zmq_socket: zmq.Socket[bytes], address: str, bind: bool) -> None:
    if bind:
        zmq_socket.bind(address)
    else:
        zmq_socket.connect(address)
