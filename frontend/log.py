"""What the language tells ``logging``: a line for each request and each failure, under ``trellis.frontend``.

Nothing is shown unless the program asks for it: ``logging.getLogger("trellis").setLevel(logging.DEBUG)`` and a handler.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trellis.frontend.spans import Span

if TYPE_CHECKING:
    from trellis.frontend.failure import Failure

logger = logging.getLogger("trellis.frontend")
# Quiet unless the program sets up logging: without this, Python itself shows warnings that nobody handles.
logging.getLogger("trellis").addHandler(logging.NullHandler())


def log_sent(program: str, span: Span, prompt: int) -> None:
    """prompt: pieces of text that it is made of."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: %s sent, prompt of %d pieces", program, _name(span), prompt)


def log_done(program: str, span: Span) -> None:
    if span.sent is not None and span.done is not None and logger.isEnabledFor(logging.DEBUG):
        counts = span.counts
        logger.debug(
            "%s: %s done (%s) in %.3f s: prompt %d, cached %d, sampled %d, forced %d",
            program,
            _name(span),
            span.finish_reason,
            span.done - span.sent,
            counts.prompt_tokens,
            counts.cached_tokens,
            counts.sampled_tokens,
            counts.forced_tokens,
        )


def log_failed(failure: Failure) -> None:
    where = f" in {failure.variable!r}" if failure.variable else ""
    logger.debug("%s failed%s: %s: %s", failure.program, where, type(failure.cause).__name__, failure.cause)


def _name(span: Span) -> str:
    lane = f" of branch {'.'.join(map(str, span.lane))}" if span.lane else ""
    return f"{span.kind} {span.name or '(unnamed)'}{lane}"
