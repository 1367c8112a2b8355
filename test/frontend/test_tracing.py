"""A trace says what a program would do, does nothing of it, and names the place where it cannot go on."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.frontend import MockBackend, Program, assistant, fork, function, gen, select, system, user
from trellis.frontend.tracing.graph import described

EFFECTS: list[str] = []
SHOTS = {"France": "Paris", "Italy": "Rome"}


def question(country: str) -> str:
    return f"Q: {country}?\n"


@function
def straight(s: Any, country: str, tokens: int = 8) -> Any:
    s += system("Be brief.")
    for known, capital in SHOTS.items():
        s += question(known) + f"A: {capital}\n"
    with s.user():
        s += question(country).strip()
    s += assistant("A:" + gen("city", max_tokens=tokens))
    with s.fork(2) as branches:
        branches += [f"{i}: " + gen("fact") for i in range(2)]
    s["note"] = s["city"].upper() + "!"
    s += select("ok", ["yes", "no " + country])
    return s["note"]


def test_a_trace_is_the_programs_graph() -> None:
    trace = straight.trace()
    assert trace.is_straight
    assert trace.arguments == ("country", "tokens")
    assert str(trace).splitlines() == [
        "straight(country, tokens)",
        "  begin system",
        "  text 'Be brief.'",
        "  end system",
        "  text 'Q: France?\\nA: Paris\\n'",
        "  text 'Q: Italy?\\nA: Rome\\n'",
        "  begin user",
        "  text \"{f'Q: {country}?\\\\n'.strip(...)}\"",
        "  end user",
        "  begin assistant",
        "  text 'A:'",
        "  gen(city, max_tokens={tokens})",
        "  end assistant",
        "  fork → state 1, state 2",
        "    state 1: text '0: '",
        "    state 1: gen fact",
        "    state 2: text '1: '",
        "    state 2: gen fact",
        "  join ← state 1, state 2",
        '  read s["city"]',
        "  set note = '{s[\"city\"].upper(...)}!'",
        "  select(ok, ['yes', f'no {country}'])",
        '  read s["note"]',
    ]


def test_given_arguments_are_what_they_are() -> None:
    trace = straight.bind(tokens=3).trace("Spain")
    assert trace.arguments == ()
    assert str(trace).startswith("straight(tokens=3, country='Spain')\n")
    assert "gen city max_tokens=3" in str(trace)
    assert "text 'Q: Spain?'" in str(trace)


def test_arguments_that_the_program_does_not_take_are_refused() -> None:
    with pytest.raises(TypeError, match=r"program 'straight'.*'contry'"):
        straight.trace(contry="Spain")


def test_nodes_know_their_line() -> None:
    lines, first = inspect.getsourcelines(straight.body)
    nodes = [node for node in straight.trace().nodes if described(node.what).startswith("gen(city")]
    assert [lines[node.line - first].strip() for node in nodes if node.line] == [
        's += assistant("A:" + gen("city", max_tokens=tokens))'
    ]


# -- what ends a trace ---------------------------------------------------------------------------------------------


def branches_on_the_argument(s: Any, x: Any) -> None:
    s += f"a {x}"
    if x == "b":  # here
        s += "b"


def truth(s: Any, x: Any) -> None:
    s += "a" + (x or "nothing")  # here


def length(s: Any, x: Any) -> None:
    s += str(len(x))  # here


def length_of_a_text(s: Any, x: Any) -> None:
    text = f"<{x}>"
    s += "short" if len(text) < 5 else "long"  # here


def compares_a_text(s: Any, x: Any) -> None:
    s += "yes" if f"{x}" == "b" else "no"  # here


def looks_it_up(s: Any, x: Any) -> None:
    s += SHOTS.get(x, "nothing")  # here


def looks_for_it(s: Any, x: Any) -> None:
    s += "yes" if x in ["b"] else "no"  # here


def looks_into_it(s: Any, x: Any) -> None:
    s += "yes" if "b" in f"{x}" else "no"  # here


def is_it_none(s: Any, x: Any) -> None:
    if x is not None:  # here
        s += x


def of_which_type(s: Any, x: Any) -> None:
    s += x if isinstance(x, str) else "other"  # here


def iterates(s: Any, x: Any) -> None:
    for each in x:  # here
        s += each


def unpacks(s: Any, x: Any) -> None:
    a, b = x  # here
    s += a + b


def counts(s: Any, x: Any) -> None:
    for i in range(x):  # here
        s += str(i)


def matches(s: Any, x: Any) -> None:
    match [x]:  # here
        case ["b"]:
            s += "b"


def generated(s: Any, x: Any) -> None:
    s += x + gen("y")
    while s["y"] != "stop":  # here
        s += gen("y")


def percent(s: Any, x: Any) -> None:
    s += "a %s" % x  # noqa: UP031 # here


def formats_in_a_list(s: Any, x: Any) -> None:
    s += f"{[x]}" if x is x else ""  # here


def grows_the_argument(s: Any, x: Any) -> None:
    mine = f"{x}"
    mine += "is a text"
    s += mine
    mine = x
    mine += ["is a list?"]  # here


def appends_to_all(s: Any, x: Any) -> None:
    branches = s.fork(2)
    branches += x  # here


def prints(s: Any, x: Any) -> None:
    s += x
    print("effect")  # here


def writes_a_file(s: Any, x: Any) -> None:
    s += x
    with open("effect", "w") as file:  # here
        file.write(x)


def changes_a_global(s: Any, x: Any) -> None:
    EFFECTS.append("effect")  # here
    s += x


def grows_a_global(s: Any, x: Any) -> None:
    mine = EFFECTS
    mine += ["effect"]  # here
    s += x


def sets_an_item(s: Any, x: Any) -> None:
    SHOTS["Spain"] = "effect"  # here
    s += x


def sets_an_attribute(s: Any, x: Any) -> None:
    sys.effect = 1  # type: ignore[attr-defined]  # here
    s += x


def helper(_value: Any = None) -> str:
    EFFECTS.append("effect")
    return "x"


def effect_in_a_helper(s: Any, x: Any) -> None:
    s += x + helper()


def is_none_in_a_helper(s: Any, x: Any) -> None:
    def chosen(value: Any) -> str:
        return "none" if value is None else "some"  # here

    s += chosen(x)


def random_choice(s: Any, x: Any) -> None:
    s += x + random.choice("ab")  # here


def uses_up_a_generator(s: Any, x: Any) -> None:
    s += x + "".join(COUNTER)  # here


COUNTER = (str(i) for i in itertools.count())


def catches(s: Any, x: Any) -> None:
    try:  # here
        s += x + gen("y", regex="a")
    except Exception:
        s += "failed"


def raises(s: Any, x: Any) -> None:
    s += x
    raise ValueError("effect")  # here


def imports(_s: Any, _x: Any) -> None:
    import this  # here  # noqa: F401


def reads_what_is_not_there(s: Any, x: Any) -> None:
    s += x + s["never"]  # here


def asks_for_the_error(s: Any, x: Any) -> None:
    s += x + gen("y")
    s += "failed" if s.error() else "fine"  # here


def runs_another(s: Any, x: Any) -> None:
    s += x + straight.run("Spain")["city"]  # here


def forks_symbolically(s: Any, x: Any) -> None:
    fork(s, x)  # here


STOPS: dict[Callable[..., None], str] = {
    branches_on_the_argument: "a comparison of {x} depends on its value",
    truth: "the truth of {x} depends",
    length: "len() depends on the value of {x}",
    length_of_a_text: "len() depends on the value of <{x}>",
    compares_a_text: "a comparison of {x} depends",
    looks_it_up: "dict.get() depends",
    looks_for_it: "a comparison of {x} depends",
    looks_into_it: "a search in {x} depends",
    is_it_none: "compares {x} by 'is'",
    of_which_type: "isinstance() depends",
    iterates: "iteration of {x} depends",
    unpacks: "iteration of {x} depends",
    counts: "range() depends",
    matches: "matches a symbolic value",
    generated: 'a comparison of {s["y"]} depends',
    percent: "the text of {x} depends",
    formats_in_a_list: "compares {x} by 'is'",
    grows_the_argument: "changes {x} in place, if it is a list",
    appends_to_all: "a symbolic value, which may be a list",
    prints: "calls print(), which may do more than compute",
    writes_a_file: "calls open()",
    changes_a_global: "changes an object of type list that the program did not make",
    grows_a_global: "changes an object of type list",
    sets_an_item: "changes an object of type dict",
    sets_an_attribute: "changes an object of type module",
    effect_in_a_helper: "changes an object of type list",
    is_none_in_a_helper: "compares {x} by 'is'",
    random_choice: "choice()",
    uses_up_a_generator: "goes through an object of type generator",
    catches: "catches errors",
    raises: "raises an error",
    imports: "imports 'this'",
    reads_what_is_not_there: "reads the variable 'never', which is not set by then",
    asks_for_the_error: "uses 'error' of the state",
    runs_another: "calls Program.run()",
    forks_symbolically: "the number of branches is symbolic",
}


@pytest.mark.parametrize("body", STOPS, ids=lambda body: body.__name__)
def test_a_trace_ends_where_it_must(
    body: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = (list(EFFECTS), dict(SHOTS), next(COUNTER))
    stop = Program(body).trace().stop
    assert stop is not None
    assert STOPS[body] in stop.reason
    lines, first = inspect.getsourcelines(helper if body is effect_in_a_helper else body)
    wanted = [first + i for i, line in enumerate(lines) if "# here" in line or "EFFECTS.append" in line]
    assert stop.line == wanted[0]
    assert stop.file == __file__
    assert str(stop.line) in str(stop)
    # Nothing happened.
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    assert before[:2] == (EFFECTS, SHOTS)
    assert int(next(COUNTER)) == int(before[2]) + 1
    assert not hasattr(sys, "effect")


def test_the_graph_goes_up_to_the_end_of_the_trace() -> None:
    text = str(Program(branches_on_the_argument).trace())
    assert "text 'a {x}'\n  straight up to here: line" in text


def test_a_body_runs_once_and_after_a_trace_as_ever() -> None:
    calls = []

    @function
    def program(s: Any, x: str) -> None:
        s += x + gen("y")
        calls.append(s["y"])

    assert program.trace().stop is not None
    assert calls == []
    assert program.run("a", backend=MockBackend("b"))["y"] == "b"
    assert calls == ["b"]


def test_containers_of_the_programs_own_may_change() -> None:
    @function
    def program(s: Any, x: str) -> None:
        history: list[Any] = [x]
        table: dict[str, Any] = {}
        for turn in range(2):
            s += f"{turn}" + gen("y")
            history.append(s["y"])
            table[f"t{turn}"] = s["y"]
        s += ", ".join(history) + table["t1"]

    trace = program.trace()
    assert trace.is_straight, trace.stop
    fast, plain = (p.run("q", backend=MockBackend(["a", "b"])) for p in (program.compile(), program))
    assert fast.text() == plain.text() == "0a1bq, a, bb"


def test_helpers_of_many_kinds_are_followed() -> None:
    short = functools.partial(gen, max_tokens=2)

    class Prompts:
        kind = "plain"

        def ask(self, s: Any, what: str) -> None:
            s += f"{self.kind} {what} " + short("y")

    prompts = Prompts()

    @function
    def program(s: Any, x: str) -> None:
        prompts.ask(s, x)
        for name, _ in sorted(SHOTS.items(), key=lambda pair: pair[1], reverse=True):
            s += name
        fork(s, 2).join()

    trace = program.trace()
    assert trace.is_straight, trace.stop
    fast, plain = (p.run("q", backend=MockBackend("a b c")) for p in (program.compile(), program))
    assert fast.text() == plain.text() == "plain q a bItalyFrance"


def test_a_list_is_formatted_as_it_was_then() -> None:
    @function
    def program(s: Any, x: str) -> None:
        seen = [x]
        s += f"{seen}"
        seen.append("later")
        s += f"{seen}"

    assert program.compile().run("q", backend=MockBackend()).text() == "['q']['q', 'later']"


def test_what_has_no_source_has_no_graph() -> None:
    space: dict[str, Any] = {}
    exec("def body(s, x):\n    s += x\n", space)
    stop = Program(space["body"]).trace().stop
    assert stop is not None
    assert "source of body() is not there" in stop.reason
    assert Program(lambda s, x: s.set("a", x)).trace().stop is not None


def test_a_source_that_is_not_what_runs_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "changed.py"
    file.write_text("def body(s, x):\n    s += 'old' + x\n")
    space: dict[str, Any] = {"__name__": "changed"}
    exec(compile(file.read_text(), str(file), "exec"), space)
    file.write_text("def body(s, x):\n    s.set('a', x)\n")
    stop = Program(space["body"]).trace().stop
    assert stop is not None
    assert "is not what its source says" in stop.reason


def test_endless_programs_end_the_trace() -> None:
    @function
    def program(s: Any) -> None:
        while s:
            pass

    stop = program.trace().stop
    assert stop is not None
    assert "200,000 steps" in stop.reason


def test_programs_of_any_number_of_arguments_say_so() -> None:
    @function
    def program(s: Any, *shots: str, **more: str) -> None:
        s += "".join(shots) + str(more)

    stop = program.trace().stop
    assert stop is not None
    assert "any number of arguments (*shots)" in stop.reason


def test_asynchronous_programs_are_traced_as_well() -> None:
    @function
    async def program(s: Any, x: str) -> None:
        s += f"{x}" + gen("y")
        s += "again " + await s["y"]

    assert str(program.trace()).endswith('  read s["y"]\n  text \'again {s["y"]}\'')


@function
def formats(s: Any, text: str, number: int, spec: str) -> None:
    width = f"{spec}"
    s += f"{text!r:>10}{text:{width}}{number:,}{number!s}{{}}{text!a}" + str(number) + format(number, "x")
    s += "{} {n}".format(text, n=number) + text.replace("a", "b").title() + text[:3] + f"{number.real}"  # noqa: UP032
    s += user(f"{f'{text}'}")


FORMATS = formats.compile()


@given(st.text(max_size=8), st.integers(), st.sampled_from(["", ">8", "^3"]))
@settings(max_examples=50, deadline=None)
def test_formatting_is_pythons(text: str, number: int, spec: str) -> None:
    fast, plain = (p.run(text, number, spec, backend=MockBackend()) for p in (FORMATS, formats))
    assert fast.text() == plain.text()
