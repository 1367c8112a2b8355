"""What is checked when an expression is written, and that nothing about it changes afterwards."""

from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.errors import ConstraintError, InvalidRequestError
from trellis.frontend import MockBackend, assistant, function, gen, select, system, user
from trellis.frontend.expressions import ExprList, Gen, RoleBegin, RoleEnd, Text, as_expr


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_tokens": -1}, "gen.max_tokens"),
        ({"max_tokens": 1.5}, "gen.max_tokens"),
        ({"max_tokens": True}, "gen.max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "gen.min_tokens"),
        ({"temperature": -0.1}, "gen.temperature"),
        ({"temperature": math.nan}, "gen.temperature"),
        ({"temperature": math.inf}, "gen.temperature"),
        ({"temperature": "hot"}, "gen.temperature"),
        ({"top_p": 0}, "gen.top_p"),
        ({"top_p": 1.01}, "gen.top_p"),
        ({"top_k": 0}, "gen.top_k"),
        ({"top_k": -2}, "gen.top_k"),
        ({"min_p": 2}, "gen.min_p"),
        ({"frequency_penalty": 3}, "gen.frequency_penalty"),
        ({"presence_penalty": -3}, "gen.presence_penalty"),
        ({"repetition_penalty": 0}, "gen.repetition_penalty"),
        ({"seed": -1}, "gen.seed"),
        ({"ignore_eos": 1}, "gen.ignore_eos"),
        ({"stop": ""}, "gen.stop"),
        ({"stop": [1]}, "gen.stop"),
        ({"stop_token_ids": [-1]}, "gen.stop_token_ids"),
        ({"stop_token_ids": 7}, "gen.stop_token_ids"),
        ({"timeout": 0}, "gen.timeout"),
        ({"top_logprobs_num": -1}, "gen.top_logprobs_num"),
        ({"return_logprob": "yes"}, "gen.return_logprob"),
        ({"regex": 5}, "gen.regex"),
        ({"regex": "a", "choices": ["a"]}, "gen"),
        ({"choices": []}, "gen.choices"),
        ({"choices": "ab"}, "gen.choices"),
        ({"choices": ["a", ""]}, "gen.choices[1]"),
        ({"choices": ["a", "b", "a"]}, "gen.choices[2]"),
        ({"choices": [1]}, "gen.choices[0]"),
    ],
)
def test_gen_refuses_bad_arguments_at_once(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        gen("x", **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["", 3, b"x"])
def test_gen_refuses_a_name_that_is_none(name: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"gen\.name"):
        gen(name)  # type: ignore[arg-type]


def test_gen_refuses_an_unknown_argument() -> None:
    with pytest.raises(TypeError, match="temprature"):
        gen("x", temprature=0)  # type: ignore[call-arg]


def test_a_bad_regex_says_where() -> None:
    with pytest.raises(ConstraintError) as caught:
        gen("x", regex="ab(c")
    assert (caught.value.kind, caught.value.code, caught.value.where) == ("regex", "syntax", "position 2")
    assert "ab(c" in str(caught.value)


def test_choices_in_gen_are_a_constraint_and_keep_the_other_arguments() -> None:
    expr = gen("x", choices=["é", "b"], temperature=0.5, max_tokens=3)
    assert expr.constraint is not None
    assert expr.constraint.kind == "choices"
    assert json.loads(expr.constraint.source) == ["é", "b"]
    assert dict(expr.sampling) == {"temperature": 0.5, "max_new_tokens": 3}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"choices": []}, "select.choices"),
        ({"choices": None}, "select.choices"),
        ({"choices": "yes"}, "select.choices"),
        ({"choices": ["a", "a"]}, "select.choices[1]"),
        ({"choices": [""]}, "select.choices[0]"),
        ({"choices": ["a", 2]}, "select.choices[1]"),
        ({"choices": ["a"], "method": "best"}, "select.method"),
        ({"choices": ["a"], "temperature": -1}, "select.temperature"),
        ({"choices": ["a", "b"], "temperature": 1, "method": "greedy"}, "select.temperature"),
    ],
)
def test_select_refuses_bad_arguments_at_once(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        select("x", **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_list_given_as_stop_never_changes_and_never_grows() -> None:
    stop = ["\n"]
    expr = gen("x", stop=stop)

    @function
    def program(s):
        s += "go" + expr

    backend = MockBackend("a\nb")
    for _ in range(3):
        program.run(backend=backend, stop=["END"])
    stop.append("later")
    assert [request.sampling.stop for request in backend.requests] == [("\n",)] * 3
    assert dict(expr.sampling)["stop"] == ("\n",)


def test_expressions_are_immutable() -> None:
    expr = gen("x")
    with pytest.raises(AttributeError):
        expr.name = "y"  # type: ignore[misc]
    total = expr + "a"
    longer = total + "b"
    assert len(total.items) == 2
    assert len(longer.items) == 3


def test_expressions_can_be_pickled() -> None:
    expr = "a" + gen("x", stop=["."]) + select("y", ["a", "b"])
    assert pickle.loads(pickle.dumps(expr)) == expr


def test_strings_may_stand_on_either_side() -> None:
    assert list(("a" + gen("x") + "b").leaves()) == [Text("a"), gen("x"), Text("b")]


def test_a_long_sum_is_flat() -> None:
    total: ExprList = gen("x") + "0"
    for i in range(5000):
        total = total + str(i)
    assert sum(1 for _ in total.leaves()) == 5002


@given(st.recursive(st.text(), lambda inner: st.lists(inner, max_size=4), max_leaves=20))
def test_nested_lists_keep_their_order(nested: object) -> None:
    def flat(value: object) -> str:
        return value if isinstance(value, str) else "".join(flat(one) for one in value)  # type: ignore[union-attr]

    texts = [leaf.text for leaf in as_expr(nested).leaves() if isinstance(leaf, Text)]  # type: ignore[arg-type]
    assert "".join(texts) == flat(nested)


@pytest.mark.parametrize("value", [None, 3, 1.5, {"a": 1}, {"a"}, b"x", object()])
def test_only_text_and_expressions_can_be_appended(value: object) -> None:
    with pytest.raises(TypeError, match="cannot append"):
        as_expr(value)  # type: ignore[arg-type]


def test_roles_wrap_their_content() -> None:
    leaves = list(user("Hi " + gen("x")).leaves())
    assert leaves == [RoleBegin("user"), Text("Hi "), gen("x"), RoleEnd("user")]


@pytest.mark.parametrize("outer", [system, user, assistant])
def test_nested_roles_are_refused_at_once(outer) -> None:
    with pytest.raises(InvalidRequestError, match="roles cannot be nested"):
        outer("a" + user("b"))


def test_none_inherits_and_zero_does_not() -> None:
    assert gen("x").sampling == ()
    assert dict(gen("x", temperature=0, max_tokens=0).sampling) == {"temperature": 0.0, "max_new_tokens": 0}
    assert isinstance(gen("x"), Gen)


@pytest.mark.parametrize("expr", [gen("x"), select("x", ["a"]), "a" + gen("x"), user("a"), Text("a")])
def test_an_expression_in_an_f_string_is_an_error_and_not_a_part_of_the_prompt(expr) -> None:
    for write in (lambda: f"{expr}", lambda: f"{expr:>10}", lambda: "%s" % expr, lambda: str(expr)):  # noqa: UP031
        with pytest.raises(TypeError, match=r"cannot stand inside an f-string; append it with \+"):
            write()
    assert type(expr).__name__ in repr(expr)
    assert type(expr).__name__ in f"{expr!r}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: gen("x", max_token=3), "gen.* has no argument 'max_token'; did you mean 'max_tokens'"),
        (lambda: gen("x", max_new_tokens=3), "did you mean 'max_tokens'"),
        (lambda: gen("x", zzzz=3), "has no argument 'zzzz'$"),
        (lambda: select("x", ["a"], choice=["b"]), "select.* did you mean 'choices'"),
        (lambda: select("x", options=["b"]), "select.* did you mean 'choices'"),
    ],
)
def test_a_mistyped_argument_is_named_with_what_was_meant(wrong, message) -> None:
    with pytest.raises(TypeError, match=message):
        wrong()
