"""The cyclic collector waits until there is nothing to do."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from trellis.runtime import loop as loop_module
from trellis.runtime.loop import SchedulerLoop
from trellis.runtime.manager.transport import MemoryChannel

SCRIPT = """
import gc
from trellis.radix import RadixCache
from trellis.runtime.server import collector

full = []
gc.callbacks.append(lambda phase, info: full.append(info) if phase == "stop" and info["generation"] == 2 else None)
collector.hold_back()
frozen = gc.get_freeze_count()
assert frozen > 0
full.clear()
cache = RadixCache()
for i in range(100_000):
    cache.insert([i, 1], [2 * i + 1, 2 * i + 2])
assert full == [], "no full pass while the tree grows"
collector.catch_up()
assert len(full) == 1, "one when there is time"
collector.catch_up()
assert len(full) == 1, "and none that is not worth it"
cache.evict(200_000)
assert cache.nodes == 0
del cache
gc.collect()
assert full[-1]["uncollectable"] == 0
"""


def test_no_full_pass_while_a_tree_grows_and_one_when_there_is_time() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


def test_an_idle_loop_says_so(scheduler: object, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = threading.Event()
    monkeypatch.setattr(loop_module, "IDLE_BEAT", 0.02)
    loop = SchedulerLoop(scheduler, MemoryChannel(), lambda _: None, when_idle=idle.set)  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run)
    thread.start()
    assert idle.wait(10)
    loop.stop()
    thread.join(10)
    assert not thread.is_alive()
