"""What ``--tp-size`` goes with, and what is said about the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trellis.errors import InvalidRequestError
from trellis.runtime.config import ServerConfig
from trellis.runtime.engine import InProcessEngine


@pytest.mark.parametrize(
    ("flags", "field", "message"),
    [
        ({"tp_size": 0}, "tp_size", "at least 1"),
        ({"tp_size": 2, "tp_timeout": 0}, "tp_timeout", "at least 1"),
        ({"tp_size": 2, "executor": "native"}, "executor", "one process, not on 2 ranks; take auto or torch"),
        ({"tp_size": 2, "quantization": "int8"}, "quantization", "one process, not on 2 ranks"),
        ({"tp_size": 2, "deterministic": True}, "deterministic", "one process, not on 2 ranks"),
    ],
)
def test_flags_that_do_not_go_together(flags: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ServerConfig("m", **flags)
    assert caught.value.field == field


def test_ranks_are_processes_of_a_server(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="needs a server: trellis serve --tp-size N"):
        InProcessEngine(ServerConfig(str(tiny_model), tp_size=2))
