"""Whatever JSON a client sends: a 2xx or a 4xx with a field's name, never a 5xx, and the server goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        [
            "max_new_tokens",
            "min_new_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "seed",
            "n",
            "regex",
            "choices",
        ],
        VALUES,
    ),
)
NATIVE = st.fixed_dictionaries(
    {},
    optional={
        "text": VALUES,
        "input_ids": VALUES,
        "segments": VALUES,
        "sampling_params": SAMPLING | VALUES,
        **dict.fromkeys(
            [
                "stream",
                "return_logprob",
                "logprob_start_len",
                "top_logprobs_num",
                "rid",
                "cache_salt",
                "image_data",
            ],
            VALUES,
        ),
    },
)
OPENAI = st.fixed_dictionaries(
    {},
    optional={
        "prompt": VALUES,
        "messages": st.lists(
            st.fixed_dictionaries(
                {}, optional={"role": st.sampled_from(["user", "x"]) | VALUES, "content": VALUES}
            ),
            max_size=3,
        )
        | VALUES,
        **dict.fromkeys(
            [
                "max_tokens",
                "temperature",
                "top_p",
                "n",
                "stop",
                "stream",
                "stream_options",
                "logprobs",
                "top_logprobs",
                "echo",
                "seed",
                "user",
                "logit_bias",
                "regex",
                "choices",
                "response_format",
                "tools",
                "model",
                "min_tokens",
                "cache_salt",
                "best_of",
            ],
            VALUES,
        ),
    },
)
ROUTES = {
    "/generate": NATIVE,
    "/score": NATIVE.flatmap(lambda body: VALUES.map(lambda options: {**body, "options": options})),
    "/abort_request": st.fixed_dictionaries({}, optional={"rid": VALUES, "abort_all": VALUES}),
    "/v1/completions": OPENAI,
    "/v1/chat/completions": OPENAI,
}


@pytest.mark.parametrize("path", ROUTES)
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_body_is_answered(call: Callable[..., httpx.Response], path: str, data: st.DataObject) -> None:
    response = call("POST", path, data.draw(ROUTES[path]))
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error: dict[str, Any] = response.json()["error"]
        assert error["message"]
        assert (
            error.get("field")
            or error.get("param")
            or response.status_code != 400
            or "sequences" in error["message"]
        )
    alive = call("POST", "/generate", {"text": "ok", "sampling_params": {"max_new_tokens": 1}})
    assert alive.json()["text"] == "o"
