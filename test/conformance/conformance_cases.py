"""Inputs that broke other systems, from a data folder that lies beside the checkout on some machines.

Not collected by a plain `pytest`: `make conformance` names this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.structured import Job, Judge
from trellis.errors import ConstraintError
from trellis.fsm import ConstraintSpec, Vocabulary, compile_grammar
from trellis.runtime.models import load_tokenizer, resolve_model_path

CASES_FILE = Path(__file__).parents[2].parent / "shared" / "cases" / "structured_cases.json"
DATA = CASES_FILE.parents[1] / "data"
CASES: list[dict[str, Any]] = json.loads(CASES_FILE.read_text("utf-8"))
KINDS = {"json_schema": "schema", "ebnf": "grammar", "regex": "regex"}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_tokenizer(resolve_model_path("smollm2-135m")).vocabulary()


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_case(case: dict[str, Any], vocabulary: Vocabulary) -> None:
    if case["kind"] == "ebnf":
        pytest.importorskip("xgrammar", reason="needs the extra 'ebnf'")
    constraint = case["constraint"]
    source = constraint if isinstance(constraint, str) else json.dumps(constraint)
    spec = ConstraintSpec(KINDS[case["kind"]], source)  # type: ignore[arg-type]
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
        assert grammar.accepts(text) or text in case.get("policy_reject", ()), text
    for text in case["reject"]:
        assert not grammar.accepts(text), text


@pytest.mark.parametrize(
    ("name", "least_compiled"), [("json_schemas.jsonl", 0.92), ("json_schema_suite.jsonl", 0.60)]
)
def test_json_schemas(name: str, least_compiled: float) -> None:
    """Masks let nothing invalid through and keep nothing valid out, and few schemas are refused."""
    judge = Judge(Job("auto", strict=True, spacing="spaced", model="smollm2-135m"))
    with (DATA / name).open(encoding="utf-8") as lines:
        outcomes = [judge(json.loads(line)) for line in lines]
    compiled = [outcome for outcome in outcomes if outcome.status == "compiled"]
    assert [outcome.id for outcome in outcomes if outcome.status not in ("compiled", "refused")] == []
    assert [outcome.id for outcome in compiled if outcome.accepted] == []
    assert [outcome.id for outcome in compiled if outcome.unvalidated] == []
    assert sum(len(o.rejected) for o in compiled) <= 0.002 * sum(o.valid for o in compiled)
    assert len(compiled) >= least_compiled * len(outcomes)
