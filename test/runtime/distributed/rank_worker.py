"""A rank other than 0, for tests that are rank 0 themselves: ``python rank_worker.py RANK SIZE PATH TIMEOUT``.

Each line of stdin is the path of a model, of which a part is loaded and followed until the next line, and up to how many logits
are computed at once.
"""

from __future__ import annotations

import sys
import threading

import torch
from rank_fakes import FollowingStep

from trellis.runtime.distributed.contract import Place, inbox_of
from trellis.runtime.distributed.follower import Follower
from trellis.runtime.distributed.group import Group
from trellis.runtime.distributed.wire import Message
from trellis.runtime.executor import build_runner, step
from trellis.runtime.manager.transport import ZmqReceiver


def main() -> None:
    rank, size, path, timeout = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    inbox: ZmqReceiver[Message] = ZmqReceiver(inbox_of(path, rank), Message)
    group = Group(Place(rank, size, path, timeout), torch.device("cpu"))
    lines: list[str] = []
    come = threading.Event()
    stopping = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            lines.append(line.strip())
            come.set()
            stopping.set()
            inbox.wake()
        lines.append("")
        come.set()
        stopping.set()
        inbox.wake()

    threading.Thread(target=read, daemon=True).start()
    while True:
        come.wait()
        come.clear()
        model = lines[-1]
        if not model:
            break
        stopping.clear()
        model, step.EAGER_VALUES = model.rsplit(" ", 1)[0], int(model.rsplit(" ", 1)[1])
        runner = build_runner(model, "float32", num_slots=256, executor="torch", ranks=group)
        runner.step = FollowingStep(runner, [0] * 8)
        Follower(runner, group).run(inbox, stopping)
    group.leave()


if __name__ == "__main__":
    main()
