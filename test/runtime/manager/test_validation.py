"""Sampling parameters: what is taken, what is refused, and that the refusal names the field."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from trellis.errors import InvalidRequestError
from trellis.runtime.manager.validation import check_params, parse_sampling_params, sample_seed
from trellis.runtime.messages import Constraint, SamplingParams

VOCAB = 1000


def parse(**raw: Any) -> Any:
    return parse_sampling_params(raw, VOCAB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", "5"),
        ("max_new_tokens", 1 << 31),
        ("max_new_tokens", 1 << 64),
        ("min_new_tokens", 1 << 64),
        ("top_k", 1 << 64),
        ("temperature", 100.5),
        ("temperature", 1e300),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 1e-300),
        ("no_stop_trim", 0),
        ("beam_width", 0),
        ("max_new_tokens", True),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),  # over max_new_tokens, which is 128 by default
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1000": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": math.nan}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {str(i): 0 for i in range(5000)}),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 5]),
        ("stop", ["a"] * 33),
        ("stop", "a" * 1025),
        ("stop", "\ud800"),
        ("stop_token_ids", 5),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["1"]),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
        ("seed", 1 << 63),
        ("seed", -(1 << 63) - 1),
        ("seed", 0.5),
        ("n", 0),
        ("n", 129),
        ("regex", 5),
        ("regex", ""),
        ("regex", "\ud800"),
        ("choices", "abc"),
        ("choices", []),
        ("choices", ["a", 1]),
        ("json_schema", ""),
        ("json_schema", 5),
        ("json_schema", ["{}"]),
        ("json_schema", "\ud800"),
        ("json_schema", {"const": "\ud800"}),
        ("grammar", ""),
        ("grammar", {}),
        ("json_spacing", "compact"),
        ("strict", False),
        ("ebnf", "root ::= x"),
        ("stop_regex", [1]),
        ("stop_regex", "["),
        ("stop_regex", "a*"),
        ("stop_regex", "^a"),
        ("stop_regex", r"(a)\1"),
        ("stop_regex", "a" * 257),
        ("stop_regex", ["a"] * 17),
        ("spaces_between_special_tokens", "no"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**{field: value})
    assert caught.value.field.startswith(f"sampling_params.{field}")
    str(caught.value).encode()  # the message itself can be sent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", (1 << 31) - 1),
        ("min_new_tokens", 128),
        ("top_k", (1 << 31) - 1),
        ("temperature", 100),
        ("repetition_penalty", 0.01),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("frequency_penalty", -2),
        ("presence_penalty", 2),
        ("repetition_penalty", 2),
        ("stop_token_ids", [0, VOCAB - 1]),
        ("seed", (1 << 63) - 1),
        ("seed", -(1 << 63)),
        ("ignore_eos", True),
        ("skip_special_tokens", False),
    ],
)
def test_the_ends_of_each_range_are_taken(field: str, value: Any) -> None:
    assert getattr(parse(**{field: value}).params, field) == value


def test_messages_write_ranges_out() -> None:
    with pytest.raises(InvalidRequestError, match=f"from {-(1 << 63)} to {(1 << 63) - 1}, not {1 << 63}"):
        parse(seed=1 << 63)
    with pytest.raises(InvalidRequestError, match="from 0 to 2147483647, not 2147483648"):
        parse(max_new_tokens=1 << 31)
    with pytest.raises(InvalidRequestError, match=r"from 0\.01 to 2, not 0\.001"):
        parse(repetition_penalty=0.001)


def test_null_means_the_default_everywhere() -> None:
    fields = [*SamplingParams.__struct_fields__, "regex", "choices", "n", "json_schema", "grammar"]
    fields += ["json_spacing", "strict", "ebnf"]
    request = parse(**dict.fromkeys(fields))
    assert request.params == SamplingParams()
    assert request.constraint is None
    assert request.n == 1
    assert parse_sampling_params(None, VOCAB) == request


@pytest.mark.parametrize("raw", [[], "x", 5, True])
def test_the_whole_must_be_an_object(raw: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be an object"):
        parse_sampling_params(raw, VOCAB)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("max_tokens", "max_new_tokens"), ("temprature", "temperature"), ("topp", "top_p"), ("stops", "stop")],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(typo: str, meant: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"did you mean '{meant}'") as caught:
        parse(**{typo: 1})
    assert caught.value.field == f"sampling_params.{typo}"


def test_a_name_like_none_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"known fields: .*temperature"):
        parse(qqqqqqqqqqqq=1)


def test_tiny_temperatures_are_greedy() -> None:
    assert parse(temperature=1e-7).params.temperature == 0.0
    assert parse(temperature=1e-5).params.temperature == 1e-5


def test_constraints() -> None:
    assert parse(regex="a+").constraint.source == "a+"
    choices = parse(choices=["é", '"']).constraint
    assert choices.kind == "choices"
    assert json.loads(choices.source) == ["é", '"']
    assert "é" in choices.source
    assert parse(grammar='start: "é"').constraint == Constraint("grammar", 'start: "é"')


def test_schemas() -> None:
    schema = {"type": "object", "properties": {"é": {"const": 1}}}
    constraint = parse(json_schema=schema).constraint
    assert (constraint.kind, constraint.spacing, constraint.strict) == ("schema", "spaced", True)
    assert json.loads(constraint.source) == schema
    assert "é" in constraint.source
    text = ' {"type": "integer"} '
    loose = parse(json_schema=text, json_spacing="any", strict=False).constraint
    assert loose == Constraint("schema", text, "any", False)
    assert parse(json_schema=True).constraint.source == "true"
    with pytest.raises(InvalidRequestError, match="one of spaced, compact, any, not 'wide'"):
        parse(json_schema=schema, json_spacing="wide")
    with pytest.raises(InvalidRequestError, match="must be true or false"):
        parse(json_schema=schema, strict="no")
    deep: Any = {}
    for _ in range(100_000):
        deep = {"not": deep}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        parse(json_schema=deep)


@pytest.mark.parametrize("second", ["choices", "json_schema", "grammar"])
def test_a_request_has_at_most_one_constraint(second: str) -> None:
    value = {"choices": ["a"], "json_schema": {}, "grammar": 'start: "a"'}[second]
    with pytest.raises(InvalidRequestError, match=r"regex is set too; .* at most one constraint") as caught:
        parse(regex="a", **{second: value})
    assert caught.value.field == f"sampling_params.{second}"


def test_stop_may_be_one_string() -> None:
    assert parse(stop="END").params.stop == ["END"]
    assert parse(stop=["a", "b"]).params.stop == ["a", "b"]


def test_logit_bias_keys_become_ids() -> None:
    assert parse(logit_bias={"5": 1, "7": -100}).params.logit_bias == {5: 1.0, 7: -100.0}


def test_structs_of_python_callers_get_the_same_checks() -> None:
    good = SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0})
    assert check_params(good, VOCAB) == good
    with pytest.raises(InvalidRequestError, match=r"sampling_params\.top_p"):
        check_params(SamplingParams(top_p=7.0), VOCAB)
    with pytest.raises(InvalidRequestError, match=r"sampling_params\.logit_bias"):
        check_params(SamplingParams(logit_bias={VOCAB: 1.0}), VOCAB)


def test_samples_of_a_seeded_request_have_different_seeds() -> None:
    params = SamplingParams(seed=(1 << 63) - 2)
    seeds = [sample_seed(params, i).seed for i in range(5)]
    assert seeds[0] == params.seed
    assert len(set(seeds)) == 5
    for seed in seeds:
        assert parse(seed=seed).params.seed == seed
    assert sample_seed(SamplingParams(), 3).seed is None
