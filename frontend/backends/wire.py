"""What the language asks a server for, as the runtime's JSON. The answers are read in ``answers``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trellis.frontend.backends.base import Constraint, GenerateRequest, Segment


def segments(prompt: Sequence[Segment]) -> list[str | list[int]]:
    return [segment if isinstance(segment, str) else list(segment) for segment in prompt]


def generate_body(request: GenerateRequest, stream: bool, n: int = 1) -> dict[str, Any]:
    """Body of ``POST /generate``. n: samples of the prompt; the answer to more than one is a list."""
    given = asdict(request.sampling)
    given["logit_bias"] = {str(token): bias for token, bias in request.sampling.logit_bias}
    # What is empty or None is the server's default too, and an older server may not know the field.
    sampling = {name: value for name, value in given.items() if value is not None and value not in ((), {})}
    if n > 1:
        sampling["n"] = n
    if request.constraint is not None:
        sampling.update(_constraint(request.constraint))
    body: dict[str, Any] = {"segments": segments(request.prompt), "sampling_params": sampling}
    if stream:
        body["stream"] = True
    if request.token_healing:
        body["token_healing"] = True
    if request.return_logprob:
        body["return_logprob"] = True
        body["top_logprobs_num"] = request.top_logprobs_num
    return body


def _constraint(constraint: Constraint) -> dict[str, Any]:
    """A constraint as fields of ``sampling_params``."""
    if constraint.kind == "choices":
        return {"choices": json.loads(constraint.source)}
    if constraint.kind == "schema":
        # As text, so that the order of its properties, which is the order of the answer's, cannot change.
        spacing, strict = constraint.spacing, constraint.strict
        return {"json_schema": constraint.source, "json_spacing": spacing, "strict": strict}
    return {constraint.kind: constraint.source}
