"""gen(schema=...) and gen(grammar=...): what may be given, what is sent, and what the variable becomes."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any, Literal, Optional

import httpx
import jsonschema
import pytest
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict

from trellis.errors import ConstraintError, InvalidRequestError, ProgramError
from trellis.frontend import MockBackend, RuntimeEndpoint, function, gen
from trellis.frontend.backends import wire
from trellis.frontend.backends.base import Completion, Constraint, GenerateRequest, SamplingOptions


class House(enum.Enum):
    LION = "lion"
    SNAKE = "snake"


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)
    house: House
    nickname: str | None = None
    friends: list[Person] = []

    @field_validator("name")
    @classmethod
    def _not_nobody(cls, name: str) -> str:
        if name == "nobody":
            raise ValueError("nobody is no name")
        return name


@dataclass
class Point:
    x: float
    y: float = 0.0


class Unknown:
    """A class that pydantic knows nothing of."""


class Movie(TypedDict):
    title: str
    year: int


PERSON = (
    '{"name": "Anna", "age": 31, "house": "lion", "friends": [{"name": "B", "age": 2, "house": "snake"}]}'
)


def schema_of(given: Any) -> Any:
    constraint = gen("x", schema=given).constraint
    assert constraint is not None
    assert constraint.kind == "schema"
    return json.loads(constraint.source)


def value_of(given: Any, answer: str | Completion, **more: Any) -> Any:
    @function
    def program(s: Any) -> None:
        s += "say: " + gen("x", schema=given, **more)

    state = program.run(backend=MockBackend(answer))
    assert state.text("x") == (answer if isinstance(answer, str) else answer.text)
    return state["x"]


@pytest.mark.parametrize(
    ("given", "text", "value"),
    [
        (Person, PERSON, Person.model_validate_json(PERSON)),
        (Point, '{"x": 1}', Point(1.0, 0.0)),
        (Movie, '{"title": "é", "year": 1999}', {"title": "é", "year": 1999}),
        (House, '"snake"', House.SNAKE),
        (Literal["a", 2], "2", 2),
        (int, "12", 12),
        (float, "1.5", 1.5),
        (bool, "true", True),
        (str, '"a\\nb"', "a\nb"),
        (list[int], "[1, 2]", [1, 2]),
        (dict[str, float], '{"a": 1}', {"a": 1.0}),
        (Optional[int], "null", None),  # noqa: UP045
        (int | str, '"x"', "x"),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        ({"type": "object"}, '{"a": [1, null]}', {"a": [1, None]}),
        ('{"enum": [1, "é"]}', '"é"', "é"),
        (True, "[]", []),
    ],
)
def test_the_variable_is_the_value_and_its_text_stays(given: Any, text: str, value: Any) -> None:
    found = value_of(given, text)
    assert found == value
    assert type(found) is type(value)
    jsonschema.validate(json.loads(text), schema_of(given))


def test_a_dict_and_a_text_arrive_as_they_are() -> None:
    schema = {"properties": {"b": {"const": "é"}, "a": {}}, "type": "object"}
    source = gen("x", schema=schema).constraint.source
    assert json.loads(source) == schema
    assert "é" in source
    assert source.index('"b"') < source.index('"a"')
    text = ' {"type":  "integer"}'
    assert gen("x", schema=text).constraint == Constraint("schema", text, "spaced", True)
    loose = gen("x", schema=text, json_spacing="compact", strict=False).constraint
    assert loose == Constraint("schema", text, "compact", False)


def test_objects_of_python_types_have_no_other_properties() -> None:
    class Tagged(BaseModel):
        properties: dict[str, int] = {"type": 1}
        default: Person | None = None

        model_config = {"extra": "allow"}

    person = schema_of(Person)
    assert person["$defs"]["Person"]["additionalProperties"] is False
    tagged = schema_of(Tagged)
    assert tagged["additionalProperties"] is True
    assert tagged["properties"]["properties"]["additionalProperties"] == {"type": "integer"}
    assert tagged["properties"]["properties"]["default"] == {"type": 1}
    assert tagged["$defs"]["Person"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"schema": 5}, "gen.schema"),
        ({"schema": ["a"]}, "gen.schema"),
        ({"schema": {"const": object()}}, "gen.schema"),
        ({"schema": {"const": float("nan")}}, "gen.schema"),
        ({"schema": bytearray.fromhex}, "gen.schema"),
        ({"schema": Unknown}, "gen.schema"),
        ({"schema": {}, "regex": "a"}, "gen"),
        ({"schema": {}, "grammar": 'start: "a"'}, "gen"),
        ({"choices": ["a"], "grammar": 'start: "a"'}, "gen"),
        ({"schema": {}, "json_spacing": "wide"}, "gen.json_spacing"),
        ({"schema": {}, "strict": "no"}, "gen.strict"),
        ({"regex": "a", "strict": False}, "gen.strict"),
        ({"json_spacing": "any"}, "gen.json_spacing"),
        ({"grammar": ""}, "gen.grammar"),
        ({"grammar": 5}, "gen.grammar"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        gen("x", **arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["{", "", "[1]", "5", '"x"'])
def test_a_text_that_is_no_schema_says_where(text: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        gen("x", schema=text)
    assert (caught.value.kind, caught.value.code) == ("schema", "syntax")


def cut(text: str, reason: str = "length", matched: str | None = None) -> Completion:
    return Completion(text, (1, 2), reason, matched, kept_tokens=2)


@pytest.mark.parametrize("given", [Person, {"type": "object"}])
def test_the_value_of_a_cut_text_is_an_error_but_the_program_goes_on(given: Any) -> None:
    @function
    def program(s: Any) -> None:
        s += gen("x", schema=given) + " and " + gen("y")

    state = program.run(backend=MockBackend([cut('{"name": "An'), "more"]))
    assert state.text() == '{"name": "An and more'
    assert state.text("x") == '{"name": "An'
    assert state["y"] == "more"
    assert state.meta("x").finish_reason == "length"
    for _ in range(2):
        with pytest.raises(ProgramError, match="finish_reason 'length'") as caught:
            state["x"]
        assert caught.value.variable == "x"


def test_other_texts_that_are_no_value_say_why() -> None:
    with pytest.raises(ProgramError, match="cut at the stop ','"):
        value_of(Person, cut('{"name": "A"', "stop", ","))
    with pytest.raises(ProgramError, match="nobody is no name"):
        value_of(Person, PERSON.replace("Anna", "nobody"))


def test_a_number_that_was_cut_but_still_parses_is_a_value() -> None:
    assert value_of(int, cut("12")) == 12


def test_branches_with_a_cut_text_join() -> None:
    answers = ["[1]", cut("[2")]

    @function
    def program(s: Any, on_error: str) -> None:
        branches = s.fork(2)
        for branch, answer in zip(branches, answers, strict=True):
            branch += answer if isinstance(answer, str) else answer.text
            branch += gen("x", schema=list[int])
        branches.join(on_error=on_error)

    def answer(request: GenerateRequest) -> str | Completion:
        return answers["[2" in str(request.prompt)]

    state = program.run("raise", backend=MockBackend(answer))
    assert state.text("x") == ["[1]", "[2"]
    with pytest.raises(ProgramError, match="length"):
        state["x"]
    good, bad = program.run("return", backend=MockBackend(answer))["x"]
    assert good == [1]
    assert isinstance(bad, ProgramError)


def test_values_stream_as_text_and_end_as_values() -> None:
    @function
    def program(s: Any) -> None:
        s += gen("x", schema=Person)

    state = program.run(backend=MockBackend(PERSON), stream=True)
    assert "".join(state.text_iter("x")) == PERSON
    assert isinstance(state["x"], Person)


def test_the_mock_knows_schemas_and_grammars() -> None:
    with pytest.raises(ProgramError, match="breaks the schema"):
        value_of(dict, "no json")

    @function
    def program(s: Any) -> None:
        s += gen("x", grammar='start: "a"')

    assert program.run(backend=MockBackend("a"))["x"] == "a"
    with pytest.raises(ProgramError, match="cannot make up text for a grammar"):
        _ = program.run(backend=MockBackend())["x"]


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        (Constraint("schema", '{"b": 1, "a": 2}'), ('{"b": 1, "a": 2}', "spaced", True)),
        (Constraint("schema", "{}", "any", False), ("{}", "any", False)),
    ],
)
def test_a_schema_goes_over_http_as_its_text(constraint: Constraint, fields: tuple[Any, ...]) -> None:
    body = wire.generate_body(GenerateRequest(("a",), SamplingOptions(), constraint), stream=False)
    sampling = body["sampling_params"]
    assert (sampling["json_schema"], sampling["json_spacing"], sampling["strict"]) == fields
    assert "schema" not in sampling


def test_a_grammar_goes_over_http() -> None:
    request = GenerateRequest(("a",), SamplingOptions(), Constraint("grammar", 'start: "a"'))
    assert wire.generate_body(request, stream=False)["sampling_params"]["grammar"] == 'start: "a"'


def endpoint_answering(status: int, body: Any) -> RuntimeEndpoint:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=body))
    return RuntimeEndpoint("http://server:1", transport=transport)


def test_what_the_server_says_of_the_constraint_is_in_the_meta() -> None:
    meta = {
        "finish_reason": {"type": "stop", "matched": None},
        "grammar_engine": "llguidance",
        "validated_only": ["uniqueItems at #"],
        "constraint_warnings": ["the text does not satisfy the constraint"],
    }

    @function
    def program(s: Any) -> None:
        s += gen("x", schema={"uniqueItems": True}, strict=False)

    backend = endpoint_answering(200, {"text": "[1, 1]", "output_ids": [1], "meta_info": meta})
    state = program.run(backend=backend)
    assert state["x"] == [1, 1]
    found = state.meta("x")
    assert found.grammar_engine == "llguidance"
    assert found.validated_only == ("uniqueItems at #",)
    assert found.constraint_warnings == ("the text does not satisfy the constraint",)


def test_a_refused_schema_is_a_constraint_error_of_the_gen() -> None:
    message = "schema: keyword 'contains' cannot be enforced (at #/properties/a)"
    error = {"message": message, "field": "json_schema", "code": "constraint_unsupported"}
    backend = endpoint_answering(400, {"error": {**error, "type": "invalid_request_error"}})

    @function
    def program(s: Any) -> None:
        s += gen("x", schema={})

    with pytest.raises(ProgramError) as caught:
        program.run(backend=backend).sync()
    cause = caught.value.__cause__
    assert isinstance(cause, ConstraintError)
    assert (cause.kind, cause.code, cause.where) == ("schema", "unsupported", "#/properties/a")
    assert cause.detail == "keyword 'contains' cannot be enforced"
