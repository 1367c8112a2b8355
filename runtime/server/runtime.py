"""What the HTTP routes need of the runtime behind them."""

from __future__ import annotations

from typing import Any, Protocol

from trellis.runtime.config import ServerConfig
from trellis.runtime.loop import Health
from trellis.runtime.manager.tokenizer_manager import TokenizerManager
from trellis.runtime.models import Tokenizer


class Runtime(Protocol):
    """``InProcessEngine`` and ``Supervisor`` are such."""

    @property
    def manager(self) -> TokenizerManager: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def config(self) -> ServerConfig: ...

    def health(self) -> Health:
        """Never waits."""

    def control(self, command: str, timeout: float = ..., **arguments: Any) -> Any:
        """Waits: for threads only."""
