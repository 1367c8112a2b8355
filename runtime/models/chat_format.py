"""What a chat template does to each message, derived by rendering conversations and comparing the results.

The language adds text piece by piece, so it needs the template as plain data (``ChatFormat``) instead of as a program
over whole conversations. What a template writes before a message may depend on the role before it and on whether
the conversation began with a system message; one example of each such place is rendered.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trellis.chat_format import ChatFormat, Turn
from trellis.errors import InvalidRequestError
from trellis.runtime.models.chat_template import ChatTemplate, Messages
from trellis.runtime.models.chat_turns import merged, simplified, summed_up

ROLES = ("system", "user", "assistant", "tool")
PAD_LEFT, PAD_RIGHT = " \n", "\n "
THOUGHT, ANSWER = "Th0ughtQ", "Answ3rQ"
THINKING_END = "</think>"
SECONDS = 5.0  # of processor time for all that is tried
MAX_TEXT = 200_000  # characters of a conversation that is tried
TRIED = 40  # random conversations that the derived form is tried on

_PROBLEM = "the model's chat template cannot be used"

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a message stands. system_first: the conversation began with a system message. before: the role before.
    depth: its number, from 1; 3 stands for all that come later."""

    system_first: bool = False
    before: str = ""
    role: str = ""
    depth: int = 0

    def next(self, role: str) -> Place:
        first = role == "system" if self.depth == 0 else self.system_first
        return Place(first, self.role, role, min(self.depth + 1, 3))

    @property
    def ending(self) -> tuple[bool, str, int]:
        """Messages that share this end in the same way."""
        return self.system_first, self.role, min(self.depth, 2)


@dataclass
class _Node:
    """A message at the end of ``history``. pieces[i]: text before message i. follow: roles that were rendered after the
    history to learn them (a template may write the last message in another way). joints: role → text between this
    message and one of that role. moves: roles after which the template writes the messages before anew. tail, prompt: text after it at the end, without and with the generation prompt."""

    place: Place
    history: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()
    joints: dict[str, str] = field(default_factory=dict)
    refuses: dict[str, str] = field(default_factory=dict)
    moves: set[str] = field(default_factory=set)
    tail: str | None = None
    prompt: str | None = None
    strips: str = ""


class _Unusable(Exception):
    """Nothing can be made of the template."""


class _Tried:
    """A template with a bound on what all its renderings may cost together."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._deadline = time.thread_time() + SECONDS

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        if time.thread_time() > self._deadline:
            raise _Unusable(f"it takes more than {SECONDS:g} s for a few short conversations")
        text = self._template.render(messages, add_generation_prompt)
        if len(text) > MAX_TEXT:
            raise _Unusable(f"it writes {len(text)} characters around a few short messages")
        return text


class _Moved(Exception):
    """A message is not where it was said, or not there at all."""


def derive_chat_format(template: ChatTemplate, bos_token: str) -> ChatFormat:
    """The template as a ChatFormat. Never raises: one that fits no form gives a ``problem``, and one that it fits for
    some conversations only is not ``exact``."""
    try:
        return _derived(_Tried(template), bos_token)
    except RecursionError:  # a template may call itself
        reason = "it calls itself for ever"
    except _Unusable as error:
        reason = str(error)
    return ChatFormat({}, exact=False, problem=f"{_PROBLEM}: {reason}")


def _derived(template: _Tried, bos_token: str) -> ChatFormat:
    explorer = _Explorer(template)
    nodes = explorer.explore()
    if len(nodes) < 2:
        raise _Unusable("; ".join(sorted(set(explorer.start.refuses.values()))))
    form = _form(nodes, bos_token)
    end, after = _thinking(template)
    form = simplified(replace(form, thinking_end=end, after_thinking=after))
    exact = explorer.consistent and _agrees(form, template)
    if not exact:
        logger.warning("the model's chat template writes some conversations differently from their parts")
    return replace(form, exact=exact)


class _Explorer:
    """Finds every place that a message can have, breadth first."""

    def __init__(self, template: _Tried) -> None:
        self._template = template
        self.start = _Node(Place())
        self.consistent = True

    def explore(self) -> list[_Node]:
        """The places in the order in which they are found; the first is the beginning."""
        nodes = {self.start.place: self.start}
        queue = deque([self.start])
        while queue:
            node = queue.popleft()
            for role in ROLES:
                found = self._step(node, role)
                if found is None:
                    continue
                known = nodes.setdefault(found.place, found)
                if known is found:
                    queue.append(found)
        found_all = list(nodes.values())
        for node in found_all[1:]:
            self._look_at_end(node)
            self._look_at_blanks(node)
        for node in found_all[1:]:
            last = self._last_answer(node)
            if last is not None:
                nodes.setdefault(last.place, last)
        return list(nodes.values())

    def _last_answer(self, node: _Node) -> _Node | None:
        """An answer that the template asks for, though it writes the conversation anew once the answer is there (it
        moves the system message, say): nothing can then follow."""
        if "assistant" not in node.moves or node.prompt is None:
            return None
        node.joints["assistant"] = node.prompt
        reason = node.refuses.pop("assistant")
        return _Node(
            node.place.next("assistant"), (*node.history, "assistant"), refuses=dict.fromkeys(ROLES, reason)
        )

    def _step(self, node: _Node, role: str) -> _Node | None:
        """The message of a role after a node, if the template takes it."""
        history = (*node.history, role)
        try:
            pieces, follow = self._learn(history)
        except (InvalidRequestError, _Moved) as error:
            node.refuses[role] = error.reason if isinstance(error, InvalidRequestError) else str(error)
            if isinstance(error, _Moved):
                node.moves.add(role)
            return None
        if pieces[:-1] != node.pieces:
            node.refuses[role] = "the template then writes earlier messages in another way"
            node.moves.add(role)
            return None
        node.joints[role] = pieces[-1]
        return _Node(node.place.next(role), history, pieces, follow)

    def _learn(self, history: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Text before each message of a history, and what had to follow for the template to show it."""
        problem: InvalidRequestError | _Moved | None = None
        for follow in (("user",), ("assistant",), ("tool",), ()):
            try:
                return self._split((*history, *follow), False)[: len(history)], follow
            except (InvalidRequestError, _Moved) as error:
                problem = error
        assert problem is not None
        raise problem

    def _split(self, history: Sequence[str], prompt: bool, padded: int = -1) -> tuple[str, ...]:
        """Text before each message, and after the last. padded: a message whose content has blanks around it."""
        marks = [f"M0rk{i}Q" for i in range(len(history))]
        pads = [(PAD_LEFT, PAD_RIGHT) if i == padded else ("", "") for i in range(len(history))]
        messages = [
            {"role": role, "content": left + mark + right}
            for role, mark, (left, right) in zip(history, marks, pads, strict=True)
        ]
        text, pieces = self._template.render(messages, prompt), []
        for role, mark in zip(history, marks, strict=True):
            piece, found, text = text.partition(mark)
            if not found or mark in text:
                raise _Moved(
                    f"the template leaves out, moves or repeats a {role!r} message of such a conversation"
                )
            pieces.append(piece)
        return (*pieces, text)

    def _look_at_end(self, node: _Node) -> None:
        for prompt in (False, True):
            try:
                *_, tail = self._split(node.history, prompt)
            except (InvalidRequestError, _Moved):
                continue
            if not prompt:
                node.tail = tail
            elif "assistant" in node.joints or "assistant" in node.moves:
                node.prompt = tail

    def _look_at_blanks(self, node: _Node) -> None:
        at, history = len(node.history) - 1, (*node.history, *node.follow)
        try:
            plain, padded = self._split(history, False), self._split(history, False, at)
        except (InvalidRequestError, _Moved):
            self.consistent = False
            return
        left, right = plain[at] == padded[at], plain[at + 1] == padded[at + 1]
        node.strips = {(True, True): "both", (True, False): "left", (False, True): "right"}.get(
            (left, right), ""
        )
        whole = (
            left or padded[at] == plain[at] + PAD_LEFT,
            right or padded[at + 1] == PAD_RIGHT + plain[at + 1],
        )
        self.consistent = self.consistent and all(whole)


def _form(nodes: Sequence[_Node], bos_token: str) -> ChatFormat:
    """The places as turns. What every way on from a message has in common ends it."""
    index = {node.place: i for i, node in enumerate(nodes)}
    closings = {ending: _closing(nodes, ending) for ending in {node.place.ending for node in nodes[1:]}}
    openings: dict[int, str] = {}
    generations: dict[int, str] = {}
    for node in nodes:
        closing = closings.get(node.place.ending, "")
        for role, joint in node.joints.items():
            at = index[node.place.next(role)]
            asked = node.prompt if role == "assistant" and node.prompt is not None else joint
            openings.setdefault(at, joint.removeprefix(closing))
            generations.setdefault(at, asked.removeprefix(closing))
    turns = [
        Turn(
            role=node.place.role,
            opening=openings.get(i, ""),
            generation=generations.get(i, ""),
            closing=closings.get(node.place.ending, ""),
            strips=node.strips,
            then={role: index[node.place.next(role)] for role in node.joints},
            refuses=node.refuses,
        )
        for i, node in enumerate(nodes)
    ]
    return summed_up(merged(turns), bos_token)


def _closing(nodes: Sequence[_Node], ending: tuple[bool, str, int]) -> str:
    texts: list[str] = []
    for node in nodes:
        if node.place.ending == ending:
            texts += [*node.joints.values(), *(t for t in (node.tail, node.prompt) if t is not None)]
    common = _common_prefix(texts) if texts else ""
    if all(text == common for text in texts):
        return common
    return re.sub(
        r"[<\[][^<>\[\]\s]*$", "", common
    )  # not half a marker: "<|" of "<|user|>" and "<|assistant|>"


def _common_prefix(texts: Sequence[str]) -> str:
    shortest, longest = min(texts), max(texts)  # in order, the extremes differ first
    length = min(len(shortest), len(longest))
    return shortest[: next((i for i in range(length) if shortest[i] != longest[i]), length)]


def _thinking(template: _Tried) -> tuple[str, str]:
    """(the marker up to which an assistant's text is left out of the history, what is stripped after it)."""
    content = f"<think>\n{THOUGHT}\n{THINKING_END}\n\n {ANSWER}"
    roles = ("user", "assistant", "user")
    try:
        plain, thought = (
            template.render(
                [{"role": r, "content": c} for r, c in zip(roles, ("a", text, "b"), strict=True)], True
            )
            for text in (ANSWER, content)
        )
    except InvalidRequestError:
        return "", ""
    if THOUGHT in thought or plain.count(ANSWER) != 1 or thought.count(ANSWER) != 1:
        return "", ""
    before, left = plain.partition(ANSWER)[0], thought.partition(ANSWER)[0]
    kept = left.removeprefix(before)
    return THINKING_END, {"": " \n\t\r", " ": "\n"}.get(kept, "")


def _conversations(form: ChatFormat) -> Iterator[list[dict[str, str]]]:
    """Random ways through the turns, up to messages that the assistant may answer."""
    texts = ("Be brief.", "And\nnow?", "  blanks around \n", "ünïcode 你好", "<b>&\"'{{ x }}", "x")
    draw = random.Random(0)
    for _ in range(TRIED):
        index, messages = 0, []
        for _ in range(draw.randint(1, 8)):
            then = form.graph[index].then
            if not then:
                break
            role = draw.choice(sorted(then))
            index = then[role]
            messages.append({"role": role, "content": draw.choice(texts)})
        if "assistant" in form.graph[index].then and messages[-1:] and messages[-1]["role"] != "assistant":
            yield messages


def _agrees(form: ChatFormat, template: _Tried) -> bool:
    try:
        return all(form.render(each) == template.render(each, True) for each in _conversations(form))
    except InvalidRequestError:
        return False
