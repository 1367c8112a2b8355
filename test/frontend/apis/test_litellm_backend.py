"""The LiteLLM backend over a module that has LiteLLM's functions and answers what the test wants."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from trellis import (
    BackendError,
    ConstraintError,
    InvalidRequestError,
    LiteLLM,
    ProgramError,
    assistant,
    function,
    gen,
    select,
    user,
)


class FakeLiteLLM:
    """answers: of ``acompletion``, in order; exceptions are raised. calls: its arguments."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.calls: list[dict[str, Any]] = []
        self.structured = True

    def supports_response_schema(self, model: str) -> bool:
        assert model == "some/model"
        return self.structured

    async def acompletion(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def piece(text: str | None, finish: str | None = None, usage: Any = None) -> Any:
    part = SimpleNamespace(content=text, refusal=None)
    choice = SimpleNamespace(index=0, delta=part, message=part, finish_reason=finish, logprobs=None)
    return SimpleNamespace(choices=[choice], usage=usage)


USAGE = SimpleNamespace(prompt_tokens=4, completion_tokens=2, prompt_tokens_details=None)


async def stream(*pieces: Any) -> AsyncIterator[Any]:
    for each in pieces:
        yield each


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> FakeLiteLLM:
    fake = FakeLiteLLM()
    monkeypatch.setitem(sys.modules, "litellm", fake)  # type: ignore[arg-type]
    return fake


@function
def ask(s: Any, **options: Any) -> None:
    s += user("Hi") + assistant(gen("x", **options))


def test_the_call_and_the_answer(litellm: FakeLiteLLM) -> None:
    litellm.answers = [piece("Hello", "stop", USAGE)]
    backend = LiteLLM("some/model", api_key="k", api_version="2", timeout=9.0, max_retries=1)
    state = ask.run(backend=backend, max_tokens=5, temperature=0)
    assert state["x"] == "Hello"
    assert litellm.calls == [
        {
            "model": "some/model",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 5,
            "temperature": 0.0,
            "api_key": "k",
            "api_version": "2",
            "timeout": 9.0,
            "num_retries": 1,
            "drop_params": False,
        }
    ]
    assert backend.stats().prompt_tokens == 4


def test_a_stream(litellm: FakeLiteLLM) -> None:
    litellm.answers = [stream(piece("Hel"), piece("lo"), piece(None, "length", USAGE))]
    state = ask.run(backend=LiteLLM("some/model"), stream=True)
    assert list(state.text_iter("x")) == ["Hel", "lo"]
    assert (state.meta("x").finish_reason, state.meta("x").counts.completion_tokens) == ("length", 2)


def test_structured_outputs_only_where_the_model_has_them(litellm: FakeLiteLLM) -> None:
    @function
    def pick(s: Any) -> None:
        s += user("Which?") + assistant(select("c", ["a", "b"]))

    litellm.answers = [piece('{"value": "b"}', "stop")]
    assert pick.run(backend=LiteLLM("some/model"))["c"] == "b"
    assert litellm.calls[0]["response_format"]["type"] == "json_schema"
    litellm.structured = False
    for program in (pick, ask.bind(schema=int)):
        with pytest.raises(ProgramError) as caught:
            program.run(backend=LiteLLM("some/model"))
        assert isinstance(caught.value.__cause__, ConstraintError)
    assert len(litellm.calls) == 1


@pytest.mark.parametrize("options", [{"top_k": 3}, {"min_tokens": 1}])
def test_parameters_that_it_has_not_raise(litellm: FakeLiteLLM, options: dict[str, Any]) -> None:
    with pytest.raises(ProgramError) as caught:
        ask.bind(**options).run(backend=LiteLLM("some/model"))
    assert isinstance(caught.value.__cause__, InvalidRequestError)
    assert litellm.calls == []


def test_its_errors_are_those_of_openai(litellm: FakeLiteLLM) -> None:
    request: Any = SimpleNamespace(method="POST", url="u")
    litellm.answers = [openai.APITimeoutError(request)]
    with pytest.raises(ProgramError) as caught:
        ask.run(backend=LiteLLM("some/model", timeout=3.0))
    assert isinstance(caught.value.__cause__, BackendError)
    assert "timeout of 3 s" in str(caught.value.__cause__)
