"""Text of the output: equal to decoding the whole, never half a character, never a stop string."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellis.runtime.manager.detokenizer import Detokenizer
from trellis.runtime.manager.types import GenerateResult
from trellis.runtime.messages import Counts, DetokenizeOptions, FinishReason, TextOutput, TokenOutput
from trellis.runtime.models import Tokenizer, load_tokenizer, resolve_model_path

SPECIAL = 0
PIECES = ["a", "b", "ab", "aab", "é", "€", "😀", "\n", " the"]


def make_vocabulary(tokens: list[bytes]) -> SimpleNamespace:
    return SimpleNamespace(token_bytes=[b"<eos>", *tokens], special_token_ids=frozenset({SPECIAL}))


def stream(
    tokens: list[bytes],
    stop: list[str],
    ids: list[int] | None = None,
    finish: FinishReason | None = None,
    skip: bool = True,
    batch: int = 1,
    forced: list[bool] | None = None,
) -> list[TextOutput]:
    """Feed tokens (ids count from 1), ``batch`` at a time, until a finish comes out."""
    detokenizer = Detokenizer(make_vocabulary(tokens))
    ids = list(range(1, len(tokens) + 1)) if ids is None else ids
    outputs: list[TextOutput] = []
    for start in range(0, max(len(ids), 1), batch):
        part = ids[start : start + batch]
        last = start + batch >= len(ids)
        output = TokenOutput(
            rid="r",
            token_ids=part,
            counts=Counts(),
            options=DetokenizeOptions(stop, skip) if start == 0 else None,
            finish=(finish or FinishReason("length")) if last else None,
            forced=forced[start : start + batch] if forced else None,
        )
        outputs += detokenizer.process([output])
        if outputs and outputs[-1].finish is not None:
            break
    assert len(detokenizer) == 0
    return outputs


def text_of(outputs: list[TextOutput]) -> str:
    return "".join(output.text for output in outputs)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


@given(st.binary(max_size=40), st.lists(st.integers(0, 5), max_size=20), st.integers(1, 3))
def test_any_bytes_cut_anywhere_read_as_the_whole_does(data: bytes, sizes: list[int], batch: int) -> None:
    tokens = cut(data, sizes)
    outputs = stream(tokens, [], batch=batch)
    assert text_of(outputs) == data.decode("utf-8", "replace")


@given(st.text(max_size=20), st.lists(st.integers(0, 5), max_size=20))
def test_valid_text_never_shows_a_replacement_character(text: str, sizes: list[int]) -> None:
    text = text.encode("utf-8", "ignore").decode().replace("\ufffd", "")
    outputs = stream(cut(text.encode(), sizes), [])
    assert all("\ufffd" not in output.text for output in outputs)
    assert text_of(outputs) == text


PROGRAMS = st.lists(st.sampled_from(PIECES), max_size=12)
STOPS = st.lists(
    st.lists(st.sampled_from("abé€"), min_size=1, max_size=3).map("".join), min_size=1, max_size=3
)


def expected_text(whole: str, stops: list[str]) -> tuple[str, str | None]:
    """Oracle: cut before the stop string that is complete first (the longest of those that end together)."""
    found = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if whole.find(stop) >= 0]
    if not found:
        return whole, None
    end, size, stop = min(found)
    return whole[: end + size], stop


@given(PROGRAMS, STOPS, st.lists(st.integers(0, 4), max_size=12), st.integers(1, 3))
def test_a_stop_string_never_leaks_into_the_stream(
    pieces: list[str], stops: list[str], sizes: list[int], batch: int
) -> None:
    whole = "".join(pieces)
    outputs = stream(cut(whole.encode(), sizes), stops, batch=batch)
    text, stop = expected_text(whole, stops)
    shown = ""
    for output in outputs:
        shown += output.text
        assert text.startswith(shown)  # nothing is ever taken back
    assert shown == text
    finish = outputs[-1].finish
    assert finish is not None
    assert (finish.type, finish.matched) == (("stop", stop) if stop else ("length", None))


@given(PROGRAMS, STOPS | st.just([]), st.lists(st.integers(0, 4), max_size=12))
def test_kept_tokens_and_tail_spell_the_final_text(
    pieces: list[str], stops: list[str], sizes: list[int]
) -> None:
    tokens = cut("".join(pieces).encode(), sizes)
    outputs = stream(tokens, stops)
    kept, tail = outputs[-1].kept_tokens, outputs[-1].tail_text
    text = text_of(outputs)
    assert b"".join(tokens[:kept]).decode() + tail == text
    # As many tokens as can be: one more spells something else, or stops within a character.
    for more in range(kept + 1, len(tokens) + 1):
        spelled = b"".join(tokens[:more])
        if spelled != b"".join(tokens[:kept]):
            assert not (_whole(spelled) and text.encode().startswith(spelled))


def _whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_text_that_may_become_a_stop_string_waits_and_is_released() -> None:
    outputs = stream([b"x", b"<", b"e", b"y", b"z"], ["<end>"])
    assert [output.text for output in outputs] == ["x", "", "", "<ey", "z"]


def test_a_cut_inside_a_token_leaves_a_tail() -> None:
    outputs = stream([b"Hello", b" wor.ld", b"!"], ["."])
    assert text_of(outputs) == "Hello wor"
    assert (outputs[-1].kept_tokens, outputs[-1].tail_text) == (1, " wor")


def test_the_stop_token_has_no_text_and_is_not_kept() -> None:
    finish = FinishReason("stop", matched=2)
    outputs = stream([b"Hi", b"\n"], [], finish=finish)
    assert text_of(outputs) == "Hi"
    assert (outputs[-1].kept_tokens, outputs[-1].finish) == (1, finish)


def test_a_grammar_that_is_complete_keeps_its_last_token() -> None:
    outputs = stream([b"ye", b"s"], [], finish=FinishReason("stop"))
    assert (text_of(outputs), outputs[-1].kept_tokens) == ("yes", 2)


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens(skip: bool, text: str) -> None:
    outputs = stream([b"a", b"b"], [], ids=[1, SPECIAL, 2], skip=skip)
    assert text_of(outputs) == text
    assert outputs[-1].kept_tokens == 3


def test_special_tokens_at_the_end_are_not_kept() -> None:
    outputs = stream([b"a"], [], ids=[1, SPECIAL, SPECIAL])
    assert (text_of(outputs), outputs[-1].kept_tokens, outputs[-1].tail_text) == ("a", 1, "")


def test_an_unfinished_character_at_the_end_becomes_a_replacement_character() -> None:
    outputs = stream([b"a", b"\xe2\x82"], [])
    assert (text_of(outputs), outputs[-1].kept_tokens, outputs[-1].tail_text) == ("a\ufffd", 2, "")


def test_a_stop_string_found_by_the_detokenizer_ends_the_request_before_the_scheduler_does() -> None:
    detokenizer = Detokenizer(make_vocabulary([b"a", b"END", b"b"]))
    first = TokenOutput(rid="r", token_ids=[1, 2], counts=Counts(), options=DetokenizeOptions(["END"], True))
    [ended] = detokenizer.process([first])
    assert ended.finish == FinishReason("stop", matched="END")
    assert detokenizer.process([TokenOutput(rid="r", token_ids=[3], counts=Counts())]) == []


def test_outputs_of_unknown_requests_are_dropped_but_refusals_pass() -> None:
    detokenizer = Detokenizer(make_vocabulary([b"a"]))
    assert detokenizer.process([TokenOutput(rid="old", token_ids=[1], counts=Counts())]) == []
    refused = FinishReason("abort", message="no", status=400)
    [output] = detokenizer.process([TokenOutput(rid="new", token_ids=[], counts=Counts(), finish=refused)])
    assert output.finish == refused
    assert len(detokenizer) == 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model_path("smollm2-135m"))


@given(PROGRAMS, STOPS | st.just([]), st.lists(st.integers(0, 4), max_size=12), st.integers(1, 3), st.data())
def test_forced_spans_say_which_characters_were_completed_by_forced_tokens(
    pieces: list[str], stops: list[str], sizes: list[int], batch: int, data: st.DataObject
) -> None:
    tokens = cut("".join(pieces).encode(), sizes)
    flags = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    outputs = stream(tokens, stops, batch=batch, forced=flags)
    # Oracle: the text grows token by token; what a token adds is its own.
    expected: list[bool] = []
    for end in range(1, len(tokens) + 1):
        spelled = b"".join(tokens[:end])
        whole = spelled.decode("utf-8", "ignore" if end < len(tokens) else "replace")
        expected += [flags[end - 1]] * (len(whole) - len(expected))
    result = GenerateResult(rid="r")
    for output in outputs:
        assert all(0 <= start < end <= len(output.text) for start, end in output.forced_spans)
        result.add(GenerateResult.from_output("r", output, 0.0))
    found = [False] * len(result.text)
    for start, end in result.forced_spans:
        found[start:end] = [True] * (end - start)
    assert found == expected[: len(result.text)]
    for (_, end), (start, _) in pairwise(result.forced_spans):
        assert end < start  # neighbours are one span


def test_a_forced_part_that_waits_for_a_stop_string_is_told_when_it_is_shown() -> None:
    outputs = stream([b"x", b"<e", b"y"], ["<end>"], forced=[False, True, False])
    assert [(o.text, o.forced_spans) for o in outputs] == [("x", []), ("", []), ("<ey", [(0, 2)])]


@pytest.mark.model
@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20), skip=st.booleans())
def test_equals_the_real_tokenizers_decode(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer)
    options = DetokenizeOptions([], skip)
    output = TokenOutput(
        rid="r", token_ids=ids, counts=Counts(), options=options, finish=FinishReason("length")
    )
    [text] = detokenizer.process([output])
    assert text.text == tokenizer.decode(ids, skip_special_tokens=skip)
