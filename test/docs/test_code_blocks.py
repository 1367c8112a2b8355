"""The Python blocks of the README and of all pages in docs/ run as they stand, each page from top to bottom."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trellis

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Any way to write one, also where BLOCK would not find it: indented, with attributes, under another name of Python.
ANY_BLOCK = re.compile(r"^\s*(```+|~~~+) *\{?\.?(python|py|pycon)\b", re.MULTILINE | re.IGNORECASE)
PAGES = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if ANY_BLOCK.search(path.read_text("utf-8"))
]


def blocks(page: str) -> list[str]:
    return [match.group(1) for match in BLOCK.finditer((ROOT / page).read_text("utf-8"))]


def test_every_block_is_one_that_is_run() -> None:
    assert {"README.md", "docs/guide.md", "docs/coming-from.md"} <= set(PAGES)
    for page in PAGES:
        assert len(blocks(page)) == len(ANY_BLOCK.findall((ROOT / page).read_text("utf-8"))), page


@pytest.mark.model
@pytest.mark.server
@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, engine: Any, server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The pages make an engine, and expect a server on the default port; the tests have one of each. An engine with settings
    # is made as the page says.
    made = trellis.Engine
    monkeypatch.setattr(
        trellis, "Engine", lambda *args, **own: made(*args, **own) if own else engine, raising=False
    )
    module = ModuleType(f"page_{Path(page).stem}")  # types that a page defines are looked up in their module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = blocks(page)
    assert found
    for number, code in enumerate(found):
        code = code.replace("http://127.0.0.1:30000", server_url)
        name = f"<{page} {number}>"  # tracing reads the source of programs
        monkeypatch.setitem(linecache.cache, name, (len(code), None, code.splitlines(True), name))
        exec(compile(code, name, "exec", dont_inherit=True), vars(module))
    trellis.set_default_backend(None)
