"""The site of ``make docs``: its menu has every page, and its reference has every public name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import trellis

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ENTRY = re.compile(r"^::: (trellis[\w.]*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(each)


def pages() -> list[str]:
    return sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def entries() -> list[str]:
    return [name for page in pages() for name in ENTRY.findall((DOCS / page).read_text("utf-8"))]


def anchors(text: str) -> set[str]:
    """As MkDocs makes them of headings."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_the_menu_has_every_page_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert sorted(pages_of(settings["nav"])) == pages()


def test_every_public_name_of_the_language_is_in_the_reference() -> None:
    found = {name.removeprefix("trellis.") for name in entries() if name.count(".") == 1}
    missing = set(trellis.__all__) - found
    assert not missing, f"add '::: trellis.NAME' to a page in docs/api: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("package", ["trellis.radix", "trellis.fsm", "trellis.runtime.scheduler"])
def test_the_reference_has_what_a_package_offers(package: str) -> None:
    found = {name.removeprefix(f"{package}.") for name in entries() if name.startswith(f"{package}.")}
    assert found == set(import_module(package).__all__)


def test_no_name_has_two_entries() -> None:
    assert len(entries()) == len(set(entries()))


@pytest.mark.parametrize("page", ["../README.md", "../CONTRIBUTING.md", *pages()])
def test_links_within_the_repository_lead_somewhere(page: str) -> None:
    path = DOCS / page
    for link in LINK.findall(path.read_text("utf-8")):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target.read_text("utf-8")), f"{page}: {link}"
