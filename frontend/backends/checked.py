"""A backend's answer has the type that the contract says, or the error names the backend: anyone may write one."""

from __future__ import annotations

from typing import TypeVar

from trellis.errors import BackendError
from trellis.frontend.backends.shown import shown

T = TypeVar("T")


def checked(answer: object, kind: type[T], backend: object) -> T:
    """``answer``, if it is a ``kind``. BackendError otherwise."""
    if isinstance(answer, kind):
        return answer
    raise BackendError(f"{type(backend).__name__} must answer with a {kind.__name__}, got {shown(answer)}")
