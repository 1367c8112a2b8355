"""Images and videos in a program. No model behind a backend of this package reads them, so running one is an error that
says so; the expressions exist so that a program can be written, traced and shown."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trellis.errors import InvalidRequestError
from trellis.frontend.backends.base import ModelInfo
from trellis.frontend.expressions import Expr


@dataclass(frozen=True)
class Media(Expr):
    """kind: ``image`` | ``video``. source: a path, or the bytes of the file. num_frames: of a video."""

    kind: str
    source: str | bytes
    num_frames: int | None = None

    def refused_by(self, info: ModelInfo) -> InvalidRequestError:
        """What to raise before anything is sent."""
        reason = f"the model {info.model!r} reads text only; describe what the {self.kind} shows in words"
        return InvalidRequestError(self.kind, reason)


def image(source: str | os.PathLike[str] | bytes) -> Media:
    """An image. source: a path, or the bytes of an image file. A program fails where it comes to it, before the
    next request is sent, as long as its model reads text only."""
    return Media("image", _source("image", source))


def video(source: str | os.PathLike[str] | bytes, num_frames: int = 8) -> Media:
    """A video, of which so many frames are shown; as ``image``."""
    if isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1:
        raise InvalidRequestError("video.num_frames", f"must be an integer of at least 1, got {num_frames!r}")
    return Media("video", _source("video", source), num_frames)


def _source(kind: str, source: object) -> str | bytes:
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if not isinstance(source, (str, bytes)) or not source:
        raise InvalidRequestError(f"{kind}.source", f"must be a path or bytes, got {source!r:.60}")
    return source
