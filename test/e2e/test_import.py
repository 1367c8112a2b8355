"""The language alone is light: importing it loads neither torch nor the server."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "zmq",
    "fastapi",
    "trellis.runtime",
    "trellis.fsm",
    "trellis.radix",
)


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(chr(10).join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_language_loads_nothing_heavy() -> None:
    loaded = modules_after(
        "import trellis; from trellis import function, gen, select, fork, join, RuntimeEndpoint, Engine"
    )
    assert not loaded.intersection(HEAVY)


def test_every_public_name_resolves() -> None:
    import trellis

    for name in trellis.__all__:
        assert getattr(trellis, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import trellis; trellis.nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "module 'trellis' has no attribute 'nonsense'" in done.stderr
