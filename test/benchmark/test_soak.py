"""The soak test, in seconds instead of minutes: its bars hold on the real model, and they can fail."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from benchmark import soak


class Books:
    """An engine at the end of a run, with some of its numbers changed."""

    class manager:
        in_flight = 0

    def __init__(self, **changed: int) -> None:
        names = ("requests", "finished", "running_requests", "waiting_requests", "compiling_requests")
        self.stats = {**dict.fromkeys((*names, "drifts", "failed_steps", "evictable_tokens"), 0)}
        self.stats.update({"pool_tokens": 100, "free_tokens": 100, **changed})

    def control(self, command: str) -> Any:
        return self.stats if command == "stats" else None


def ended(engine: Any, rss: list[float], **counts: int) -> soak.Soak:
    run = soak.Soak(engine, 10.0, random.Random(0), Counter(counts), sum(counts.values()))
    run.samples = [soak.Sample(float(at), mb, 8) for at, mb in enumerate(rss)]
    return run


def failed(run: soak.Soak) -> list[str]:
    return [name for name, held, _ in soak.bars(run) if not held]


def test_a_good_run_fails_no_bar() -> None:
    assert failed(ended(Books(), [500.0, 600.0, 700.0, 700.0, 700.5, 699.0, 700.0], generated=9)) == []


@pytest.mark.parametrize(
    ("engine", "rss", "counts", "bar"),
    [
        (Books(evictable_tokens=1), [1.0] * 9, {"generated": 1}, "slots exact"),
        (Books(free_tokens=90, evictable_tokens=10), [1.0] * 9, {"generated": 1}, "empty after a flush"),
        (Books(requests=2, finished=1), [1.0] * 9, {"generated": 1}, "every request"),
        (Books(drifts=1), [1.0] * 9, {"generated": 1}, "books never wrong"),
        (Books(), [1.0] * 9, {"LOST": 1}, "every call ended"),
        (Books(), [1.0] * 9, {"WRONGLY TAKEN": 1}, "every call ended"),
        (Books(), [100.0 + at for at in range(9)], {"generated": 1}, "resident memory"),
    ],
)
def test_what_went_wrong_fails_its_bar(
    engine: Any, rss: list[float], counts: dict[str, int], bar: str
) -> None:
    (name,) = failed(ended(engine, rss, **counts))
    assert name.startswith(bar)


def test_memory_that_has_found_its_level_is_flat_however_it_got_there() -> None:
    """What a third of the run fills is a cache; one wild sample is no leak."""
    level = [400.0, 500.0, 600.0, *[700.0] * 5, 900.0, 700.0]
    assert failed(ended(Books(), level, generated=1)) == []


def test_memory_that_grows_by_a_little_for_ever_is_not_flat() -> None:
    growing = [700.0 + 5 * at for at in range(18)]
    (name,) = failed(ended(Books(), growing, generated=1))
    assert name.startswith("resident memory")


def test_too_few_samples_say_nothing() -> None:
    with pytest.raises(ValueError, match="too few samples"):
        soak.bars(ended(Books(), [700.0], generated=1))


def held_but_for_memory(lines: str) -> None:
    """Caches are still filling in so short a time, so the bar of memory is for longer runs."""
    bars = [line for line in lines.splitlines() if line.startswith(("ok", "FAIL"))]
    assert len(bars) == 8
    assert [line for line in bars if line.startswith("FAIL") and "resident memory" not in line] == []


@pytest.mark.model
def test_a_few_calls_on_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--seconds", "1", "--clients", "2", "--every", "0.2", "--pool", "1024"])
    held_but_for_memory(capsys.readouterr().out)


@pytest.mark.model
@pytest.mark.slow
def test_a_short_soak_on_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--seconds", "15"])
    held_but_for_memory(capsys.readouterr().out)
