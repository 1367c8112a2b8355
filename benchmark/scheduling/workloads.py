"""The eleven traces: how programs of different kinds call a model. All are seeded; ``scale`` multiplies the programs.

Lengths are in tokens. They follow the programs of Zheng et al. 2024 (arXiv:2312.07104, section 6) where these say
how long things are (multi-turn chat: 4 turns, 256 to 512 in, 4 to 8 or 256 to 512 out; MMLU 5-shot, one token out;
HellaSwag 20-shot), and what such prompts usually have where they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from benchmark.scheduling.trace import Builder, IntArray, Trace, shuffled

Program = Callable[[], None]
"""Adds the calls of one more program."""

Workload = Callable[[Builder], Program]
"""Draws what the programs of a kind have in common, and returns what adds one."""


def few_shot(b: Builder) -> Program:
    """MMLU: five examples of the subject, a question, one letter out."""
    subjects = [b.text(500, 900) for _ in range(14)]

    def program() -> None:
        subject = subjects[b.rng.integers(len(subjects))]
        b.ask(b.program(), [subject, b.text(60, 160)], b.text(1, 1))

    return program


def few_shot_select(b: Builder) -> Program:
    """HellaSwag: twenty examples, a context, and which of four endings is likeliest."""
    examples = b.text(1800, 1800)

    def program() -> None:
        prompt = [examples, b.text(40, 90)]
        b.select(b.program(), prompt, [b.text(8, 30) for _ in range(4)])

    return program


def react(b: Builder) -> Program:
    """ReAct: a template with examples; thought and action, an observation from a tool, and again."""
    template = b.text(1100, 1100)

    def program() -> None:
        number = b.program()
        history: list[IntArray] = [template, b.text(20, 60)]
        after: tuple[int, ...] = ()
        for _ in range(b.rng.integers(3, 7)):
            output = b.text(30, 80)
            delay = b.exponential(0.3) if after else 0.0
            after = (b.ask(number, history, output, after, delay),)
            history += [output, b.text(60, 200)]

    return program


def generative_agents(b: Builder) -> Program:
    """Agents that live a day: each call has one of five templates, then who the agent is, then what just happened."""
    templates = [b.text(250, 500) for _ in range(5)]

    def program() -> None:
        number = b.program()
        persona = b.text(150, 250)
        after: tuple[int, ...] = ()
        for _ in range(b.rng.integers(6, 11)):
            template = templates[b.rng.integers(len(templates))]
            after = (b.ask(number, [template, persona, b.text(60, 160)], b.text(10, 40), after),)

    return program


def tree_of_thought(b: Builder) -> Program:
    """Three plans for a problem, three solutions of each, a vote on each: every branch goes on from its parent."""
    instruction = b.text(120, 120)
    ask_solve, ask_vote = b.text(30, 30), b.text(40, 40)

    def program() -> None:
        number = b.program()
        question = [instruction, b.text(60, 140)]
        for _ in range(3):
            plan = b.text(40, 100)
            planned = b.ask(number, question, plan)
            for _ in range(3):
                solution = b.text(60, 140)
                begun = [*question, plan, ask_solve]
                solved = b.ask(number, begun, solution, (planned,))
                b.ask(number, [*begun, solution, ask_vote], b.text(4, 8), (solved,))

    return program


def skeleton_of_thought(b: Builder) -> Program:
    """Tips on a topic: a skeleton, every point of it expanded in parallel, and a summary of all."""
    instruction, expand = b.text(150, 150), b.text(25, 25)
    summarise = b.text(20, 20)

    def program() -> None:
        number = b.program()
        skeleton = b.text(60, 100)
        base = [instruction, b.text(20, 60)]
        first = b.ask(number, base, skeleton)
        points = []
        expansions = []
        for _ in range(b.rng.integers(4, 8)):
            output = b.text(60, 140)
            points.append(b.ask(number, [*base, skeleton, expand, b.text(8, 16)], output, (first,)))
            expansions.append(output)
        b.ask(number, [*base, skeleton, *expansions, summarise], b.text(40, 80), tuple(points))

    return program


def judge(b: Builder) -> Program:
    """An essay, judged in six dimensions by a fork; the judgements come together in a grade."""
    instruction = b.text(200, 200)
    dimensions = [b.text(30, 50) for _ in range(6)]
    grade = b.text(30, 30)

    def program() -> None:
        number = b.program()
        essay = [instruction, b.text(500, 1100)]
        judgements = [b.text(40, 100) for _ in dimensions]
        forks = tuple(
            b.ask(number, [*essay, dimension], judgement)
            for dimension, judgement in zip(dimensions, judgements, strict=True)
        )
        b.ask(number, [*essay, *judgements, grade], b.text(10, 30), forks)

    return program


def _chat(b: Builder, low: int, high: int) -> Program:
    system = b.text(80, 80)

    def program() -> None:
        number = b.program()
        history = [system]
        after: tuple[int, ...] = ()
        for _ in range(4):
            history.append(b.text(256, 512))
            output = b.text(low, high)
            after = (b.ask(number, history, output, after),)
            history.append(output)

    return program


def chat_short(b: Builder) -> Program:
    """Four turns of 256 to 512 tokens, with short answers."""
    return _chat(b, 4, 8)


def chat_long(b: Builder) -> Program:
    """Four turns of 256 to 512 tokens, with long answers."""
    return _chat(b, 256, 512)


def rag(b: Builder) -> Program:
    """Questions on three of forty documents; some documents are asked for often, and those stand first."""
    instruction = b.text(100, 100)
    documents = [b.text(250, 500) for _ in range(40)]
    weights = 1 / np.arange(1, len(documents) + 1)
    weights /= weights.sum()

    def program() -> None:
        chosen = np.sort(b.rng.choice(len(documents), 3, replace=False, p=weights))
        b.ask(b.program(), [instruction, *(documents[i] for i in chosen), b.text(20, 60)], b.text(20, 80))

    return program


BATCHES: Final[Mapping[str, tuple[Workload, int]]] = {
    "few-shot": (few_shot, 170),
    "few-shot+select": (few_shot_select, 60),
    "react": (react, 30),
    "generative-agents": (generative_agents, 24),
    "tree-of-thought": (tree_of_thought, 14),
    "skeleton-of-thought": (skeleton_of_thought, 30),
    "judge": (judge, 27),
    "chat-short": (chat_short, 36),
    "chat-long": (chat_long, 15),
    "rag": (rag, 150),
}
"""Traces whose programs are all there at time 0, and how many programs each has at scale 1."""

MIXED = "mixed"
MIXED_PROGRAMS = 130
MIXED_SHARES: Final[Mapping[str, float]] = {
    "few-shot": 0.24,
    "few-shot+select": 0.08,
    "react": 0.1,
    "generative-agents": 0.06,
    "tree-of-thought": 0.03,
    "skeleton-of-thought": 0.05,
    "judge": 0.06,
    "chat-short": 0.12,
    "chat-long": 0.04,
    "rag": 0.22,
}
"""What share of the arriving programs is of which kind."""


def batch(name: str, scale: float = 1.0, seed: int = 0) -> Trace:
    """A trace of ``BATCHES``; its programs stand in a random order."""
    workload, programs = BATCHES[name]
    b = Builder(np.random.default_rng([seed, *name.encode()]))
    add_program = workload(b)
    for _ in range(max(1, round(programs * scale))):
        add_program()
    return shuffled(b.trace(name), b.rng)


def mixed(rate: float, scale: float = 1.0, seed: int = 0) -> Trace:
    """Programs of all kinds that arrive one by one, ``rate`` a second, at exponential distances (Poisson)."""
    b = Builder(np.random.default_rng([seed, *MIXED.encode()]))
    adders = {name: BATCHES[name][0](b) for name in MIXED_SHARES}
    at = 0.0
    for _ in range(max(1, round(MIXED_PROGRAMS * scale))):
        at += b.rng.exponential(1 / rate)
        kind = b.rng.choice(list(MIXED_SHARES), p=list(MIXED_SHARES.values()))
        first = len(b.calls)
        adders[str(kind)]()
        b.arrive(first, at)
    return b.trace(MIXED, open_loop=True)
