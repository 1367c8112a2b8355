"""The turns of a chat format, made as few and as plain as they can be."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from trellis.chat_format import ChatFormat, Turn


def merged(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The same conversations in the fewest turns: those that say the same, now and ever after, become one.

    Moore's algorithm for the smallest automaton: classes are split until all members of one lead to the same classes.
    turns[0] is the beginning, and stays the first.
    """

    def said(turn: Turn) -> Hashable:
        refused = tuple(sorted(turn.refuses.items()))
        return (
            turn.role,
            turn.opening,
            turn.generation,
            turn.closing,
            turn.strips,
            refused,
            *sorted(turn.then),
        )

    keys: list[Hashable] = [said(turn) for turn in turns]
    while True:
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        classes = [number[key] for key in keys]
        keys = [
            (classes[i], *(classes[turn.then[role]] for role in sorted(turn.then)))
            for i, turn in enumerate(turns)
        ]
        if len(set(keys)) == len(number):
            break
    kept = {cls: i for i, cls in reversed(list(enumerate(classes)))}  # the first of each class
    return tuple(
        replace(turns[kept[cls]], then={role: classes[at] for role, at in turns[kept[cls]].then.items()})
        for cls in range(len(number))
    )


def summed_up(turns: tuple[Turn, ...], bos_token: str) -> ChatFormat:
    """The turns as a format, with the nearest simple form: how each role begins once the conversation is under way."""
    roles: dict[str, tuple[str, str]] = {}
    for before in ("assistant", "user", "tool", "system", ""):
        for turn in turns:
            if turn.role == before:
                for role, at in turn.then.items():
                    roles.setdefault(role, (turns[at].opening, turns[at].closing))
    heads = {role: turns[at].opening for role, at in turns[0].then.items()}
    if "system" in heads:
        roles["system"] = (heads["system"], turns[turns[0].then["system"]].closing)
    user_prefix = roles["user"][0] if "user" in roles else ""
    head = next((text for role, text in heads.items() if role != "system"), "").removesuffix(user_prefix)
    # A BOS that every turn begins with belongs to the turns, not to the beginning.
    own_bos = bos_token and head.startswith(bos_token) and not user_prefix.startswith(bos_token)
    begin = bos_token if own_bos else ""
    if head and heads.get("system", "").startswith(head):  # no default text: it is all the beginning
        begin = head
    if not heads.get("system", begin).startswith(begin):
        begin = ""
    trimmed = {role: (prefix.removeprefix(begin), suffix) for role, (prefix, suffix) in roles.items()}
    return ChatFormat(trimmed, head.removeprefix(begin), begin, turns)


def simplified(form: ChatFormat) -> ChatFormat:
    """Without the turns, if prefixes and suffixes of roles say the same."""
    simple = replace(form, turns=())

    def same(at: int, other: int, seen: set[tuple[int, int]]) -> bool:
        if (at, other) in seen:
            return True
        seen.add((at, other))
        one, two = form.graph[at], simple.graph[other]
        if one.then.keys() != two.then.keys() or replace(one, then={}, refuses={}) != replace(two, then={}):
            return False
        return all(same(one.then[role], two.then[role], seen) for role in one.then)

    return simple if same(0, 0, set()) else form
