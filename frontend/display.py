"""How a state looks in a notebook: roles in colours, what the model wrote marked, its figures in tooltips."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from trellis.frontend.spans import metas_of, total
from trellis.frontend.transcript import Piece, Transcript
from trellis.frontend.variable import Meta, SelectMeta, Variable

if TYPE_CHECKING:
    from trellis.frontend.state import ProgramState

_STYLE = """
.ts{font:13px/1.5 ui-monospace,monospace;color:#222;background:#fff;padding:8px}
.ts .said{white-space:pre-wrap;overflow-wrap:anywhere;border-left:4px solid #bbb;margin:3px 0;padding:2px 8px}
.ts .system{border-color:#8a8f98;background:#f4f5f7}.ts .user{border-color:#2f9e6e;background:#f0faf5}
.ts .assistant{border-color:#3b7dd8;background:#f2f6fd}.ts .other{border-color:#c98a1b;background:#fdf7ec}
.ts .who{display:block;font:600 11px system-ui,sans-serif;color:#666}.ts .mark{color:#aaa}
.ts .sampled{background:#cfe2ff}.ts .forced{background:#e6dcf7}.ts .selected{background:#d3f3dc}
.ts .partial{background:#fff0c2}.ts .bad{color:#b00020}.ts .foot{font:12px system-ui,sans-serif;color:#555}
"""
_KNOWN = ("system", "user", "assistant")


def state_html(state: ProgramState) -> str:
    """The state as it is now; neither waits nor raises. Every text is escaped."""
    executor = state._executor
    transcript = executor.transcript.copy()
    said = "".join(_blocks(transcript, executor.feed.text))
    counts = total(each.counts for record in list(executor.records) for each in metas_of(record.meta))
    foot = (
        f"{state!r}: {counts.prompt_tokens} prompt tokens ({counts.cached_tokens} cached), "
        f"{counts.sampled_tokens} sampled, {counts.forced_tokens} forced"
    )
    failure = executor.failure
    problem = f'<div class="foot bad">{escape(str(failure.error()))}</div>' if failure else ""
    return (
        f'<div class="ts"><style>{_STYLE}</style>{said}<div class="foot">{escape(foot)}</div>{problem}</div>'
    )


def _blocks(transcript: Transcript, shown: str) -> Iterator[str]:
    """A block for each message, and one for what stands between messages. shown: all text, with that of a gen which is
    under way."""
    ranges = [(m.role, m.start, m.end) for m in transcript.messages]
    if transcript.open_role is not None:
        role, start = transcript.open_role
        ranges.append((role, start, len(transcript.pieces)))
    rest = shown.removeprefix(transcript.text())
    partial = f'<span class="partial">{escape(rest)}</span>' if rest else ""
    at = 0
    for role, start, end in ranges:
        yield _between(transcript.pieces[at:start])
        inside = "".join(map(_piece, transcript.pieces[start:end]))
        is_open = transcript.open_role is not None and end == len(transcript.pieces)
        kind = role if role in _KNOWN else "other"
        yield f'<div class="said {kind}"><span class="who">{escape(role)}</span>{inside}{partial if is_open else ""}</div>'
        at = end
    last = "".join(map(_piece, transcript.pieces[at:])) + (partial if transcript.open_role is None else "")
    if last:
        yield f'<div class="said">{last}</div>' if not ranges or partial else _between(transcript.pieces[at:])


def _between(pieces: list[Piece]) -> str:
    """Text outside of messages: what the template writes there is only hinted at."""
    if any(piece.written or piece.source for piece in pieces):
        return f'<div class="said">{"".join(map(_piece, pieces))}</div>'
    text = "".join(piece.text for piece in pieces)
    return f'<span class="mark">{escape(text)}</span>' if text.strip() else ""


def _piece(piece: Piece) -> str:
    variable = piece.source
    if variable is None:
        return escape(piece.text) if piece.written else f'<span class="mark">{escape(piece.text)}</span>'
    meta = next(metas_of(variable.meta), None)
    parts = meta.pieces if meta is not None and _spells(meta, piece.text) else ((piece.text, "sampled"),)
    inside = "".join(f'<span class="{origin}">{escape(text)}</span>' for text, origin in parts)
    return f'<span title="{escape(_told(variable, meta))}">{inside}</span>'


def _spells(meta: Meta, text: str) -> bool:
    return "".join(part for part, _ in meta.pieces) == text


def _told(variable: Variable, meta: Meta | None) -> str:
    """What the tooltip of a variable's text says."""
    lines = [f"{variable.kind} {variable.name or '(unnamed)'}"]
    if meta is not None:
        counts = meta.counts
        lines.append(f"{counts.prompt_tokens} prompt tokens, {counts.cached_tokens} of them cached")
        lines.append(f"{counts.sampled_tokens} sampled, {counts.forced_tokens} forced; {meta.seconds:.3f} s")
        lines.append(f"finish: {meta.finish_reason}")
    if isinstance(meta, SelectMeta):
        chances = zip(meta.choices, meta.probabilities, strict=False)
        lines += [f"{option!r}: {chance:.3f}" for option, chance in list(chances)[:10]]
    return "\n".join(lines)
