"""What programs mean, on every backend: a mock, the engine in this process, a server, and that server's OpenAI API."""

from __future__ import annotations

import datetime
import enum
import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from trellis import (
    ConstraintError,
    InvalidRequestError,
    ProgramError,
    assistant,
    function,
    gen,
    image,
    select,
    system,
    user,
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Pair(BaseModel):
    left: Annotated[int, Field(ge=0, le=9)]
    right: bool


@dataclass
class Point:
    x: Annotated[int, Field(ge=0, le=9)]


def run(language: Any, body: Any, **options: Any) -> Any:
    return function(body).run(backend=language.backend, **{"temperature": 0, "max_tokens": 6, **options})


# -- gen ---------------------------------------------------------------------------------------------------------


def test_a_gen_has_text_value_and_meta(language: Any) -> None:
    def program(s: Any) -> None:
        s += "The sky is" + gen("x", logprobs=True) + "."

    state = run(language, program)
    meta = state.meta("x")
    assert state.text() == "The sky is" + state["x"] + "."
    assert state["x"] == state.text("x") != ""
    assert meta.finish_reason in ("stop", "length")
    assert meta.counts.completion_tokens == len(meta.token_ids) == len(meta.logprobs) <= 6
    assert all(logprob <= 0 for logprob in meta.logprobs)
    assert meta.counts.sampled_tokens + meta.counts.forced_tokens == meta.counts.completion_tokens
    assert meta.seconds > 0


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        (int, r"-?\d{1,18}"),
        (float, r"-?\d+(\.\d+)?([eE][+-]?\d+)?"),
        (bool, "[Tt]rue|[Ff]alse"),
        (datetime.date, r"\d{4}-\d\d-\d\d"),
        (datetime.datetime, r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d"),
        (datetime.time, r"\d\d:\d\d:\d\d"),
        (Colour, "red|blue"),
        (Literal["a", 2], "a|2"),
        (str, r"[\s\S]+"),
        (Annotated[list[Literal[1, 2]], Field(min_length=1, max_length=2)], r"\[[12](, [12])?\]"),
        (Pair, r'\{"left": \d, "right": (true|false)\}'),
        (Point, r'\{"x": \d\}'),
    ],
    ids=str,
)
def test_a_type_is_written_bare_or_as_json_and_read_back(language: Any, wanted: Any, pattern: str) -> None:
    def program(s: Any) -> None:
        s += "Value: " + gen("x", type=wanted, max_tokens=24) + "!"

    state = run(language, program)
    assert re.fullmatch(pattern, state.text("x"))
    assert state.text() == f"Value: {state.text('x')}!"
    assert state.get("x", wanted) is state["x"]


def test_what_follows_a_number_is_cut_off(language: Any) -> None:
    def program(s: Any) -> None:
        s += "1, 2, 3, 4, 5, 6 apples and " + gen("n", type=int, max_tokens=12) + "|"

    state = run(language, program)
    assert isinstance(state["n"], int)
    assert state.text().endswith(f" {state['n']}|")


def test_samples_are_lists_and_the_first_goes_on(language: Any) -> None:
    def program(s: Any) -> None:
        s += user("Name a colour.") + assistant("It is " + gen("x", n=3, seed=5, stop="\n") + "!")
        s += user("Say a digit.") + assistant(gen("d", n=2, regex="[0-9]"))

    state = run(language, program, temperature=1.5)
    assert isinstance(state["x"], list)
    assert len(state["x"]) == 3
    assert state.text("x") == state["x"]
    assert [meta.finish_reason in ("stop", "length") for meta in state.meta("x")] == [True] * 3
    assert [re.fullmatch("[0-9]", digit) is not None for digit in state["d"]] == [True, True]
    contents = [message["content"] for message in state.messages()]
    assert contents[1] == f"It is {state['x'][0]}!".strip() or contents[1] == f"It is {state['x'][0]}!"
    assert contents[3] == state["d"][0]


def test_samples_have_typed_values(language: Any) -> None:
    def program(s: Any) -> None:
        s += "Digits: " + gen("x", type=Annotated[int, Field(ge=0, le=9)], n=2)

    state = run(language, program, temperature=1.0)
    assert [type(value) for value in state["x"]] == [int, int]


def test_samples_stream_one_by_one(language: Any) -> None:
    def program(s: Any) -> None:
        s += "Say: " + gen("x", n=2) + " End."

    state = run(language, program, temperature=1.5, stream=True)
    assert "".join(state.text_iter()) == f"Say: {state['x'][0]} End." == state.text()
    assert ["".join(state.text_iter("x", sample=i)) for i in range(2)] == state["x"]
    with pytest.raises(InvalidRequestError, match="samples 0 to 1"):
        list(state.text_iter("x", sample=2))


def first_match(pattern: str, text: str) -> int | None:
    """Where the match begins that is complete first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if re.compile(pattern).fullmatch(text, start, end):
                return start
    return None


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_pattern_cuts_where_it_first_matches(language: Any, stream: bool) -> None:
    pattern = r"[a-z]{2} [a-z]+[,.]?"

    def program(s: Any, **stops: Any) -> None:
        s += "Once upon a time" + gen("x", max_tokens=14, **stops)

    free = run(language, program)["x"]
    state = run(language, lambda s: program(s, stop_regex=pattern), stream=stream)
    expected = first_match(pattern, free)
    assert expected is not None
    assert state["x"] == free[:expected]
    assert state.meta("x").matched == pattern
    assert state.text() == "Once upon a time" + state["x"]


def test_a_bias_forces_and_forbids_a_token(language: Any) -> None:
    if not language.real:
        pytest.skip("a mock has no logits")

    def program(s: Any, **more: Any) -> None:
        s += "The colour of grass is" + gen("x", max_tokens=1, logprobs=3, **more)

    free = run(language, program).meta("x")
    best, second, third = (token for token, _ in free.top_logprobs[0])
    gap = free.top_logprobs[0][0][1] - free.top_logprobs[0][1][1]

    def chosen(bias: dict[int, float]) -> int:
        return int(run(language, lambda s: program(s, logit_bias=bias)).meta("x").token_ids[0])

    assert chosen({}) == chosen({second: gap - 0.05}) == best
    assert chosen({second: gap + 0.05}) == chosen({best: -100}) == second
    assert chosen({third: 100}) == third


# -- select ------------------------------------------------------------------------------------------------------

METHODS = ["mean", "sum", "greedy", "unconditional", "exact"]


@pytest.mark.parametrize("method", METHODS)
def test_select_by_every_method(language: Any, method: str) -> None:
    options = [" two", " four", " four hundred", " five"]

    def program(s: Any) -> None:
        s += "Two plus two equals" + select("x", options, method=method) + "."

    state = run(language, program)
    meta = state.meta("x")
    assert state["x"] in options
    assert state.text() == f"Two plus two equals{state['x']}."
    assert sum(meta.probabilities) == pytest.approx(1)
    assert [len(ids) for ids in meta.option_token_ids] == [len(row) for row in meta.option_logprobs]
    assert meta.method == method
    if method != "greedy":
        assert meta.scores[options.index(state["x"])] == max(meta.scores)
    if method == "unconditional":
        assert [len(row) for row in meta.option_unconditional_logprobs] == [
            len(row) for row in meta.option_logprobs
        ]
    if method == "exact" and language.real:
        assert math.fsum(map(math.exp, meta.scores)) == pytest.approx(1, abs=1e-3)


def test_select_draws_by_the_probabilities(language: Any) -> None:
    def program(s: Any, seed: int) -> None:
        s += "A" + select("x", [" a", " b", " c"], temperature=5.0, seed=seed)

    states = function(program).run_batch([(seed,) for seed in range(12)], backend=language.backend)
    again = function(program).run(3, backend=language.backend)
    assert len({state["x"] for state in states}) > 1
    assert again["x"] == states[3]["x"]


def test_select_after_one_token_and_over_options_that_begin_alike(language: Any) -> None:
    def program(s: Any) -> None:
        s += "A" + select("x", ["b", "bc", "bcd"], method="sum")

    state = run(language, program)
    assert state.text() == "A" + state["x"]
    assert all(len(row) >= 1 for row in state.meta("x").option_logprobs)


# -- states ------------------------------------------------------------------------------------------------------


def test_forks_nest_join_and_begin_before_any_text(language: Any) -> None:
    def program(s: Any) -> None:
        with s.fork(2) as outer:
            for i, branch in enumerate(outer):
                branch += f"Number {i}: "
                with branch.fork(2) as inner:
                    inner += lambda j, i=i: f"{i}{j} " + gen("x", regex="[a-c]")
                branch += "".join(branch["x"]) + gen("y", regex="[d-f]")
        copy = s.copy()
        copy += "Aside: " + gen("z", regex="[g-i]")
        s["z"] = copy["z"]

    state = run(language, program)
    assert [[len(text) for text in row] for row in state["x"]] == [[1, 1], [1, 1]]
    assert [re.fullmatch("[d-f]", text) is not None for text in state["y"]] == [True, True]
    assert re.fullmatch("[g-i]", state["z"])
    assert state.text() == ""


def test_gather_runs_named_programs_side_by_side(language: Any) -> None:
    @function
    def digit(s: Any, low: int) -> str:
        s += f"A digit of at least {low}: " + gen("d", regex=f"[{low}-9]")
        return f"at least {low}"

    def program(s: Any) -> None:
        s += "Digits, please.\n"
        s["said"] = s.gather(small=digit.bind(low=0), large=digit.bind(low=7))
        s += f"Small {s['small']['d']}, large {s['large']['d']}."

    state = run(language, program)
    assert state["said"] == {"small": "at least 0", "large": "at least 7"}
    assert re.fullmatch(r"Digits, please\.\nSmall [0-9], large [7-9]\.", state.text())
    assert state.meta("small")["d"].counts.completion_tokens >= 1


def test_a_program_runs_on_the_state_of_another_with_options_of_its_own(language: Any) -> None:
    @function
    def short(s: Any, label: str) -> str:
        s += f"{label}: " + gen("word", ignore_eos=True)
        return str(s["word"])

    def program(s: Any) -> None:
        s += "Begin. "
        s["returned"] = s.run(short, "Word", max_tokens=2)
        s += " " + gen("after", ignore_eos=True)

    state = run(language, program)
    assert state["returned"] == state["word"]
    assert state.text() == f"Begin. Word: {state['word']} {state['after']}"
    assert state.meta("word").counts.completion_tokens <= 2 < state.meta("after").counts.completion_tokens


def test_a_scope_is_all_text_in_it(language: Any) -> None:
    def program(s: Any) -> None:
        s += "Sheet: "
        with s.var_scope("json"):
            s += '{"a": ' + gen("a", type=Literal[1, 2]) + ', "b": "' + select("b", ["x", "y"]) + '"}'
        s += " done"

    state = run(language, program, stream=True)
    assert "".join(state.text_iter("json")) == state["json"]
    assert json.loads(state["json"]) == {"a": state["a"], "b": state["b"]}
    assert state.text() == f"Sheet: {state['json']} done"


def test_values_in_f_strings_are_text_and_share_their_prefix(language: Any) -> None:
    few_shot = "One apple, two pears, three plums, four figs, five nuts. " * 3

    @function
    def program(s: Any, what: str) -> None:
        s += f"{few_shot}{what}: " + gen("x", type=Colour)
        s += f" ({s['x'].value}, {what!r})" + gen("y", max_tokens=1)

    states = program.run_batch([("sky",), ("sea",)], backend=language.backend, temperature=0)
    again = program.run("sun", backend=language.backend, temperature=0)
    assert (
        states[0].text().startswith(f"{few_shot}sky: {states[0]['x'].value} ({states[0]['x'].value}, 'sky')")
    )
    if language.real:
        counts = again.meta("x").counts
        assert counts.cached_tokens >= 0.7 * counts.prompt_tokens


def test_roles_methods_and_messages(language: Any) -> None:
    def program(s: Any) -> None:
        s += system("Be brief.")
        s.user("Hi")
        with s.assistant():
            s += gen("x", stop="\n")
        s.set_var("n", 5)

    state = run(language, program)
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant"]
    assert state.messages()[1] == {"role": "user", "content": "Hi"}
    assert state.get_var("n") == state["n"] == 5


# -- errors ------------------------------------------------------------------------------------------------------


def test_the_real_cause_comes_out_of_every_read(language: Any) -> None:
    if not language.real:
        pytest.skip("a mock refuses nothing")

    def program(s: Any) -> None:
        s += "A letter, twice: " + gen("x", regex=r"(a|b)\1")

    with pytest.raises(ProgramError) as caught:
        run(language, program)
    assert isinstance(caught.value.__cause__, ConstraintError)
    assert caught.value.variable == "x"


def test_an_image_is_refused_before_the_gen_is_sent(language: Any) -> None:
    def program(s: Any) -> None:
        s += user("What is this? " + image("cat.png")) + assistant(gen("x"))

    with pytest.raises(ProgramError, match="reads text only") as caught:
        run(language, program)
    assert isinstance(caught.value.__cause__, InvalidRequestError)
    assert caught.value.__cause__.field == "image"
