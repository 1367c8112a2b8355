"""``select`` where options cannot be scored: the model chooses, by a constraint that leaves it nothing else."""

from __future__ import annotations

import json

from trellis.errors import BackendError, InvalidRequestError
from trellis.frontend.backends.base import Completion, Constraint, GenerateRequest, SamplingOptions
from trellis.frontend.choices import MEAN
from trellis.frontend.expressions import Select
from trellis.frontend.transcript import Transcript
from trellis.frontend.variable import SelectMeta

_ROOM = 32  # tokens around an option in the JSON of an API


def choice_request(select: Select, transcript: Transcript) -> GenerateRequest:
    """The question that lets the model choose. InvalidRequestError for a method that needs scores."""
    if select.method is not MEAN:
        reason = (
            f"{select.method.name!r} compares log-probabilities of the options, which a chat API does not tell; "
            "leave method out, and the model chooses by constrained decoding"
        )
        raise InvalidRequestError("select.method", reason)
    longest = max(len(choice.encode()) for choice in select.choices)  # no token has less than a byte
    return GenerateRequest(
        prompt=transcript.prompt(),
        sampling=SamplingOptions(
            max_new_tokens=longest + _ROOM, temperature=select.temperature, seed=select.seed
        ),
        constraint=Constraint("choices", json.dumps(select.choices, ensure_ascii=False)),
        conversation=transcript.conversation(),
    )


def chosen_meta(select: Select, completion: Completion, seconds: float) -> SelectMeta:
    """BackendError if the answer is none of the options. There are no scores: the API tells none."""
    if completion.text not in select.choices:
        raise BackendError(f"the answer {completion.text[:100]!r} is none of the options of the select")
    return SelectMeta(
        counts=completion.counts,
        seconds=seconds,
        finish_reason="stop",
        pieces=((completion.text, "selected"),),
        choices=select.choices,
        method="chosen",
    )
