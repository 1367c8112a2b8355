"""Where a prompt may be taken back, and the text of an answer that begins inside the prompt's last token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.fsm import Vocabulary
from trellis.runtime.manager.detokenizer import Detokenizer, TextStream
from trellis.runtime.manager.prompts import PromptEncoder
from trellis.runtime.manager.types import GenerateInput, Prompt
from trellis.runtime.messages import Counts, DetokenizeOptions, FinishReason, SamplingParams, TokenOutput

EOS, BOS = 256, 257
WORDS = ["http", "://", "na", "name", " na", " name", "東京", "ame", "\n\n"]


class GreedyTokenizer:
    """Bytes, EOS, BOS, and some words; the longest token at each place. ``bos``: put BOS before every text."""

    special_token_ids = frozenset({EOS, BOS})

    def __init__(self, bos: bool = False) -> None:
        self.token_bytes = [bytes([i]) for i in range(256)] + [
            b"<eos>",
            b"<bos>",
            *(w.encode() for w in WORDS),
        ]
        self.vocab_size = len(self.token_bytes)
        self._bos = bos
        self._longest = sorted(range(self.vocab_size), key=lambda token: -len(self.token_bytes[token]))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, ids = text.encode(), [BOS] if self._bos and add_special_tokens else []
        while data:
            ids.append(next(t for t in self._longest if data.startswith(self.token_bytes[t])))
            data = data[len(self.token_bytes[ids[-1]]) :]
        return ids

    def vocabulary(self) -> Vocabulary:
        visible = [b"" if i in self.special_token_ids else data for i, data in enumerate(self.token_bytes)]
        return Vocabulary(visible, self.vocab_size, frozenset({EOS}), self.encode, "greedy")


def healing(prompt: Prompt, bos: bool = False, **options: object) -> list[int]:
    request = GenerateInput(prompt=prompt, token_healing=True, **options)  # type: ignore[arg-type]
    [encoded] = PromptEncoder(GreedyTokenizer(bos), 1000).encode_all([request])
    return encoded.healing


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("go to http:", [1]),  # "://" begins with the ":" that the text ends with
        ("the na", [1]),  # " name"
        ("the n", [1, 2]),  # "name" and " name"
        ("the name", []),  # no token is longer
        ("go to 7", []),
        ("na", []),  # never the whole prompt
        ("東", []),  # it too
        ("in 東", [3]),  # three bytes are three tokens; what stays must be whole characters
        ("in 東京", []),
        ("x<eos>", []),  # a special token
        ("x\n", [1]),
        (["the na"], [1]),
        ([[120, 121], "na"], [1]),  # here something stays
        ([[120, 121], " the na"], [1]),
        (["go to ", [104], "http:"], [1]),
        (["the", [32, 110, 97]], []),  # ids that came as ids
        ([116, 104, 101, 32, 110], []),
    ],
)
def test_tokens_may_be_taken_back_where_a_longer_one_could_stand(prompt: Prompt, expected: list[int]) -> None:
    assert healing(prompt) == expected


def test_the_token_that_begins_every_prompt_stays_and_so_does_some_text() -> None:
    assert healing("na", bos=True) == []
    assert healing("the na", bos=True) == [1]


def test_nothing_is_taken_back_where_nothing_is_written_or_the_prompt_is_what_is_asked_about() -> None:
    assert healing("the na", params=SamplingParams(max_new_tokens=0)) == []
    assert healing("the na", logprob_start=0) == []
    assert healing("the na", params=SamplingParams(max_new_tokens=0), until_context=True) == [1]
    plain = PromptEncoder(GreedyTokenizer(), 1000).encode_all([GenerateInput(prompt="the na")])
    assert plain[0].healing == []


@given(
    st.lists(st.sampled_from([*WORDS, "t", ":", " ", "n", "東", "é", "\n"]), min_size=1, max_size=8),
    st.booleans(),
)
def test_what_stays_is_spelled_as_the_shorter_text_is(words: Sequence[str], bos: bool) -> None:
    tokenizer = GreedyTokenizer(bos)
    request = GenerateInput(prompt="".join(words), token_healing=True)
    [(ids, counts)] = PromptEncoder(tokenizer, 1000).encode_all([request])
    text = "".join(words).encode()
    for count in counts:
        taken = b"".join(tokenizer.token_bytes[token] for token in ids[-count:])
        rest = text[: len(text) - len(taken)].decode()
        assert rest + taken.decode() == "".join(words)
        assert rest
        assert tokenizer.encode(rest) == ids[:-count]
        assert any(data.startswith(taken) and data != taken for data in tokenizer.token_bytes)


def read(tokens: list[str], skip: int, stop: Sequence[str] = ()) -> tuple[str, int, str]:
    """(text, kept_tokens, tail_text) of these tokens, the first ``skip`` characters of which are the prompt's."""
    tokenizer = GreedyTokenizer()
    ids = [tokenizer.token_bytes.index(token.encode()) for token in tokens]
    options = DetokenizeOptions(list(stop), True, skip)
    outputs = [
        TokenOutput(
            rid="r",
            token_ids=[token],
            counts=Counts(),
            options=options if i == 0 else None,
            finish=FinishReason("length") if i == len(ids) - 1 else None,
        )
        for i, token in enumerate(ids)
    ]
    texts = Detokenizer(tokenizer).process(outputs)  # type: ignore[arg-type]
    ended = next(i for i, text in enumerate(texts) if text.finish is not None)
    texts = texts[: ended + 1]  # what comes after a stop string is for nobody
    assert {text.healed_characters for text in texts} == {skip}
    return "".join(text.text for text in texts), texts[-1].kept_tokens, texts[-1].tail_text


def test_the_text_does_not_repeat_the_prompt() -> None:
    assert read(["://", "x"], 1) == ("//x", 2, "")
    assert read([" name", ":"], 3) == ("me:", 2, "")
    assert read(["東京", "x"], 1) == ("京x", 2, "")
    assert read(["x", "y"], 0) == ("xy", 2, "")


def test_no_stop_string_is_found_in_what_is_the_prompts() -> None:
    assert read(["://", "x"], 1, [":"]) == ("//x", 2, "")
    assert read(["://", "x", "/"], 1, ["/x"]) == ("/", 0, "/")
    assert read([" name", "x", "y"], 3, ["y"]) == ("mex", 2, "")


def test_tokens_that_say_nothing_but_the_prompt_are_not_gone_on_from() -> None:
    assert read([" name"], 5) == ("", 0, "")
    assert read([" name", "x"], 3, ["m"]) == ("", 0, "")


def test_forced_spans_are_places_in_the_new_text() -> None:
    tokenizer = GreedyTokenizer()
    stream = TextStream(tokenizer, DetokenizeOptions([], True, 1))  # type: ignore[arg-type]
    text = stream.feed(tokenizer.token_bytes.index(b"://"), forced=True)
    text += stream.feed(ord("x"))
    assert stream.forced_spans(len(text)) == [(0, 2)]
