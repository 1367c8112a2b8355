"""The in-process backend, on the real model where it matters."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from trellis.errors import (
    BackendError,
    ConstraintError,
    InvalidRequestError,
    ModelLoadError,
    ProgramError,
    RequestAborted,
)
from trellis.frontend import Engine, assistant, flush_cache, function, gen, select, server_info, system, user

on_the_model = pytest.mark.model


@function
def chat(s, question):
    s += system("Be brief.")
    s += user(question)
    s += assistant(gen("answer", max_tokens=12, return_logprob=True, top_logprobs_num=2))


@on_the_model
def test_streaming_gives_the_same_text_and_meta(engine) -> None:
    whole = chat.run("What is the capital of France?", temperature=0, backend=engine)
    streamed = chat.run("What is the capital of France?", temperature=0, backend=engine, stream=True)
    pieces = list(streamed.text_iter("answer"))
    assert "".join(pieces) == streamed["answer"] == whole["answer"]
    assert len(pieces) > 1
    a, b = whole.meta("answer"), streamed.meta("answer")
    assert a.token_ids == b.token_ids
    assert len(a.logprobs) == len(a.token_ids) == a.counts.completion_tokens
    assert [len(top) for top in a.top_logprobs] == [2] * len(a.token_ids)
    assert b.logprobs == pytest.approx(a.logprobs, abs=1e-3)
    assert b.counts.cached_tokens == b.counts.prompt_tokens - 1


@on_the_model
def test_role_text_is_the_models_own_template(engine) -> None:
    tokenizer = engine._engine.tokenizer
    with_system = chat.run("Hi", backend=engine, max_new_tokens=4)
    assert with_system.text() == tokenizer.render_chat(with_system.messages(), add_generation_prompt=False)

    @function
    def without_system(s):
        s += user("  Hi\n") + assistant("Hello.") + user("And?")

    state = without_system.run(backend=engine)
    assert state.text() == tokenizer.render_chat(state.messages(), add_generation_prompt=False)


@on_the_model
def test_the_next_gen_finds_prompt_and_answer_in_the_cache(engine) -> None:
    @function
    def program(s):
        s += "Once upon a time" + gen("a", max_tokens=9, temperature=1.3, seed=5)
        s += gen("b", max_tokens=4, temperature=0)

    flush_cache(engine)
    state = program.run(backend=engine)
    a, b = state.meta("a").counts, state.meta("b").counts
    assert a.cached_tokens == 0
    assert b.prompt_tokens == a.prompt_tokens + len(state.meta("a").token_ids)
    assert b.cached_tokens == b.prompt_tokens - 1


@on_the_model
def test_constraints_hold_and_select_scores_every_option(engine) -> None:
    @function
    def program(s):
        s += "The date is " + gen("date", regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
        s += ". The animal is a " + gen("animal", choices=["dog", "cat", "cart horse"])
        s += ". Two plus two is" + select("sum", [" three", " four", " five"])

    state = program.run(backend=engine, temperature=0)
    assert [len(part) for part in state["date"].split("-")] == [4, 2, 2]
    assert state["animal"] in ("dog", "cat", "cart horse")
    assert state["sum"] == " four"
    meta = state.meta("sum")
    assert sum(meta.probabilities) == pytest.approx(1.0)
    assert all(
        len(ids) == len(row) >= 1
        for ids, row in zip(meta.option_token_ids, meta.option_logprobs, strict=True)
    )


@on_the_model
@pytest.mark.parametrize(
    ("expr", "cause"),
    [
        (lambda: "a" + gen("x", regex=r"(a)\1"), ConstraintError),
        (lambda: gen("x"), InvalidRequestError),
        (lambda: "a" + gen("x", stop_token_ids=[10**6]), InvalidRequestError),
    ],
)
def test_what_the_runtime_refuses_reaches_the_program(engine, expr, cause) -> None:
    @function
    def program(s):
        s += expr()

    with pytest.raises(ProgramError) as caught:
        program.run(backend=engine)
    assert isinstance(caught.value.__cause__, cause)
    assert caught.value.variable == "x"


@on_the_model
def test_cancelling_frees_the_runtime_at_once(engine) -> None:
    @function
    def endless(s):
        branches = s.fork(3)
        branches += lambda i: f"Count from {i}:" + gen("x", max_tokens=4000, ignore_eos=True)
        while server_info(engine)["running_requests"] < 3:  # type: ignore[operator]
            time.sleep(0.01)
        s.cancel()
        branches.join()

    with pytest.raises(ProgramError) as caught:
        endless.run(backend=engine)
    assert isinstance(caught.value.__cause__, RequestAborted)
    deadline = time.monotonic() + 20
    while server_info(engine)["running_requests"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server_info(engine)["running_requests"] == 0


def test_a_model_that_does_not_exist() -> None:
    pytest.importorskip("torch")
    with pytest.raises(ModelLoadError, match="no-such-model"):
        Engine("no-such-model")


def test_a_closed_engine_refuses_and_closing_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    closed = []
    fake = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr("trellis.runtime.engine.InProcessEngine", lambda _config: fake)
    with Engine("any") as backend:
        pass
    backend.close()
    assert closed == [True]
    with pytest.raises(ProgramError, match="the engine is closed") as caught:
        chat.run("Hi", backend=backend)
    assert isinstance(caught.value.__cause__, BackendError)


def test_a_setting_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"max_total_token: .*did you mean 'max_total_tokens'"
    ) as caught:
        Engine(max_total_token=3)
    assert caught.value.field == "max_total_token"
    with pytest.raises(InvalidRequestError, match=r"is no setting of the server$"):
        Engine(unknown_setting=3)


@on_the_model
@pytest.mark.parametrize("stream", [False, True])
def test_the_pieces_of_a_constrained_text_are_sampled_and_forced(engine, stream) -> None:
    @function
    def program(s):
        s += "A card: " + gen("card", regex=r'\{"größe€": [0-9]{2}, "ok": true\}', max_tokens=60)

    state = program.run(backend=engine, temperature=0, stream=stream)
    pieces = state.meta("card").pieces
    assert "".join(text for text, _ in pieces) == state["card"]
    forced = [text for text, origin in pieces if origin == "forced"]
    assert "".join(forced).startswith('{"größe€":')
    assert forced[-1].endswith(', "ok": true}')
    assert not any(character in text for text in forced for character in "123456789")
    assert {origin for _, origin in pieces} == {"sampled", "forced"}


@on_the_model
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stop_pattern_cuts_forced_text_and_the_program_goes_on_from_there(engine, stream, logprobs) -> None:
    @function
    def program(s):
        s += 'The list is "http:' + gen(
            "x", regex=r"//alpha\.org; bet[ao]; gamma", stop_regex=r";\s+b", logprobs=logprobs
        )
        s += ", and" + gen("y", max_tokens=2)

    state = program.run(backend=engine, temperature=0, stream=stream)
    meta = state.meta("x")
    assert state["x"] == "//alpha.org"
    assert (meta.finish_reason, meta.matched) == ("stop", r";\s+b")
    assert "".join(text for text, _ in meta.pieces) == state["x"]
    assert state.text() == f'The list is "http://alpha.org, and{state["y"]}'
    assert not logprobs or len(meta.logprobs) == len(meta.token_ids)
    # The cut text's own tokens are the next prompt's.
    assert state.meta("y").counts.cached_tokens >= meta.counts.prompt_tokens


@on_the_model
def test_samples_are_one_step_that_computes_the_prompt_once(engine) -> None:
    @function
    def program(s, n):
        s += "A list of eleven different small animals, one a line: ant, bee, cat, dog, eel, fox:" + gen(
            "x", n=n, max_tokens=1, temperature=1.5, token_healing=False
        )

    flush_cache(engine)
    counts = [meta.counts for meta in program.run(8, backend=engine).meta("x")]
    computed = sum(each.prompt_tokens - each.cached_tokens for each in counts)
    assert computed == counts[0].prompt_tokens + 7  # of each sample the last token, for its logits
    assert len({each.prompt_tokens for each in counts}) == 1


@on_the_model
def test_the_same_seed_gives_the_same_samples_and_each_is_that_of_a_gen_alone(engine) -> None:
    @function
    def program(s, seed, n):
        s += "My favourite word is" + gen("x", n=n, seed=seed, max_tokens=4)

    together = program.run(5, 3, backend=engine)["x"]
    assert program.run(5, 3, backend=engine, stream=True)["x"] == together
    assert [program.run(seed, 1, backend=engine)["x"] for seed in (5, 6, 7)] == together
