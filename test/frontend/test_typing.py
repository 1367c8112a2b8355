"""The types of values are visible to a type checker."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = """
[mypy]
strict = true
mypy_path = {place}
follow_imports = silent
[mypy-trellis.runtime.*,trellis.fsm.*,openai.*,anthropic.*,litellm.*,httpx.*]
follow_imports = skip
ignore_missing_imports = true
"""


def test_mypy_sees_the_types_of_values_and_the_mistakes_of_programs() -> None:
    """The folders of the repository are laid out as the installed package is, by links; always in the same place, so
    that mypy finds its cache."""
    api = pytest.importorskip("mypy.api")
    place = ROOT / ".mypy_cache" / "typing"
    package = place / "trellis"
    package.mkdir(parents=True, exist_ok=True)
    folders = [ROOT / folder for folder in ("frontend", "radix", "fsm", "runtime")]
    for source in [*(ROOT / "trellis").glob("*.py"), ROOT / "trellis" / "py.typed", *folders]:
        link = package / source.name
        if source.exists() and not link.is_symlink():
            link.symlink_to(source)
    config = place / "mypy.ini"
    config.write_text(CONFIG.format(place=place))
    program = Path(__file__).with_name("typed_program.py")
    out, errors, status = api.run(
        ["--config-file", str(config), "--cache-dir", str(place / "cache"), str(program)]
    )
    assert (status, errors) == (0, ""), out
