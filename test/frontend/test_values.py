"""Types of gens: what may be written, what it becomes, and what is refused."""

from __future__ import annotations

import datetime
import enum
import json
import pickle
import re
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.errors import InvalidRequestError, ProgramError
from trellis.frontend import MockBackend, function, gen
from trellis.frontend.values import bare, checked


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Alike(enum.Enum):
    A = 1
    B = "1"


class Odd(enum.Enum):
    A = (1, 2)


class Empty(enum.Enum):
    pass


def fits(python_type: Any, text: str) -> bool:
    found = bare(python_type)
    assert found is not None
    constraint = found.constraint
    assert constraint is not None
    if constraint.kind == "choices":
        return text in json.loads(constraint.source)
    return re.fullmatch(constraint.source, text) is not None


def value_of(python_type: Any, text: str, **more: Any) -> Any:
    @function
    def program(s):
        s += "x: " + gen("x", type=python_type, **more)

    return program.run(backend=MockBackend(text))["x"]


@given(st.integers(-(10**18) + 1, 10**18 - 1))
def test_integers_are_written_and_read_back(value: int) -> None:
    assert fits(int, str(value))
    assert value_of(int, str(value)) == value


@given(st.floats(-1e15, 1e15))
def test_numbers_are_written_and_read_back(value: float) -> None:
    text = f"{value:.6f}"
    assert fits(float, text)
    assert value_of(float, text) == float(text)


@given(st.dates(datetime.date(1000, 1, 1)))
def test_every_date_may_be_written(value: datetime.date) -> None:
    assert fits(datetime.date, value.isoformat())
    assert value_of(datetime.date, value.isoformat()) == value


@given(st.integers(1000, 9999), st.integers(0, 13), st.integers(0, 32))
def test_no_other_date_may_be_written(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        datetime.date.fromisoformat(text)
        exists = True
    except ValueError:
        exists = False
    assert fits(datetime.date, text) == exists


@given(st.datetimes(datetime.datetime(1000, 1, 1)))
def test_every_time_may_be_written(value: datetime.datetime) -> None:
    value = value.replace(microsecond=0)
    assert fits(datetime.datetime, value.isoformat())
    assert value_of(datetime.datetime, value.isoformat(sep=" ")) == value
    assert value_of(datetime.time, value.time().isoformat()) == value.time()


@pytest.mark.parametrize(
    ("python_type", "text", "value"),
    [
        (int, "24 apples", 24),
        (int, "-7\n\nNext", -7),
        (float, "2.5 m", 2.5),
        (float, "3", 3.0),
        (bool, "True", True),
        (bool, "false", False),
        (str, '"quoted" as it is', '"quoted" as it is'),
        (Level, "2", Level.HIGH),
        (Literal["yes", 3, False], "3", 3),
        (Literal["yes", 3, False], "False", False),
        (Literal[Level.LOW], "1", Level.LOW),
        (list[int], "[1, 2]", [1, 2]),
        (int | None, "null", None),
        (dict[str, int], '{"a": 1}', {"a": 1}),
    ],
)
def test_texts_become_values_of_their_type(python_type: Any, text: str, value: Any) -> None:
    found = value_of(python_type, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("python_type", "wrong"),
    [
        (int, ["007", "1,000", "2.5", "+1", "", "1" * 19, "x"]),
        (float, [".5", "5.", "1e", "nan", "1,5"]),
        (bool, ["TRUE", "yes", "1", "true "]),
        (datetime.time, ["24:00:00", "7:00:00", "07:60:00"]),
        (Level, ["LOW", "3", ""]),
    ],
)
def test_nothing_else_may_be_written(python_type: Any, wrong: list[str]) -> None:
    assert [text for text in wrong if fits(python_type, text)] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"type": 5}, "gen.type: must be a Python type, got 5"),
        ({"type": {"type": "object"}}, "gen.type: must be a Python type"),
        ({"type": Alike}, "are both written '1'"),
        ({"type": Odd}, "is not text or a number"),
        ({"type": Empty}, "has no members"),
        ({"type": Literal[None]}, "is not text or a number"),
        (
            {"type": Literal["a", "a "], "regex": "a"},
            "regex and type are both given; a gen takes one constraint; a type itself can be narrower",
        ),
        ({"type": int, "schema": {}}, "schema and type are both given"),
        ({"type": int, "json_spacing": "any"}, "json_spacing: only goes with"),
        ({"type": object()}, "must be a Python type"),
    ],
)
def test_bad_types_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        gen("x", **arguments)


def test_a_type_written_as_json_takes_the_options_of_a_schema() -> None:
    assert gen("x", type=list[int], json_spacing="compact").constraint.spacing == "compact"


def test_a_number_keeps_the_stops_of_the_gen_and_of_the_run() -> None:
    @function
    def program(s):
        s += "x: " + gen("x", type=int) + gen("y", type=int, stop=";")

    backend = MockBackend("1")
    program.run(backend=backend, stop=["END"])
    assert [request.sampling.stop[:1] for request in backend.requests] == [("END",), (";",)]
    assert all({" ", "\n"} <= set(request.sampling.stop) for request in backend.requests)


def test_gens_with_types_can_be_pickled() -> None:
    for python_type in (int, bool, Level, Literal["a", "b"], datetime.date):
        expr = gen("x", type=python_type)
        assert pickle.loads(pickle.dumps(expr)).constraint == expr.constraint


@pytest.mark.parametrize(
    ("value", "wanted"), [(1, int), (True, bool), ([1], list[int]), (None, int | None), (Level.LOW, int)]
)
def test_a_value_of_the_wanted_type_passes(value: Any, wanted: Any) -> None:
    assert checked(value, wanted, "x") is value


@pytest.mark.parametrize(
    ("value", "wanted"), [("1", int), (True, int), (1, bool), (["1"], list[int]), ("x", int | None)]
)
def test_another_value_is_a_type_error_that_names_both(value: Any, wanted: Any) -> None:
    with pytest.raises(TypeError, match=f"variable 'x' is {type(value).__name__}"):
        checked(value, wanted, "x")


def test_an_answer_that_is_no_value_is_an_error_when_it_is_read() -> None:
    class Loose(MockBackend):
        _check_constraint = staticmethod(lambda _request, _text: None)

    @function
    def program(s):
        s += "x: " + gen("x", type=int)

    state = program.run(backend=Loose("seven"))
    assert state.text("x") == "seven"
    with pytest.raises(ProgramError, match="is not a value of its"):
        state["x"]


# -- logprobs, stop_regex and logit_bias -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (None, None)),
        ({"logprobs": True}, (True, None)),
        ({"logprobs": False}, (False, 0)),
        ({"logprobs": 5}, (True, 5)),
        ({"logprobs": 0}, (True, 0)),
        ({"return_logprob": True, "top_logprobs_num": 2}, (True, 2)),
    ],
)
def test_logprobs_may_be_said_in_two_ways(arguments: dict[str, Any], expected: tuple[Any, Any]) -> None:
    expr = gen("x", **arguments)
    assert (expr.return_logprob, expr.top_logprobs_num) == expected


def test_a_run_may_ask_for_logprobs_and_a_gen_decline() -> None:
    @function
    def program(s):
        s += "x: " + gen("x") + gen("y", logprobs=False)

    backend = MockBackend("a")
    program.run(backend=backend, logprobs=3)
    assert [(r.return_logprob, r.top_logprobs_num) for r in backend.requests] == [(True, 3), (False, 0)]
    with pytest.raises(InvalidRequestError, match=r"run\.logprobs"):
        program.run(backend=backend, logprobs=True, return_logprob=True)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"logprobs": -1}, "gen.logprobs"),
        ({"logprobs": "yes"}, "gen.logprobs"),
        ({"logprobs": True, "return_logprob": True}, "gen.logprobs"),
        ({"logprobs": 2, "top_logprobs_num": 2}, "gen.logprobs"),
        ({"stop_regex": "a*"}, "gen.stop_regex"),
        ({"stop_regex": "("}, "gen.stop_regex"),
        ({"stop_regex": [1]}, "gen.stop_regex"),
        ({"logit_bias": [1]}, "gen.logit_bias"),
        ({"logit_bias": {"5": 1}}, "gen.logit_bias: the key"),
        ({"logit_bias": {-1: 1}}, "gen.logit_bias: the key"),
        ({"logit_bias": {5: 101}}, "gen.logit_bias[5]"),
        ({"logit_bias": {5: float("nan")}}, "gen.logit_bias[5]"),
    ],
)
def test_bad_arguments_are_refused_by_their_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        gen("x", **arguments)
    assert caught.value.field == field


def test_a_mistyped_logprobs_is_told_the_right_name() -> None:
    with pytest.raises(TypeError, match="did you mean 'logprobs'"):
        gen("x", logprob=True)  # type: ignore[call-overload]


def test_a_dict_of_biases_that_changes_later_changes_nothing() -> None:
    biases = {5: 1.0}
    expr = gen("x", logit_bias=biases)
    biases[6] = 2.0
    assert dict(expr.sampling)["logit_bias"] == ((5, 1.0),)
