"""Every provider that LiteLLM knows, through its ``acompletion``."""

from __future__ import annotations

from typing import Any

from trellis.frontend.backends.base import ChatFormat, GenerateRequest, ModelInfo
from trellis.frontend.backends.openai_answers import Piece, chat_piece
from trellis.frontend.backends.openai_dialects import Dialect
from trellis.frontend.backends.openai_requests import Call, chat_call
from trellis.frontend.backends.openai_shaped import OpenAIShaped
from trellis.frontend.backends.structured import unsupported

CHAT_FORMAT = ChatFormat({role: (f"{role.upper()}: ", "\n") for role in ("system", "user", "assistant")})


class LiteLLM(OpenAIShaped):
    """``LiteLLM("bedrock/anthropic.claude-3-haiku")``; model: the provider and the model, as LiteLLM names them.

    api_key, base_url: None is what LiteLLM finds in the environment. timeout: seconds a request; None: LiteLLM's own.
    options: further arguments of every ``litellm.acompletion`` call (api_version, custom_llm_provider, ...).

    A chat API: text inside roles only, a gen only in an assistant message. ``schema`` and ``choices`` raise for models
    that LiteLLM does not know to have structured outputs, and parameters that a provider does not have raise as well
    (``drop_params`` is off).
    """

    speaks_messages = True

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | None = 600.0,
        max_retries: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(f"LiteLLM ({model})", model, "litellm", timeout, Dialect("litellm"))
        given = {"base_url": base_url, "api_key": api_key, "timeout": timeout}
        self._options = {
            **{name: value for name, value in given.items() if value is not None},
            "num_retries": max_retries,
            "drop_params": False,
            **options,
        }

    def _make_client(self) -> Any:
        return self._module  # it has clients of its own

    async def _close_client(self, client: Any) -> None:
        """LiteLLM's clients are shared with others in the process."""

    async def model_info(self) -> ModelInfo:
        return ModelInfo(self.model, CHAT_FORMAT)

    def _call(self, request: GenerateRequest) -> Call:
        call = chat_call(request, self._dialect, self.api)
        if call.output is not None and not self._module.supports_response_schema(model=self.model):
            assert request.constraint is not None
            raise unsupported(
                request.constraint, f"{self.api} has no structured outputs, as far as it is known"
            )
        return call

    def _piece(self, choice: Any) -> Piece:
        return chat_piece(choice, self.api)

    async def _create(self, call: Call, **more: Any) -> Any:
        client = self._client()
        with self._errors():
            return await client.acompletion(model=self.model, **call.arguments, **self._options, **more)
