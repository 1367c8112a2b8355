"""When everything of a run happened, as a page that needs nothing but itself: a lane for each branch, time to the right."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from trellis.frontend.spans import Span, total

if TYPE_CHECKING:
    from trellis.frontend.async_state import AsyncProgramState
    from trellis.frontend.state import ProgramState

_LEFT, _RIGHT, _WIDTH = 150, 20, 1100  # pixels: labels, margin, all of it
_ROW, _BAR, _AXIS = 22, 14, 24
_STYLE = """
.tl{font:13px/1.4 system-ui,sans-serif;color:#222;background:#fff;padding:12px}
.tl svg{max-width:100%;height:auto;display:block}.tl text{font:11px system-ui,sans-serif;fill:#444}
.tl .head{font-weight:600;fill:#111}.tl .bad{fill:#b00020}.tl .grid{stroke:#ddd}
.tl .queued{fill:#d5d8dd}.tl .waits{fill:#f2c879}.tl .gen{fill:#3b7dd8}.tl .select{fill:#8a5cc2}.tl .failed{fill:#d0314c}
.tl .open{opacity:.55}.tl .name{fill:#fff;pointer-events:none}.tl .dark{fill:#222}
.tl .key span{display:inline-block;width:12px;height:12px;margin:0 4px 0 14px;vertical-align:-2px}
"""
_KEY = (
    ("#d5d8dd", "queued"),
    ("#f2c879", "sent, no text yet (streams)"),
    ("#3b7dd8", "gen"),
    ("#8a5cc2", "select"),
    ("#d0314c", "failed"),
)


@dataclass(frozen=True)
class TimelineRun:
    """One program run. spans: of all its branches, copied. error: why it failed."""

    program: str
    spans: tuple[Span, ...]
    error: str | None = None

    def lanes(self) -> dict[tuple[int, ...], list[Span]]:
        """Branch → its spans in order; a branch stands below what it was forked from."""
        found: dict[tuple[int, ...], list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: span.lane):
            found.setdefault(span.lane, []).append(span)
        return found


@dataclass(frozen=True, repr=False)
class Timeline:
    """runs in the order in which they were given. now: when this was looked at, on the clock of the spans."""

    runs: tuple[TimelineRun, ...]
    now: float

    def __repr__(self) -> str:
        return f"<Timeline: {self._summary()}>"

    @property
    def spans(self) -> list[Span]:
        return [span for run in self.runs for span in run.spans]

    @property
    def start(self) -> float:
        """When the first gen was appended."""
        return min((span.queued for span in self.spans), default=self.now)

    @property
    def seconds(self) -> float:
        """From there to the end of the last gen, or to now if one is under way."""
        ends = [self.now if span.done is None else span.done for span in self.spans]
        return max(ends, default=self.now) - self.start

    def html(self) -> str:
        """A whole page: no scripts, nothing loaded from elsewhere, every text escaped."""
        names = sorted({run.program for run in self.runs})
        title = escape(f"Timeline of {', '.join(names) or 'nothing'}")
        head = f'<meta charset="utf-8"><title>{title}</title>'
        return f"<!DOCTYPE html>\n<html><head>{head}</head><body>{self._repr_html_()}</body></html>\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file."""
        # A model may write half of a character of UTF-16, which has no place in UTF-8.
        with open(path, "w", encoding="utf-8", errors="xmlcharrefreplace") as file:
            file.write(self.html())

    def _repr_html_(self) -> str:
        key = "".join(f'<span style="background:{color}"></span>{escape(text)}' for color, text in _KEY)
        picture = _Picture(self).svg()
        return (
            f'<div class="tl"><style>{_STYLE}</style><p>{escape(self._summary())}</p>'
            f'{picture}<p class="key">{key}</p></div>'
        )

    def _summary(self) -> str:
        spans = [span for span in self.spans if span.done is not None and span.sent is not None]
        work = sum((span.done or 0.0) - (span.sent or 0.0) for span in spans)
        counts = total(span.counts for span in spans)
        requests = "gen or select" if len(self.spans) == 1 else "gens and selects"
        runs = "run" if len(self.runs) == 1 else "runs"
        at_once = work / self.seconds if self.seconds > 0 else 0.0
        return (
            f"{len(self.spans)} {requests} of {len(self.runs)} {runs} in {self.seconds:.3f} s, {at_once:.1f} at a "
            f"time; {counts.prompt_tokens} prompt tokens ({counts.cached_tokens} cached), {counts.sampled_tokens} "
            f"sampled, {counts.forced_tokens} forced; {sum(span.failed for span in self.spans)} failed"
        )


class _Picture:
    """The drawing, from top to bottom."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._start = timeline.start
        self._scale = (_WIDTH - _LEFT - _RIGHT) / max(timeline.seconds, 1e-9)

    def svg(self) -> str:
        parts, y = [], _AXIS
        for number, run in enumerate(self._timeline.runs):
            parts.append(self._text(4, y + 15, _heading(number, run), "head bad" if run.error else "head"))
            y += _ROW
            for lane, spans in run.lanes().items():
                label = "branch " + ".".join(map(str, lane)) if lane else "program"
                parts.append(self._text(16, y + 12, label))
                # A gen is often appended while the one before it runs: the bars stand in front of the waiting.
                parts += [self._waiting(span, y) for span in spans]
                parts += [self._bar(span, y) for span in spans]
                y += _ROW
        axis = "".join(self._axis(y))
        size = f'viewBox="0 0 {_WIDTH} {y + 6}" width="{_WIDTH}" height="{y + 6}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{axis}{"".join(parts)}</svg>'

    def _x(self, at: float) -> float:
        return _LEFT + (at - self._start) * self._scale

    def _axis(self, bottom: float) -> Iterator[str]:
        step = _nice(self._timeline.seconds / 8)
        for i in range(int(self._timeline.seconds / step + 1e-6) + 1):
            x = _LEFT + i * step * self._scale
            yield f'<line class="grid" x1="{x:.1f}" y1="{_AXIS - 4}" x2="{x:.1f}" y2="{bottom}"/>'
            yield self._text(x + 2, 12, f"{i * step:g} s" if step >= 0.1 else f"{i * step * 1e3:g} ms")

    def _bar(self, span: Span, y: int) -> str:
        end = self._end(span)
        sent = end if span.sent is None else span.sent
        first = sent if span.first is None else span.first
        kind = ("failed" if span.failed else span.kind) + (" open" if span.done is None else "")
        bars = self._rect("waits", sent, first, y + 2, _BAR) + self._rect(kind, first, end, y + 2, _BAR)
        name = span.name or span.kind
        if (end - sent) * self._scale > 7 * len(name) + 6:
            bars += self._text(self._x(sent) + 4, y + 13, name, "name" if first == sent else "name dark")
        return f"<g><title>{escape(_told(span, self._start))}</title>{bars}</g>"

    def _waiting(self, span: Span, y: int) -> str:
        return self._rect(
            "queued", span.queued, self._end(span) if span.sent is None else span.sent, y + 8, 4
        )

    def _end(self, span: Span) -> float:
        return self._timeline.now if span.done is None else span.done

    def _rect(self, kind: str, start: float, end: float, y: float, height: int) -> str:
        width = (end - start) * self._scale
        if kind in ("queued", "waits") and width <= 0:
            return ""
        return f'<rect class="{kind}" x="{self._x(start):.2f}" y="{y}" width="{max(width, 1):.2f}" height="{height}"/>'

    @staticmethod
    def _text(x: float, y: float, text: str, kind: str = "") -> str:
        style = f' class="{kind}"' if kind else ""
        return f'<text{style} x="{x:.1f}" y="{y}">{escape(text)}</text>'


def _heading(number: int, run: TimelineRun) -> str:
    return f"{number}: {run.program}" + (f" – {run.error}" if run.error else "")


def _told(span: Span, start: float) -> str:
    """All about a span, for its tooltip."""
    lines = [f"{span.kind} {span.name or '(unnamed)'}"]
    for what, at in (("queued", span.queued), ("sent", span.sent), ("first text", span.first)):
        if at is not None:
            lines.append(f"{what} at {at - start:.4f} s")
    if span.done is None:
        lines.append("not done")
    else:
        lines.append(f"{'failed' if span.failed else 'done'} at {span.done - start:.4f} s")
    if span.finish_reason is not None:
        counts = span.counts
        lines.append(f"{counts.prompt_tokens} prompt tokens, {counts.cached_tokens} of them cached")
        lines.append(f"{counts.sampled_tokens} sampled, {counts.forced_tokens} forced ({span.finish_reason})")
        lines.append(span.text)
    return "\n".join(lines)


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least this much."""
    power = 10.0 ** math.floor(math.log10(max(step, 1e-6)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step or factor == 10)


def timeline(states: ProgramState | AsyncProgramState | Iterable[Any]) -> Timeline:
    """When each gen and select of these states was appended, sent, answered and done. Does not wait: what is under way
    is drawn up to now. Branches are shown with the program that they belong to."""
    given: Sequence[Any] = [states] if hasattr(states, "partial_text") else list(states)
    runs: dict[int, Any] = {}
    for each in given:
        state = getattr(each, "_state", each)
        runs.setdefault(id(state._run), state)
    return Timeline(tuple(_run_of(state) for state in runs.values()), time.perf_counter())


def _run_of(state: ProgramState) -> TimelineRun:
    failure = state._executor.failure
    spans = tuple(replace(span) for span in list(state._run.spans))
    return TimelineRun(state._run.program, spans, None if failure is None else str(failure.error()))
