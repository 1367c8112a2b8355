"""A diagram as DOT text, for Graphviz."""

from __future__ import annotations

from trellis.fsm.drawing import Diagram


def dot(diagram: Diagram, title: str) -> str:
    """title: a line that the picture carries, for example the pattern."""
    lines = [
        "digraph {",
        "  rankdir=LR;",
        f"  label={_text(title)}; labelloc=t;",
        '  node [shape=circle fontname="sans-serif" fontsize=11];',
        '  edge [fontname="monospace" fontsize=10];',
        '  start [shape=point width=0.08 label=""];',
        "  start -> 0;",
    ]
    for state in diagram.states:
        shape = "doublecircle" if state.accepting else "circle"
        more = ' style=dashed tooltip="has edges that are not drawn"' if state.more else ""
        lines.append(f'  {state.number} [shape={shape} label="{state.number}"{more}];')
    lines += [f"  {edge.source} -> {edge.target} [label={_text(edge.label)}];" for edge in diagram.edges]
    return "\n".join([*lines, "}", ""])


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
