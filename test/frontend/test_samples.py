"""Several samples of a gen: how they are asked for, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from trellis.errors import BackendError, InvalidRequestError, ProgramError
from trellis.frontend import Gen, MockAnswer, MockBackend, RuntimeEndpoint, function, gen
from trellis.frontend.backends.base import GenerateRequest, SamplingOptions
from trellis.frontend.backends.samples import stream_each

HANGS = MockAnswer(latency=float("inf"))


def run(expr, backend, **options):
    @function
    def program(s):
        s += "Say: " + expr + "."

    return program.run(backend=backend, **options)


def test_each_sample_has_a_seed_of_its_own() -> None:
    backend = MockBackend(lambda request: str(request.sampling.seed))
    assert run(gen("x", n=3, seed=5), backend)["x"] == ["5", "6", "7"]
    assert run(gen("x", n=2), backend)["x"] == ["None", "None"]
    assert backend.peak >= 2


def test_one_sample_is_no_list() -> None:
    state = run(gen("x", n=1), MockBackend("a"))
    assert (state["x"], state.text("x")) == ("a", "a")
    assert not isinstance(state.meta("x"), list)


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2"])
def test_a_bad_number_of_samples_is_refused(n) -> None:
    with pytest.raises(InvalidRequestError, match=r"gen\.n"):
        gen("x", n=n)


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_sample_that_fails_ends_the_others(stream, assert_settled) -> None:
    def answer(request):
        return MockAnswer("some text", error=BackendError("gone")) if request.sampling.seed == 2 else HANGS

    backend = MockBackend(answer)
    state = run(gen("x", n=4, seed=0), backend, stream=True) if stream else None
    with pytest.raises(ProgramError, match="gone"):
        state["x"] if state else run(gen("x", n=4, seed=0), backend)
    assert_settled(backend)
    assert backend.cancelled == 3


def test_cancelling_ends_all_samples(assert_settled) -> None:
    backend = MockBackend(HANGS)
    with pytest.raises(ProgramError, match="TimeoutError"):
        run(gen("x", n=3, timeout=0.05), backend)
    assert_settled(backend)
    assert backend.cancelled == 3


def test_a_sample_without_a_value_is_an_error_when_the_values_are_read() -> None:
    state = run(gen("x", n=2, schema={"type": "object"}, max_tokens=2), MockBackend(['{"a": 1}', "{}"]))
    assert state.text("x") == ['{"a": 1}', "{}"]
    cut = run(gen("x", n=2, type=int, stop="2"), MockBackend(["12", "2"]))
    with pytest.raises(ProgramError, match="cut at the stop '2'"):
        cut["x"]
    assert cut.text("x") == ["1", ""]
    assert [meta.matched for meta in cut.meta("x")] == ["2", "2"]


def test_branches_with_samples_join_to_lists_of_lists() -> None:
    @function
    def program(s):
        branches = s.fork(2)
        branches += lambda i: f"{i}: " + gen("x", n=2, seed=10 * i)
        branches.join()

    state = program.run(backend=MockBackend(lambda request: str(request.sampling.seed)))
    assert state["x"] == [["0", "1"], ["10", "11"]]
    assert [row.variable for row in state.report().rows] == ["x[0][0]", "x[0][1]", "x[1][0]", "x[1][1]"]


def test_a_wrong_number_of_samples_is_an_error_of_the_backend() -> None:
    class Few(MockBackend):
        async def samples(self, request, n):  # noqa: ARG002
            return [await self.generate(request)]

    with pytest.raises(ProgramError, match="3 samples were asked for, 1 came back"):
        run(gen("x", n=3), Few("a"))


def test_leaving_the_chunks_of_several_samples_ends_all_of_them() -> None:
    backend = MockBackend(lambda request: "a b c" if request.sampling.seed == 1 else HANGS)

    async def first_chunk():
        chunks = stream_each(backend, GenerateRequest(("Say:",), SamplingOptions(seed=0)), 3)
        found = [chunk async for chunk in _first(chunks)]
        await chunks.aclose()
        return found

    [(index, chunk)] = asyncio.run(first_chunk())
    assert (index, chunk.text) == (1, "a")
    assert backend.active == 0


async def _first(chunks):
    async for chunk in chunks:
        yield chunk
        return


# -- over HTTP ---------------------------------------------------------------------------------------------------


def whole(text, **more):
    meta = {"finish_reason": {"type": "stop", "matched": None}, "kept_tokens": 0}
    return {"text": text, "output_ids": [1], "meta_info": meta, **more}


async def _in_pieces(data):
    for start in range(0, len(data), 50):
        yield data[start : start + 50]


def endpoint(answer, bodies):
    def handle(request):
        bodies.append(json.loads(request.content))
        if isinstance(answer, bytes):
            return httpx.Response(200, content=_in_pieces(answer))
        return httpx.Response(200, json=answer)

    return RuntimeEndpoint("http://server", transport=httpx.MockTransport(handle))


def test_samples_are_one_request_over_http() -> None:
    bodies: list[dict] = []
    state = run(
        gen("x", n=2, logit_bias={7: -100, 8: 1.5}, stop_regex=r"\n+"),
        endpoint([whole("a"), whole("b")], bodies),
    )
    assert state["x"] == ["a", "b"]
    [body] = bodies
    params = body["sampling_params"]
    assert params["n"] == 2
    assert params["logit_bias"] == {"7": -100, "8": 1.5}
    assert params["stop_regex"] == [r"\n+"]


def test_what_is_not_asked_for_is_not_sent() -> None:
    bodies: list[dict] = []
    run(gen("x"), endpoint(whole("a"), bodies))
    assert not {"n", "logit_bias", "stop_regex", "stop"} & bodies[0]["sampling_params"].keys()


def test_samples_stream_as_events_with_an_index() -> None:
    events = [
        {"text": "b", "meta_info": {}, "index": 1},
        {"text": "a", "meta_info": {}, "index": 0},
        whole("bb", index=1),
        whole("ab", index=0),
    ]
    content = (
        b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    )
    state = run(gen("x", n=2), endpoint(content, []), stream=True)
    assert list(state.text_iter("x", sample=1)) == ["b", "b"]
    assert list(state.text_iter("x")) == ["a", "b"]
    assert state["x"] == ["ab", "bb"]
    assert state.text() == "Say: ab."


@pytest.mark.parametrize(
    ("answer", "stream", "message"),
    [
        ([whole("a")], False, "must be a list of 2 samples"),
        (whole("a"), False, "must be a list of 2 samples"),
        (b'data: {"text": "a", "meta_info": {}}\n\n', True, "index is missing"),
        (b'data: {"text": "a", "meta_info": {}, "index": 2}\n\n', True, "index is 2, but 2 samples"),
        (
            b"data: " + json.dumps(whole("a", index=0)).encode() + b"\n\ndata: [DONE]\n\n",
            True,
            "before the answer",
        ),
    ],
)
def test_wrong_answers_to_several_samples(answer, stream, message) -> None:
    with pytest.raises(ProgramError, match=message):
        run(gen("x", n=2), endpoint(answer, []), stream=stream).text()


def test_a_gen_of_several_samples_knows_its_number() -> None:
    expr = gen("x", n=3)
    assert isinstance(expr, Gen)
    assert expr.n == 3
