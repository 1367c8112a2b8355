"""Hostile constraints of every kind end in a mask or in a refusal by code, in little memory, and the next
request is served. They run in a process of their own: a crash or a hang would end only that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("hostile_inputs.py")
REFUSALS = {"syntax", "unsupported", "limit", "empty", "timeout"}
# What must not become a mask, and the code that says why.
REFUSED = {
    "regex: 200 groups deep": "limit",
    "regex: 100,000 alternatives": "limit",
    "regex: lone surrogate": "empty",
    "choices: 100,000 options": "limit",
    "choices: 5 MB of options": "limit",
    "choices: lone surrogate": "syntax",
    "schema: 5 MB enum": "limit",
    "schema: 200 objects deep": "limit",
    "schema: 100,000 brackets": "limit",
    "schema: $ref to itself": "syntax",
    "schema: $ref cycle": "syntax",
    "schema: no finite value": "empty",
    "schema: raw NUL": "syntax",
    "schema: lone surrogate": "syntax",
    "schema: 100,000 cases": "limit",
    "schema: 10,000 optional properties": "limit",
    "grammar: NUL": "syntax",
    "grammar: lone surrogate": "syntax",
    "grammar: 100,000 alternatives": "limit",
    "grammar: 20,000 groups deep": "limit",
    "grammar: no finite text": "empty",
}
# What is large or odd, but ordinary enough that it must work.
COMPILED = {
    "regex: exponential",
    "regex: nested repeats",
    "regex: NUL",
    "regex: 8,000 ends",
    "choices: NUL",
    "schema: enum of 20,000",
    "schema: 60 objects deep",
    "schema: tree",
    "schema: NUL",
    "schema: 3,000 optional properties",
    "grammar: ambiguous",
}


@pytest.mark.model
def test_hostile_constraints_end_in_a_mask_or_a_refusal() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    names = {line["case"].partition(", ")[2] for line in lines}
    assert set(REFUSED) | COMPILED <= names
    for line in lines:
        name = line["case"].partition(", ")[2]
        expected = (
            {REFUSED[name]} if name in REFUSED else {"mask"} if name in COMPILED else {"mask", *REFUSALS}
        )
        assert line["outcome"] in expected, line
        assert line["next"], line
    assert max(line["peak_mib"] for line in lines) < 1024
