"""A JSON object of a fixed form. The regex holds for every token, so the text always parses.

python examples/character_sheet.py
"""

from __future__ import annotations

import json
import re
from typing import Any

from trellis import ProgramState, assistant, function, gen, set_default_backend, user

WORDS = r"[A-Za-z]+( [A-Za-z]+){0,2}"
SHEET = (
    r"\{\n"
    rf'  "name": "{WORDS}",\n'
    r'  "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'  "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'  "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    r'  "wand": \{\n'
    rf'    "wood": "{WORDS}",\n'
    rf'    "core": "{WORDS}",\n'
    r'    "length": [0-9]{1,2}\.[0-9]\n'
    r"  \},\n"
    r'  "alive": (true|false)\n'
    r"\}"
)


@function
def character(s: ProgramState, name: str) -> None:
    s += user(
        f"{name} is a character in Harry Potter. Fill in the following information about {name} as JSON."
    )
    s += assistant(gen("sheet", regex=SHEET, max_tokens=256))


def main() -> list[dict[str, Any]]:
    states = character.run_batch([("Harry Potter",), ("Hermione Granger",)], temperature=0)
    sheets = []
    for state in states:
        assert re.fullmatch(SHEET, state["sheet"])
        sheets.append(json.loads(state["sheet"]))
        counts = state.meta("sheet").counts
        print(state["sheet"])
        print(f"{counts.completion_tokens} tokens, {counts.forced_tokens} of them forced, ", end="")
        print(f"{counts.forward_passes} passes through the model\n")
    return sheets


if __name__ == "__main__":
    from common import choose_backend

    with choose_backend() as backend:
        set_default_backend(backend)
        main()
