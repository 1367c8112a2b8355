"""Both transports keep the same promises."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from trellis.runtime.manager.transport import (
    ChannelFull,
    MemoryChannel,
    SocketDirectory,
    ZmqReceiver,
    ZmqSender,
)
from trellis.runtime.messages import (
    AbortCommand,
    Constraint,
    Counts,
    FinishReason,
    GenerateCommand,
    SamplingParams,
    TextOutput,
    TokenOutput,
)

Command = GenerateCommand | AbortCommand


@pytest.fixture(params=["memory", "zmq"])
def channel(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """(sender, receiver) with room for a few messages."""
    if request.param == "memory":
        memory: MemoryChannel[Command] = MemoryChannel(bound=4)
        yield memory, memory
        return
    directory = SocketDirectory()
    receiver: ZmqReceiver[Command] = ZmqReceiver(directory.address("x"), Command, bound=2)
    sender: ZmqSender[Command] = ZmqSender(directory.address("x"), bound=2)
    yield sender, receiver
    sender.close()
    receiver.close()
    directory.remove()


def receive(receiver: Any, n: int) -> list[Any]:
    items: list[Any] = []
    for _ in range(1000):
        items += receiver.receive(1.0)
        if len(items) >= n:
            break
    return items


def test_messages_arrive_whole_and_in_order(channel: tuple[Any, Any]) -> None:
    sender, receiver = channel
    sent = [
        GenerateCommand(
            rid="a",
            token_ids=[1, 2, 3],
            params=SamplingParams(logit_bias={5: -1.5}, stop=["é"], seed=-(1 << 63)),
            constraint=Constraint("regex", "a+"),
        ),
        AbortCommand("a"),
    ]
    sender.send(sent)
    sender.send([AbortCommand("b")])
    assert receive(receiver, 3) == [*sent, AbortCommand("b")]


def test_a_timeout_gives_nothing(channel: tuple[Any, Any]) -> None:
    assert list(channel[1].receive(0.0)) == []


def test_wake_ends_a_wait(channel: tuple[Any, Any]) -> None:
    _, receiver = channel
    got: list[list[Any]] = []
    thread = threading.Thread(target=lambda: got.append(list(receiver.receive(None))))
    thread.start()
    receiver.wake()
    thread.join(30)
    assert got == [[]]


def test_a_wake_before_the_wait_is_not_lost(channel: tuple[Any, Any]) -> None:
    channel[1].wake()
    assert list(channel[1].receive(None)) == []


def test_a_full_channel_says_so_and_loses_nothing(channel: tuple[Any, Any]) -> None:
    sender, receiver = channel
    sent = 0

    def fill() -> None:
        nonlocal sent
        while True:
            sender.send([AbortCommand(str(sent))])
            sent += 1

    with pytest.raises(ChannelFull):
        fill()
    assert [command.rid for command in receive(receiver, sent)] == [str(i) for i in range(sent)]
    sender.send([AbortCommand("more")], timeout=5.0)
    assert receive(receiver, 1) == [AbortCommand("more")]


def test_many_senders(channel: tuple[Any, Any]) -> None:
    sender, receiver = channel

    def send(name: str) -> None:
        for i in range(50):
            sender.send([AbortCommand(f"{name}{i}")], timeout=30.0)

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    got = receive(receiver, 150)
    for thread in threads:
        thread.join()
    for name in "abc":
        assert [c.rid for c in got if c.rid[0] == name] == [f"{name}{i}" for i in range(50)]


def test_outputs_survive_the_wire() -> None:
    directory = SocketDirectory()
    output = TokenOutput(
        rid="r",
        token_ids=[1],
        counts=Counts(prompt_tokens=3),
        logprobs=[-0.25],
        top_logprobs=[[(1, -0.25), (2, -3.0)]],
        input_logprobs=[None, -1.0],
        finish=FinishReason("stop", matched="x"),
        forced=[True],
    )
    text = TextOutput(
        rid="r",
        text="é",
        token_ids=[1],
        counts=Counts(),
        finish=FinishReason("stop", matched=7),
        forced_spans=[(0, 1)],
    )
    for name, kind, item in (("tokens", TokenOutput, output), ("texts", TextOutput, text)):
        receiver: ZmqReceiver[Any] = ZmqReceiver(directory.address(name), kind)
        sender: ZmqSender[Any] = ZmqSender(directory.address(name))
        sender.send([item])
        assert receive(receiver, 1) == [item]
        sender.close()
        receiver.close()
    directory.remove()


def test_only_the_owner_may_enter_the_directory() -> None:
    directory = SocketDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.remove()
    assert not directory.path.exists()


def test_a_deep_temporary_directory_still_gives_addresses_that_fit(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    directory = SocketDirectory()
    receiver: ZmqReceiver[Any] = ZmqReceiver(directory.address("detokenizer-1000"), AbortCommand)
    receiver.close()
    directory.remove()
