"""A compiled program does what the program does: random straight-line programs, both ways, on one mock."""

from __future__ import annotations

import hashlib
import linecache
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trellis import ProgramError
from trellis.frontend import MockBackend, Program, ProgramState, function
from trellis.frontend.backends.base import GenerateRequest

HEAD = """from trellis.frontend import *

def helper(value, other=None):
    return f"<{value}>" if other is None else other + value

def careful(value):
    return "none" if value is None else f"some {value}"
"""

TRICKS = """
if {e} is None: {s} += 'none '
{s} += 'long' if len({e}) > 3 else 'short'
{s} += 'yes' if {e} == 'what' else 'no'
w = {e}; {s} += 'same' if f"{{w}}" == 'what' else 'other'
{s} += str({e})[::-1] + {e}[:2] + {e}[-1:]
{s} += {e}.split()[0]
{s} += ''.join(sorted({e}))
{s} += '%s %r' % ({e}, {e})
{s} += repr({e}) + format({e}, '>9') + '{{:>7}}|{{x!r}}'.format({e}, x={e})
for c in {e}: {s} += c
x = [{e}, 'k']; x.append('m'); x[1] = q; {s} += '/'.join(x)
y = {{'a': {e}}}; y['b'] = {e}; y |= {{'c': 1}}; {s} += f"{{y}}" + ''.join(y['b'] for _ in range(2))
{s} += (lambda v, w='!': v + w)({e})
{s} += helper({e}) + helper({e}, other='o')
{s} += careful({e})
{s} += 'in' if 'w' in {e} else 'out'
{s} += {e} or 'empty'
{s} += {e} and 'full'
t = {e}; t += ' more'; {s} += t
t = 'more '; t += {e}; {s} += t
w = {e}; {s} += f"{{w!r:>20}}{{w:{{'<'}}9}}"
{s} += max([{e}, 'm'])
{s} += str(isinstance({e}, str))
a, *b = [{e}, 'x', 'y']; {s} += a + b[-1]
k = 'one'; f = lambda: k + {e}; k = 'two'; {s} += f()
{s} += (z := {e}) + f'{{z}}'
{s} += ''.join(f'{{c}}{{u}}' for c in 'ab' for u in [{e}] if c != 'a')
for k, v in {{'a': {e}, 'b': 'c'}}.items(): {s} += k + v
{s} += [{e}, user({e}), ['deep', {e}]] if {role} else [{e}, ['deep', {e}]]
{s} += {{'what': 'hit'}}.get({e}, 'miss')
{s} += str({e}.__len__())
{s} += 'x' * n
{s} += str(n + 1) if n > 4 else str(-n)
{s} += d['k'] + d.get('k') + str(d)
{s} += next(iter({e}))
{s} += ' '.join(map(str, [{e}]))
{s} += str({e}).join('abc') + {e}.join(['x', {e}])
{s} += f"{{ {s} }}"[:3]
{s} += str({s}.variables()) if 'again' in {s} else 'no such variable'
{s} += {s}.get(gen('never')) if n > 99 else ''
""".strip().splitlines()
"""Statements that need care: each must be traced exactly, or end the trace."""


def program_of(source: str, name: str = "program") -> Program:
    """A program whose source Python's ``linecache`` knows, as that of a file."""
    file = f"<random {hashlib.sha1(source.encode()).hexdigest()}>"
    text = HEAD + source
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    space: dict[str, Any] = {"__name__": file}
    exec(compile(text, file, "exec", dont_inherit=True), space)
    return function(space[name])


class Mock(MockBackend):
    """Answers depend on the prompt's text alone, whatever the order of the requests."""

    def __init__(self) -> None:
        super().__init__(self._answer_to, scores=self._scores_of)

    def _digest(self, text: str) -> int:
        return int(hashlib.sha1(text.encode()).hexdigest()[:8], 16)

    def _answer_to(self, request: GenerateRequest) -> str:
        digest = self._digest(self.prompt_text(request.prompt))
        if request.constraint is not None:
            return ["red", "blue"][digest % 2]
        return " ".join(f"w{digest >> shift & 15}" for shift in range(digest % 5 + 1))

    def _scores_of(self, prompt: str, options: Any) -> list[list[float]]:
        return [[-float(self._digest(prompt + option) % 97)] for option in options]

    def asked(self) -> Counter[tuple[Any, ...]]:
        """All that came, whatever the order."""
        gens = [
            (self.prompt_text(r.prompt), r.sampling, r.constraint, r.token_healing) for r in self.requests
        ]
        selects = [(self.prompt_text(prompt), options) for prompt, options in self.score_requests]
        return Counter([*gens, *selects])


def ran(program: Program, backend: Mock, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What came of a run; of one that raised, the error."""
    try:
        return outcome(program.run(backend=backend, **arguments))
    except Exception as error:
        return type(error), str(error)


def outcome(state: ProgramState) -> tuple[Any, ...]:
    names = state.variables()
    variables = {name: (state[name], state.text(name)) for name in names}
    return state.text(), state.messages(), names, variables, state.return_value


@dataclass
class Writer:
    """Writes a random program, statement by statement."""

    draw: Any
    lines: list[str] = field(default_factory=list)
    count: int = 0
    tricky: bool = False
    new: list[str] = field(default_factory=list)  # variables of the expression that is being written

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def put(self, indent: int, line: str) -> None:
        self.lines.append("    " * indent + line)

    def value(self, state: str, known: list[str]) -> str:
        """An expression of text."""
        options = [
            "repr('word ')",
            "q",
            "f'<{q}>'",
            "f'{q:>6}|{n!r}'",
            "'a ' + q",
            "q.strip().upper()",
            "d['k']",
        ]
        if known:
            name = self.pick(*known)
            options += [f"{state}[{name!r}]", f'f"({{{state}[{name!r}]}})"', f"'t' + {state}.text({name!r})"]
            options += [f"' '.join([q, {state}[{name!r}]])", f"{state}[{name!r}].replace('w', q)"]
        return str(self.pick(*options))

    def expression(self, state: str, known: list[str]) -> str:
        kind = self.pick("value", "value", "gen", "gen", "choices", "select", "sum")
        name = self.pick(self.fresh("v"), "again")
        if kind == "value":
            return self.value(state, known)
        if kind == "sum":
            return f"{self.expression(state, known)} + {self.expression(state, known)}"
        self.new.append(name)
        if kind == "gen":
            return f"gen({name!r}, max_tokens={self.pick('3', 'n', '9')})"
        if kind == "choices":
            return f"gen({name!r}, choices=['red', 'blue'])"
        return f"select({name!r}, ['x', q + '!', 'zz'])"

    def statements(self, indent: int, state: str, known: list[str], depth: int, role: bool) -> None:
        self.put(indent, f"{state} += 'begin '" if not role else "pass")
        for _ in range(self.draw(st.integers(1, 3))):
            self.statement(indent, state, known, depth, role)

    def appended(self, state: str, known: list[str]) -> str:
        self.new = []
        text = self.expression(state, known)
        known.extend(name for name in self.new if name not in known)
        return text

    def statement(self, indent: int, state: str, known: list[str], depth: int, role: bool) -> None:
        kind = self.pick(
            "append", "append", "append", "set", "whole", "loop", "role", "with role", "fork", "fork"
        )
        if kind == "set":
            name = self.fresh("p")
            self.put(indent, f"{state}[{name!r}] = {self.value(state, known)}")
            known.append(name)
        elif kind == "whole":
            self.put(indent, f"{state} += f'[{{{state}.text()}}]'[:40]")
        elif kind == "loop":
            self.put(indent, f"for i in range({self.pick(1, 2)}):")
            self.put(indent + 1, f"{state} += f'{{i}}' + {self.appended(state, known)}")
        elif kind == "role" and not role:
            self.put(indent, f"{state} += {self.pick('user', 'assistant')}({self.appended(state, known)})")
        elif kind == "with role" and not role:
            self.put(indent, f"with {state}.{self.pick('user', 'assistant')}():")
            self.statements(indent + 1, state, known, depth, True)
        elif kind == "fork" and depth < 2:
            self.fork(indent, state, known, depth, role)
        else:
            self.put(indent, f"{state} += {self.appended(state, known)}")

    def fork(self, indent: int, state: str, known: list[str], depth: int, role: bool) -> None:
        group, count = self.fresh("g"), self.pick(1, 2, 3)
        self.put(indent, f"{group} = {state}.fork({count})")
        inner: list[list[str]] = []
        for _ in range(self.pick(1, 2)):  # twice over the branches: what each reads makes the body wait
            for index in range(count):
                branch = self.fresh("b")
                self.put(indent, f"{branch} = {group}[{index}]")
                if len(inner) <= index:
                    inner.append(list(known))
                self.statements(indent, branch, inner[index], depth + 1, role)
        if self.pick(True, False):
            self.put(indent, f"{group} += lambda i: f' {{i}} ' + gen({self.fresh('v')!r})")
        mode = self.pick("gather", "concatenate")
        self.put(indent, f"{group}.join({mode!r})")
        joined = sorted({name for names in inner for name in names} - set(known))
        if mode == "gather" and "again" in known:
            known.remove("again")  # it is a list if a branch has set it
        if mode == "gather" and joined:
            value = f"{state}[{self.pick(*joined)!r}]"
            self.put(
                indent, f'{state} += f"{{{value}}}" + "".join(f"{{i}}{{x}}" for i, x in enumerate({value}))'
            )


@st.composite
def sources(draw: Any, tricky: bool = False) -> str:
    writer = Writer(draw, tricky=tricky)
    writer.put(0, "def program(s, q, n, d):")
    known: list[str] = []
    writer.statements(1, "s", known, 0, False)
    writer.put(1, f"return {writer.value('s', known)}")
    return "\n".join(writer.lines) + "\n"


ARGUMENTS = [
    {"q": "what", "n": 4, "d": {"k": "v"}},
    {"q": " ", "n": 7, "d": {"k": ""}},
]


def check(source: str) -> None:
    program = program_of(source)
    compiled = program.compile()
    for arguments in ARGUMENTS:
        backends = [Mock(), Mock()]
        plain, fast = (ran(p, b, arguments) for p, b in zip((program, compiled), backends, strict=True))
        assert fast == plain
        if len(plain) > 2:
            assert backends[1].asked() == backends[0].asked()


@given(sources())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_compiled_programs_do_the_same(source: str) -> None:
    check(source)


def check_tricky(source: str) -> None:
    """The trace ends, or the compiled program does the same. Where one fails the other does, though of several errors in
    several branches it may be another one."""
    program = program_of(source)
    stop = program.trace().stop
    if stop is not None:
        assert stop.line is not None
        with pytest.raises(ProgramError):
            program.compile()
        return
    compiled = program.compile()
    for arguments in [*ARGUMENTS, {"q": "", "n": 1, "d": {"k": "x"}}, {"q": None, "n": 9, "d": {"k": "y"}}]:
        plain, fast = (ran(p, Mock(), arguments) for p in (program, compiled))
        assert fast == plain or len(plain) == len(fast) == 2


@given(sources(tricky=True))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_compiles_does_the_same(source: str) -> None:
    check_tricky(source)


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("value", ["q", "s['v']", "f'a {q}'", "s['j'][1]"])
def test_tricks_one_by_one(trick: str, value: str) -> None:
    lines = ["s += 'a ' + gen('v')", "with s.fork(2) as b: b += 'f' + gen('j')", "pass"]
    lines.append(trick.format(e=value, s="s", role=True))
    check_tricky("def program(s, q, n, d):\n" + "".join(f"    {line}\n" for line in lines))


@pytest.mark.slow
@given(sources(tricky=True))
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_compiles_does_the_same_at_length(source: str) -> None:
    check_tricky(source)


@pytest.mark.slow
@given(sources())
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
def test_compiled_programs_do_the_same_at_length(source: str) -> None:
    check(source)
