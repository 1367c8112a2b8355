"""What servers of the OpenAI API take beyond it, by name. A field that a server does not have is refused here: most
of them ignore what they do not know, and an ignored constraint looks like a kept one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trellis.errors import InvalidRequestError
from trellis.frontend.backends.base import Constraint, SamplingOptions
from trellis.frontend.backends.structured import unsupported

_COMMON = {
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "logit_bias": "logit_bias",
    "stop": "stop",
}
_SERVERS = {
    "min_new_tokens": "min_tokens",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
}
_DEFAULTS = SamplingOptions()
_SPELLED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # what programs call them


@dataclass(frozen=True)
class Dialect:
    """extras: ``SamplingOptions`` field → field of the body, beyond the OpenAI API's.

    constraint: a constraint as fields of the body; None: only structured outputs of the chat API.
    length: what the chat API calls the limit of new tokens.
    continues: a chat goes on from text in the assistant's own message (``continue_final_message``).
    token_ids: log-probabilities name tokens by their ids (``return_tokens_as_token_ids``).
    says_all: temperature and top_p are always sent, since the server's defaults may be the model's own.
    native: it is a Trellis server, whose own routes tell the chat template and score options, and which heals tokens.
    """

    name: str
    extras: Mapping[str, str] = field(default_factory=dict)
    constraint: Callable[[Constraint], dict[str, Any]] | None = None
    length: str = "max_tokens"
    continues: bool = False
    token_ids: bool = False
    says_all: bool = False
    native: bool = False

    def sampling(self, sampling: SamplingOptions, api: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arguments of the official client, further fields of the body), without the limit of new tokens.

        InvalidRequestError for a parameter that would have to be left out.
        """
        known: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for each in fields(sampling):
            name, value = each.name, getattr(sampling, each.name)
            always = self.says_all and name in ("temperature", "top_p")
            if name == "max_new_tokens" or (value == getattr(_DEFAULTS, name) and not always):
                continue
            if name == "logit_bias":
                value = {str(token): bias for token, bias in value}
            elif isinstance(value, tuple):
                value = list(value)
            if name in _COMMON:
                known[_COMMON[name]] = value
            elif name in self.extras:
                extra[self.extras[name]] = value
            else:
                raise missing(name, api)
        return known, extra

    def constrained(self, constraint: Constraint, api: str) -> dict[str, Any]:
        """Fields of the body that make the server enforce the constraint."""
        if self.constraint is None:
            reason = (
                f"{api} cannot enforce a {constraint.kind}; use the chat API for schema= and choices=, "
                "or say which server it is: dialect='trellis' or 'vllm'"
            )
            raise unsupported(constraint, reason)
        return self.constraint(constraint)


def missing(name: str, api: str) -> InvalidRequestError:
    """For a sampling parameter that an API does not have."""
    reason = f"{api} has no such parameter, and it will not be dropped silently; leave it out"
    return InvalidRequestError(_SPELLED.get(name, name), reason)


def _trellis(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind == "choices":
        return {"choices": json.loads(constraint.source)}
    if constraint.kind == "schema":
        spacing, strict = constraint.spacing, constraint.strict
        return {"json_schema": constraint.source, "json_spacing": spacing, "strict": strict}
    return {constraint.kind: constraint.source}


def _vllm(constraint: Constraint) -> dict[str, Any]:
    names = {"choices": "choice", "schema": "json", "regex": "regex", "grammar": "grammar"}
    value = json.loads(constraint.source) if constraint.kind in ("choices", "schema") else constraint.source
    if constraint.kind == "schema" and (constraint.spacing != "spaced" or not constraint.strict):
        raise unsupported(
            constraint, "vLLM takes no json_spacing or strict=False with a request; leave them out"
        )
    return {"structured_outputs": {names[constraint.kind]: value}}


DIALECTS: Mapping[str, Dialect] = {
    each.name: each
    for each in (
        Dialect("openai", length="max_completion_tokens"),
        Dialect(
            "trellis",
            extras={**_SERVERS, "stop_regex": "stop_regex"},
            constraint=_trellis,
            continues=True,
            token_ids=True,
            says_all=True,
            native=True,
        ),
        Dialect("vllm", extras=_SERVERS, constraint=_vllm, continues=True, token_ids=True, says_all=True),
    )
}


def dialect_named(name: str) -> Dialect:
    """InvalidRequestError for an unknown one."""
    found = DIALECTS.get(name)
    if found is None:
        known = ", ".join(repr(each) for each in DIALECTS)
        raise InvalidRequestError("dialect", f"must be one of {known}, got {name!r}")
    return found
