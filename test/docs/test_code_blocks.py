"""The Python blocks of the README and of the guide run as they stand, each page from top to bottom."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trellis

ROOT = Path(__file__).parents[2]
PAGES = ["docs/guide.md", "README.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    return [match.group(1) for match in BLOCK.finditer((ROOT / page).read_text("utf-8"))]


@pytest.mark.model
@pytest.mark.server
@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, engine: Any, server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The pages make an engine, and expect a server on the default port; the tests have one of each.
    monkeypatch.setattr(trellis, "Engine", lambda *_args, **_settings: engine, raising=False)
    module = ModuleType(f"page_{Path(page).stem}")  # types that a page defines are looked up in their module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = blocks(page)
    assert found
    for code in found:
        code = code.replace("http://127.0.0.1:30000", server_url)
        exec(compile(code, page, "exec", dont_inherit=True), vars(module))
    trellis.set_default_backend(None)
