"""The search for an accepted spelling finds the order in which an engine wants the members of objects."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest

from benchmark.spellings import accepted_spelling, write


def only(wanted: Any) -> Any:
    """How many characters of a text are accepted where only one spelling is, as by the masks of an engine."""
    text = write(wanted, (", ", ": ")).text

    def reach(given: str) -> int:
        same = next((i for i, (a, b) in enumerate(zip(text, given, strict=False)) if a != b), len(given))
        return same + (given == text)

    return reach


@pytest.mark.parametrize("order", list(permutations(["type", "uri", "blob"])))
def test_members_are_found_in_every_order(order: tuple[str, ...]) -> None:
    value = {"items": [{"type": 1, "uri": 2, "blob": 3}], "n": 1.0}
    wanted = {"n": 1, "items": [{name: value["items"][0][name] for name in order}]}  # type: ignore[index]
    text, as_given = accepted_spelling(value, True, (", ", ": "), 200, only(wanted))
    assert (text, as_given) == (json.dumps(wanted), False)


def test_a_member_that_comes_too_late_is_put_before_others() -> None:
    """``c`` is refused where it stands, as an engine does that has gone past its place."""

    def reach(text: str) -> int:
        names = list(json.loads(text))
        late = names.index("c") > names.index("a")
        return text.index('"c"') if late else len(text) + 1

    text, as_given = accepted_spelling({"a": 1, "b": 2, "c": 3}, True, (", ", ": "), 20, reach)
    assert text is not None
    assert list(json.loads(text)).index("c") == 0
    assert not as_given


def test_what_no_order_makes_right_is_not_found() -> None:
    assert accepted_spelling({"a": 1, "b": 2}, True, (", ", ": "), 50, lambda _text: 3) == (None, False)
