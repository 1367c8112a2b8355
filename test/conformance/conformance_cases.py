"""Inputs that broke other systems, from a data folder that lies beside the checkout on some machines.

Not collected by a plain `pytest`: `make conformance` names this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Vocabulary, compile_grammar
from trellis.runtime.models import load_tokenizer, resolve_model_path

CASES_FILE = Path(__file__).parents[2].parent / "shared" / "cases" / "structured_cases.json"
CASES: list[dict[str, Any]] = json.loads(CASES_FILE.read_text("utf-8"))
REGEX_CASES = [case for case in CASES if case["kind"] == "regex"]
OTHER_CASES = [case for case in CASES if case["kind"] != "regex"]
ENGINE_KIND = {"json_schema": "schema", "ebnf": "grammar"}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_tokenizer(resolve_model_path("smollm2-135m")).vocabulary()


@pytest.mark.parametrize("case", REGEX_CASES, ids=lambda case: str(case["id"]))
def test_regex_case(case: dict[str, Any], vocabulary: Vocabulary) -> None:
    spec = ConstraintSpec.regex(case["constraint"])
    refusal: ConstraintError | None = None
    try:
        grammar = compile_grammar(spec, vocabulary)
    except ConstraintError as error:
        refusal = error
    if refusal is not None or case["expect"] == "error":
        assert refusal is not None
        assert case["expect"] != "ok", refusal
        return
    for text in case["accept"]:
        assert grammar.accepts(text), text
    for text in case["reject"]:
        assert not grammar.accepts(text), text


@pytest.mark.parametrize("case", OTHER_CASES, ids=lambda case: str(case["id"]))
def test_a_kind_without_an_engine_is_refused_by_name(case: dict[str, Any], vocabulary: Vocabulary) -> None:
    constraint = case["constraint"]
    source = constraint if isinstance(constraint, str) else json.dumps(constraint)
    spec = ConstraintSpec(ENGINE_KIND[case["kind"]], source)  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match=spec.kind):
        compile_grammar(spec, vocabulary)
