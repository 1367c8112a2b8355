"""Prompt tokens that are taken back: they come again and nothing has changed, or a longer token comes instead."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scheduler_fakes import EOS, LETTERS, Harness, command, generate_alone, ids, make_vocabulary

from trellis.fsm import ConstraintSpec, Vocabulary, compile_grammar
from trellis.runtime.messages import Constraint

LONGER = {"x": b"bc", "y": b"bcd", "z": b"abce"}  # what three of the ids stand for
X, Y, Z = ids("xyz")
PROMPTS = ["".join(rng.choice(list("abcdefgh"), 5)) + "ab" for rng in map(np.random.default_rng, range(40))]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    plain = make_vocabulary()
    spelled = [
        LONGER.get(LETTERS[token - 1], data) if token else data
        for token, data in enumerate(plain.token_bytes)
    ]
    return replace(plain, token_bytes=spelled, fingerprint="letters and longer ones")


class Compiler:
    """Compiles regexes of the vocabulary, at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def submit(self, spec: ConstraintSpec) -> Future:
        future: Future = Future()
        future.set_result(compile_grammar(spec, self.vocabulary))
        return future

    def stats(self) -> dict[str, Any]:
        return {}


def harness(vocabulary: Vocabulary, **config: Any) -> Harness:
    return Harness(vocabulary=vocabulary, compiler=Compiler(vocabulary), **config)


def spelled(tokens: list[int], vocabulary: Vocabulary) -> bytes:
    return b"".join(vocabulary.token_bytes[token] for token in tokens if token != EOS)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "seed": 3}, {"ignore_eos": True}, {"min_new_tokens": 4}]
)
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_token_that_comes_again_is_the_prompts_and_a_longer_one_begins_the_output(
    vocabulary: Vocabulary, params: dict[str, Any], logprobs: bool
) -> None:
    again = crossed = 0
    for prompt in PROMPTS:
        run = harness(vocabulary, pool=400)
        request = command("r", prompt, 6, healing=[1, 2], return_logprob=logprobs, **params)
        answer = run.run(request)["r"]
        assert answer.finish is not None
        kept = answer.counts.prompt_tokens
        taken = prompt[kept:]
        skipped = answer.outputs[0].options.skip_characters if answer.outputs[0].options else 0
        assert skipped == len(taken)
        if taken:
            crossed += 1
            assert vocabulary.token_bytes[answer.token_ids[0]].startswith(taken.encode())
            assert answer.token_ids[0] in (X, Y, Z)
            first = answer.token_ids[:1]
            if len(answer.token_ids) > 1:
                left = {**params, "min_new_tokens": max(params.get("min_new_tokens", 0) - 1, 0)}
                if "seed" not in params:
                    alone, _, _ = generate_alone(
                        command("r", [*ids(prompt[:kept]), *first], 5, **left), run.config
                    )
                    assert answer.token_ids[1:] == alone
        else:
            again += 1
            assert answer.token_ids == generate_alone(command("r", prompt, 6, **params), run.config)[0]
        assert answer.counts.completion_tokens == len(answer.token_ids) <= 6
        assert answer.counts.sampled_tokens == len(answer.token_ids)
        assert len(answer.logprobs) == (len(answer.token_ids) if logprobs else 0)
        if "min_new_tokens" in params:
            assert EOS not in answer.token_ids[:4]
        if "ignore_eos" in params:
            assert len(answer.token_ids) == 6
    assert again > 2
    assert crossed > 2


def test_stop_strings_and_stop_tokens_are_looked_for_in_the_new_text_only(vocabulary: Vocabulary) -> None:
    seen: set[str] = set()
    for prompt in PROMPTS:
        stops = {"stop": ["bc", "cd", "ab"], "stop_token_ids": ids("ab")}
        answer = harness(vocabulary).run(command("r", prompt, 8, healing=[1], **stops))["r"]
        assert answer.finish is not None
        overlap = len(prompt) - answer.counts.prompt_tokens
        text = spelled(answer.token_ids, vocabulary)[overlap:].decode()
        if isinstance(answer.finish.matched, str):
            assert answer.finish.matched in text
            before = text[: len(text) - len(spelled(answer.token_ids[-1:], vocabulary))]
            assert not any(stop in before for stop in stops["stop"])
        else:
            assert not any(stop in text for stop in stops["stop"])
        seen.add(f"{overlap} {answer.token_ids[0] == Y} {answer.finish.matched}")
    assert "1 True cd" in seen  # "b" was taken back and "bcd" came: its new text is "cd"
    assert "1 True bc" not in seen


@pytest.mark.parametrize("regex", [None, "[a-h]{3}"])
def test_the_limit_holds_inside_the_text_taken_back_too(regex: str | None) -> None:
    """After "bc", one token, may come "b" and then "cd": the first is output, though it gives no new text."""
    plain = make_vocabulary()
    longer = {X: b"bc", Y: b"cd"}
    vocabulary = replace(
        plain,
        token_bytes=[longer.get(token, data) for token, data in enumerate(plain.token_bytes)],
        encode=lambda text: ids(text.replace("bcd", "by").replace("bc", "x").replace("cd", "y")),
        fingerprint="a pair across the end of a prompt",
    )
    constraint = None if regex is None else Constraint("regex", regex)
    endings = set()
    for prompt in PROMPTS:
        ran = harness(vocabulary).run(command("r", prompt + "x", 1, healing=[1], constraint=constraint))["r"]
        assert ran.finish is not None
        assert ran.counts.completion_tokens == len(ran.token_ids) == 1
        endings.add((ran.finish.type, ran.token_ids == ids("b"), ran.counts.prompt_tokens - len(prompt)))
    assert ("length", True, 0) in endings
    assert ("length", False, 1) in endings


def test_the_constraint_begins_where_the_prompt_ends(vocabulary: Vocabulary) -> None:
    overlaps = set()
    for prompt in PROMPTS:
        for regex in ("c?[d-h]{2}", "ce[a-c]{2}", "[f-h]{3}"):
            run = harness(vocabulary)
            constraint = Constraint("regex", regex)
            answer = run.run(command("r", prompt, 9, healing=[1, 2], constraint=constraint))["r"]
            assert answer.finish is not None
            assert answer.finish.type == "stop"
            overlap = len(prompt) - answer.counts.prompt_tokens
            overlaps.add(overlap)
            text = spelled(answer.token_ids, vocabulary)[overlap:]
            assert compile_grammar(ConstraintSpec.regex(regex), vocabulary).accepts(text)
            assert answer.counts.forced_tokens + answer.counts.sampled_tokens == len(answer.token_ids)
            if regex == "[f-h]{3}":  # no longer token fits: nothing is taken back, and no step spent on it
                assert overlap == 0
                assert answer.counts.forward_passes == 3
    assert overlaps == {0, 1, 2}


def test_a_forced_piece_is_spelled_across_the_boundary(vocabulary: Vocabulary) -> None:
    """After "…a|b" the text "ce" must follow: canonical is the one token "abce" (by what the fake says)."""

    def encode(text: str) -> list[int]:
        out: list[int] = []
        while text:
            longest = next(
                (t for t in (Z, Y, X) if text.encode().startswith(vocabulary.token_bytes[t])), None
            )
            out.append(longest if longest else ids(text[0])[0])
            text = text[len(vocabulary.token_bytes[out[-1]]) :]
        return out

    spelling = replace(vocabulary, encode=encode)
    run = harness(spelling)
    request = command("r", "ghab", 9, healing=[1, 2], constraint=Constraint("regex", "cefg"))
    answer = run.run(request)["r"]
    assert answer.token_ids == [Z, *ids("fg")]
    assert answer.outputs[-1].forced == [True] * 3
    assert answer.counts.forward_passes == 1


def test_many_requests_heal_together_in_a_small_pool_as_each_does_alone(vocabulary: Vocabulary) -> None:
    def healed(rid: str, prompt: str) -> Any:
        return command(rid, prompt, 20, healing=[1, 2], ignore_eos=True)

    alone = {prompt: harness(vocabulary).run(healed("r", prompt))["r"].token_ids for prompt in PROMPTS}
    run = harness(vocabulary, pool=60, output_share_start=0.1, output_share_floor=0.1)
    answers = run.run(*(healed(str(i), prompt) for i, prompt in enumerate(PROMPTS)))
    assert {prompt: answers[str(i)].token_ids for i, prompt in enumerate(PROMPTS)} == alone
    assert run.scheduler.counters.retractions


def test_what_was_healed_is_cached_for_a_prompt_of_the_same_tokens(vocabulary: Vocabulary) -> None:
    run = harness(vocabulary, pool=400)
    for i, prompt in enumerate(PROMPTS):
        first = run.run(command(f"a{i}", prompt, 4, healing=[1, 2]))[f"a{i}"]
        tokens = [*ids(prompt)[: first.counts.prompt_tokens], *first.token_ids]
        again = run.run(command(f"b{i}", tokens, 1))[f"b{i}"]
        assert again.counts.cached_tokens == len(tokens) - 1


def test_a_prompt_cannot_be_taken_back_whole(vocabulary: Vocabulary) -> None:
    for healing in ([3], [0, 1], [1, 4]):
        answer = harness(vocabulary).run(command("r", "gab", 4, healing=healing))["r"]
        assert answer.finish is not None
        assert (answer.finish.type, answer.finish.status) == ("abort", 400)
        assert json.dumps(healing) in (answer.finish.message or "")
