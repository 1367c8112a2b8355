"""@function, run, run_batch, bind, with_options: arguments, options and where they end up."""

from __future__ import annotations

import contextvars
import threading

import pytest

from trellis.errors import BackendError, InvalidRequestError, ProgramError
from trellis.frontend import (
    MockAnswer,
    MockBackend,
    Program,
    ProgramState,
    function,
    gen,
    set_default_backend,
)


@function
def qa(s: ProgramState, question: str, tone: str = "plain") -> str:
    """Answers."""
    s += f"Q: {question} ({tone})\nA:" + gen("answer", stop="\n")
    return f"returned {s['answer']}"


def test_run_returns_a_state_that_is_complete() -> None:
    backend = MockBackend(" yes\nno")
    state = qa.run("really?", tone="kind", backend=backend)
    assert state["answer"] == " yes"
    assert state.text() == "Q: really? (kind)\nA: yes"
    assert state.return_value == "returned  yes"
    assert backend.active == 0


def test_the_program_keeps_the_functions_name_and_doc() -> None:
    assert qa.name == "qa"
    assert qa.__doc__ == "Answers."
    assert isinstance(qa, Program)


def test_the_decorator_may_be_called() -> None:
    @function()
    def program(s):
        s += gen("x")

    assert program.run(backend=MockBackend("a"))["x"] == "a"


def test_calling_a_program_runs_it_on_a_state_of_its_own() -> None:
    set_default_backend(MockBackend(lambda r: "inner" if not r.prompt[0].startswith("outer") else "outer"))

    @function
    def program(s):
        s += "outer " + gen("x")
        s.set("other", qa(question="?")["answer"])

    state = program()
    assert (state["x"], state["other"]) == ("outer", "inner")


@pytest.mark.parametrize("name", ["s", "state", "st", "self", "_"])
def test_the_first_parameter_may_have_any_name(name: str) -> None:
    space: dict[str, object] = {"gen": gen}
    exec(f"def program({name}, x):\n    {name} += x + gen('y')", space)
    program = function(space["program"])  # type: ignore[call-overload]
    assert program.run("a", backend=MockBackend("b")).text() == "ab"


def test_a_function_without_a_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="first parameter receives the state"):

        @function
        def program(): ...

    with pytest.raises(TypeError, match="first parameter receives the state"):

        @function
        def keyword_only(*, s): ...


def test_a_generator_function_is_refused() -> None:
    with pytest.raises(TypeError, match="has a yield"):

        @function
        def program(s):
            yield s

    with pytest.raises(TypeError, match="has a yield"):

        @function
        async def async_program(s):
            yield s


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"missing a required argument: 'question'; it takes \(question, tone='plain'\)$"),
        (("a", "b", "c"), {}, "too many positional"),
        (("a",), {"question": "b"}, "multiple values"),
        (("a",), {"tome": "b"}, "'tome' is neither an argument nor a run option; did you mean 'tone'"),
        (("a",), {"temprature": 0}, "did you mean 'temperature'"),
    ],
)
def test_wrong_arguments_name_the_program(args, kwargs, message) -> None:
    with pytest.raises(TypeError, match=message) as caught:
        qa.run(*args, backend=MockBackend(), **kwargs)
    assert "'qa'" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"max_new_tokens": "many"},
        {"max_tokens": "many"},
        {"max_tokens": 3, "max_new_tokens": 3},
        {"min_tokens": 2, "min_new_tokens": 1},
        {"min_tokens": 4, "max_tokens": 3},
        {"timeout": -1},
        {"stop": 3},
    ],
)
def test_wrong_run_options_are_refused(options) -> None:
    with pytest.raises(InvalidRequestError, match=r"^run\.") as caught:
        qa.run("a", backend=MockBackend(), **options)
    assert caught.value.field == f"run.{next(iter(options))}"


def test_gens_inherit_from_run_what_they_do_not_set() -> None:
    backend = MockBackend("a")

    @function
    def program(s):
        s += "x" + gen("a") + gen("b", temperature=0, max_tokens=5, stop=["!", "?"], seed=3)

    program.run(backend=backend, temperature=0.7, max_new_tokens=9, stop="\n", top_k=4, return_logprob=True)
    first, second = backend.requests
    assert (first.sampling.temperature, first.sampling.max_new_tokens) == (0.7, 9)
    assert (first.sampling.stop, first.sampling.top_k, first.sampling.seed) == (("\n",), 4, None)
    assert (second.sampling.temperature, second.sampling.max_new_tokens) == (0.0, 5)
    assert (second.sampling.stop, second.sampling.top_k, second.sampling.seed) == (("!", "?"), 4, 3)
    assert first.return_logprob
    assert second.return_logprob


def test_the_defaults_of_run() -> None:
    backend = MockBackend("a")
    qa.run("?", backend=backend)
    sampling = backend.requests[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (
        128,
        1.0,
        1.0,
        -1,
    )


def test_min_tokens_of_a_gen_may_not_exceed_the_inherited_maximum() -> None:
    @function
    def program(s):
        s += "a" + gen("x", min_tokens=10)

    with pytest.raises(ProgramError, match="min_tokens: 10 is more than max_tokens = 5"):
        program.run(backend=MockBackend("a"), max_new_tokens=5)


def test_arguments_named_like_run_options_belong_to_the_program() -> None:
    backend = MockBackend("a")

    @function
    def program(s, temperature, stop, stream=None):
        s += f"{temperature} {stop} {stream}" + gen("x")

    state = program.with_options(temperature=0.25, stop="END").run(
        temperature="hot", stop=None, stream="river", backend=backend
    )
    assert state.text() == "hot None rivera"
    assert backend.requests[0].sampling.temperature == 0.25
    assert backend.requests[0].sampling.stop == ("END",)


def test_a_program_that_takes_any_keywords() -> None:
    backend = MockBackend("a")

    @function
    def program(s, *rest, **named):
        s += f"{rest} {named}" + gen("x")

    state = program.run(1, 2, color="red", temperature=0, backend=backend)
    assert state.text() == "(1, 2) {'color': 'red'}a"
    assert backend.requests[0].sampling.temperature == 0


def test_bind_gives_arguments_and_a_call_may_override_them() -> None:
    backend = MockBackend("a")
    bound = qa.bind(tone="kind")
    assert bound.run("1", backend=backend).text().startswith("Q: 1 (kind)")
    assert bound.run("1", tone="rude", backend=backend).text().startswith("Q: 1 (rude)")
    assert qa.run("1", backend=backend).text().startswith("Q: 1 (plain)")


def test_positional_arguments_fill_what_bind_left() -> None:
    state = qa.bind(question="bound").run("sweet", backend=MockBackend("a"))
    assert state.text().startswith("Q: bound (sweet)")
    twice = qa.bind(question="bound").bind(tone="dry").run(backend=MockBackend("a"))
    assert twice.text().startswith("Q: bound (dry)")


def test_bind_refuses_an_unknown_name() -> None:
    with pytest.raises(TypeError, match="no argument 'mood' to bind; it has: question, tone"):
        qa.bind(mood="x")


def test_with_options_sets_defaults_that_run_may_override() -> None:
    backend = MockBackend("a")
    cold = qa.with_options(temperature=0, max_new_tokens=7, backend=backend)
    cold.run("?")
    cold.run("?", temperature=0.5)
    assert [r.sampling.temperature for r in backend.requests] == [0.0, 0.5]
    assert [r.sampling.max_new_tokens for r in backend.requests] == [7, 7]
    assert [s["answer"] for s in cold.run_batch([("a",)])] == ["a"]


def test_without_a_backend_the_message_says_what_to_do() -> None:
    with pytest.raises(BackendError, match="set_default_backend"):
        qa.run("?")


def test_the_default_backend_serves_every_thread() -> None:
    set_default_backend(MockBackend("a"))
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(qa.run("?")["answer"]))
    thread.start()
    thread.join(10)
    assert found == ["a"]


def test_only_a_backend_can_be_the_default() -> None:
    with pytest.raises(TypeError, match="expected a Backend"):
        set_default_backend("http://127.0.0.1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a Backend"):
        qa.run("?", backend="http://127.0.0.1")


# -- run_batch -----------------------------------------------------------------------------------------------------


def by_question(request) -> str:
    return "re: " + request.prompt[0].split()[1] + "\n"


def test_a_batch_keeps_the_order_of_its_items() -> None:
    items = [{"question": f"q{i}", "tone": "x"} if i % 2 else (f"q{i}",) for i in range(50)]
    states = qa.run_batch(items, backend=MockBackend(by_question))
    assert [s["answer"] for s in states] == [f"re: q{i}" for i in range(50)]


def test_an_empty_batch_is_an_empty_list() -> None:
    assert qa.run_batch([], backend=MockBackend()) == []


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"tone": "x"}, "item 1: program 'qa': missing a required argument: 'question'"),
        (("a", "b", "c"), "item 1: program 'qa': too many positional"),
        ({"question": "a", "n": 1}, "item 1: program 'qa': got an unexpected keyword argument 'n'"),
        ("text", "item 1: must be a dict"),
        (3, "item 1: must be a dict"),
    ],
)
def test_a_batch_checks_all_items_before_the_first_one_starts(item, message) -> None:
    backend = MockBackend("a")
    with pytest.raises(TypeError, match=message):
        qa.run_batch([("fine",), item], backend=backend)
    assert backend.requests == []


def test_a_batch_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    qa.run_batch([("a",), ("b",)], backend=MockBackend("a"), progress_bar=True)
    shown = capsys.readouterr().err
    assert "qa" in shown
    assert "2/2" in shown


def test_the_number_of_threads_bounds_the_bodies_at_work() -> None:
    lock, at_work, most = threading.Lock(), 0, 0

    @function
    def program(s, i):
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        s += str(i) + gen("x")
        s.sync()
        with lock:
            at_work -= 1

    program.run_batch([(i,) for i in range(30)], num_threads=3, backend=MockBackend("a", latency=0.002))
    assert 1 <= most <= 3


@pytest.mark.parametrize("threads", [0, -1, "many", True, 1.5])
def test_a_bad_number_of_threads_is_refused(threads) -> None:
    with pytest.raises(InvalidRequestError, match="num_threads"):
        qa.run_batch([("a",)], num_threads=threads, backend=MockBackend())


def test_on_error_return_isolates_the_items() -> None:
    def answer(request):
        return ValueError("bad luck") if "q1" in request.prompt[0] else by_question(request)

    states = qa.run_batch([(f"q{i}",) for i in range(3)], backend=MockBackend(answer), on_error="return")
    assert [s.error() is None for s in states] == [True, False, True]
    assert [states[i]["answer"] for i in (0, 2)] == ["re: q0", "re: q2"]
    error = states[1].error()
    assert error is not None
    assert (error.program, error.variable) == ("qa", "answer")
    assert isinstance(error.__cause__, ValueError)
    with pytest.raises(ProgramError, match="bad luck"):
        states[1]["answer"]


def test_an_exception_of_the_body_is_isolated_too() -> None:
    @function
    def program(s, i):
        s += "a" + gen("x")
        if i == 1:
            raise LookupError("of the body")

    states = program.run_batch([(0,), (1,)], backend=MockBackend("a"), on_error="return")
    assert states[0].error() is None
    assert isinstance(states[1].error().__cause__, LookupError)  # type: ignore[union-attr]


def test_on_error_raise_cancels_the_others(assert_settled) -> None:
    def answer(request):
        hangs = MockAnswer(latency=float("inf"))
        return ValueError("bad luck") if "q7" in request.prompt[0] else hangs

    backend = MockBackend(answer)
    with pytest.raises(ProgramError, match="bad luck"):
        qa.run_batch([(f"q{i}",) for i in range(10)], backend=backend, num_threads=10)
    assert_settled(backend)


def test_a_batch_refuses_stream_and_unknown_options() -> None:
    with pytest.raises(TypeError, match="stream"):
        qa.run_batch([("a",)], stream=True, backend=MockBackend())
    with pytest.raises(TypeError, match="on_eror"):
        qa.run_batch([("a",)], on_eror="raise", backend=MockBackend())
    with pytest.raises(InvalidRequestError, match="on_error"):
        qa.run_batch([("a",)], on_error="ignore", backend=MockBackend())


def test_bodies_see_the_context_variables_of_the_caller() -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    tenant.set("acme")

    @function
    def program(s):
        s += tenant.get()

    assert [s.text() for s in program.run_batch([(), ()], backend=MockBackend())] == ["acme", "acme"]


def test_run_takes_the_names_that_gen_has_for_the_lengths() -> None:
    backend = MockBackend("a")

    @function
    def program(s):
        s += gen("x") + gen("y", max_tokens=7)

    program.run(backend=backend, max_tokens=5, min_tokens=2)
    program.with_options(max_new_tokens=5).run(backend=backend, max_tokens=6)
    program.run_batch([()], backend=backend, max_tokens=4)
    lengths = [(r.sampling.min_new_tokens, r.sampling.max_new_tokens) for r in backend.requests]
    assert lengths == [(2, 5), (2, 7), (0, 6), (0, 7), (0, 4), (0, 7)]


def test_an_argument_of_the_program_named_like_an_option_stays_its_own() -> None:
    @function
    def program(s, max_tokens):
        s += gen("x", max_tokens=max_tokens)

    backend = MockBackend("a")
    program.run(backend=backend, max_tokens=3)
    assert backend.requests[0].sampling.max_new_tokens == 3
