"""Every kind of run that the benchmark of the language measures does all of its gens."""

from __future__ import annotations

import pytest

from benchmark.language import KINDS, import_milliseconds, measure


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_measured(kind: str) -> None:
    found = measure(kind, states=4, gens=3)
    assert found.kind == kind
    assert found.gens > 0
    assert found.megabytes > 0


def test_the_time_of_an_import_is_read_from_the_interpreter() -> None:
    assert import_milliseconds("import trellis", rounds=1) > 0
