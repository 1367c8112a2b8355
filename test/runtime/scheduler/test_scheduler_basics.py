"""One request at a time, and a few together: outputs, finish reasons, counts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scheduler_fakes import (
    EOS,
    Harness,
    assert_as_alone,
    choices,
    command,
    fingerprint,
    generate_alone,
    ids,
    log_softmax,
    logits_of,
)


def test_output_equals_generation_alone_without_cache():
    harness = Harness()
    requests = [command(f"r{i}", "abcdefgh"[: i + 1], max_new_tokens=12) for i in range(8)]
    harness.run(*requests)
    for request in requests:
        assert_as_alone(harness, request)
    assert harness.free + harness.cached == 200


def test_prompt_is_computed_in_chunks_and_gives_the_same():
    harness = Harness(chunked_prefill_size=4)
    request = command("r", "thequickbrownfoxjumps")
    harness.run(request)
    assert_as_alone(harness, request)
    assert [n for batch in harness.runner.batches for n, _ in batch][:6] == [4, 4, 4, 4, 4, 1]


def test_second_identical_request_computes_only_the_last_prompt_token():
    harness = Harness()
    first, second = command("a", "thequickbrownfox"), command("b", "thequickbrownfox")
    harness.run(first)
    answers = harness.run(second)
    assert answers["a"].counts.cached_tokens == 0
    assert answers["b"].counts.cached_tokens == 15
    assert answers["b"].token_ids == answers["a"].token_ids
    assert harness.runner.batches[-answers["b"].counts.forward_passes][0] == (1, 15)


def test_output_of_a_request_is_found_by_the_next_turn():
    harness = Harness()
    first = harness.run(command("a", "hello", max_new_tokens=6, ignore_eos=True))["a"]
    prompt = ids("hello") + first.token_ids + ids("more")
    second = harness.run(command("b", prompt))["b"]
    # all but the last output token, which was never computed
    assert second.counts.cached_tokens == 5 + 5


def test_namespaces_share_nothing():
    harness = Harness()
    harness.run(command("a", "thequickbrownfox", namespace="x"))
    answers = harness.run(command("b", "thequickbrownfox", namespace="y"))
    assert answers["b"].counts.cached_tokens == 0
    assert answers["b"].token_ids == answers["a"].token_ids


def test_thirty_two_requests_with_one_new_prefix_compute_it_once():
    generator = random.Random(0)
    prefix = [generator.randint(1, 26) for _ in range(1000)]
    requests = []
    for i in range(32):
        suffix = [1 + i % 26, *[generator.randint(1, 26) for _ in range(generator.randint(1, 9))]]
        requests.append(command(f"r{i}", prefix + suffix, max_new_tokens=3))
    harness = Harness(pool=4000, chunked_prefill_size=2048)
    answers = harness.run(*requests)
    suffixes = sum(len(request.token_ids) - 1000 for request in requests)
    computed = sum(sum(n for n, _ in batch) for batch in harness.runner.batches[:1])
    assert computed <= 1000 + suffixes
    stats = harness.scheduler.stats()
    assert stats["computed_prompt_tokens"] <= 1000 + suffixes
    assert stats["prompt_tokens"] == stats["computed_prompt_tokens"] + stats["cached_tokens"]
    assert all(answer.counts.cached_tokens >= 1000 for rid, answer in answers.items() if rid != "r0")
    for request in requests:
        assert_as_alone(harness, request)


@pytest.mark.parametrize("chunk", [64, 333, 1000])
def test_requests_with_one_new_prefix_compute_it_once_in_chunks_too(chunk):
    generator = random.Random(1)
    prefix = [generator.randint(1, 26) for _ in range(1000)]
    requests = [command(f"r{i}", [*prefix, 1 + i, 2, 3], max_new_tokens=2) for i in range(20)]
    harness = Harness(pool=4000, chunked_prefill_size=chunk)
    harness.run(*requests)
    assert harness.scheduler.stats()["computed_prompt_tokens"] <= 1000 + 20 * 3
    for request in requests:
        assert_as_alone(harness, request)


def test_counts_add_up():
    harness = Harness()
    harness.run(command("a", "abcdef", max_new_tokens=5, ignore_eos=True))
    answers = harness.run(command("b", "abcxyz", max_new_tokens=5, ignore_eos=True))
    counts = answers["b"].counts
    assert (counts.prompt_tokens, counts.cached_tokens) == (6, 3)
    assert (counts.completion_tokens, counts.sampled_tokens, counts.forced_tokens) == (5, 5, 0)
    assert counts.forward_passes == 5


def test_tokens_are_streamed_step_by_step():
    harness = Harness()
    answer = harness.run(command("a", "abc", max_new_tokens=5, ignore_eos=True))["a"]
    assert [len(output.token_ids) for output in answer.outputs] == [1] * 5
    assert [output.finish is None for output in answer.outputs] == [True] * 4 + [False]


# ---- how requests end ------------------------------------------------------------------------------------


def test_eos_ends_and_is_reported():
    harness = Harness()
    for i in range(20):
        request = command(f"r{i}", [1 + i], max_new_tokens=200)
        answer = harness.run(request)[request.rid]
        assert_as_alone(harness, request)
        if answer.finish.matched == EOS:
            assert answer.token_ids[-1] == EOS
            return
    raise AssertionError("no text ended with EOS")


def test_max_new_tokens_ends_with_length():
    answer = Harness().run(command("a", "abc", max_new_tokens=4, ignore_eos=True))["a"]
    assert (len(answer.token_ids), answer.finish.type) == (4, "length")


def test_min_new_tokens_forbids_eos_and_stop_tokens():
    harness = Harness()
    for i in range(26):
        request = command(
            f"r{i}",
            [1 + i, 3],
            max_new_tokens=9,
            min_new_tokens=6,
            stop_token_ids=[5, 7, 9],
            temperature=1.0,
            seed=i,
        )
        answer = harness.run(request)[request.rid]
        assert not {EOS, 5, 7, 9} & set(answer.token_ids[:5])
        assert len(answer.token_ids) >= 7 or answer.finish.type == "length"
        assert_as_alone(harness, request)


def test_stop_token_ends_even_if_eos_is_ignored():
    harness = Harness()
    free = harness.run(command("a", "abc", max_new_tokens=10, ignore_eos=True))["a"].token_ids
    stop = next(token for token in free[2:] if token != EOS)
    request = command("b", "abc", max_new_tokens=10, ignore_eos=True, stop_token_ids=[stop])
    answer = harness.run(request)["b"]
    assert answer.token_ids == free[: free.index(stop) + 1]
    assert (answer.finish.type, answer.finish.matched) == ("stop", stop)


def test_stop_string_over_token_boundaries():
    harness = Harness()
    free = harness.run(command("a", "abc", max_new_tokens=30, min_new_tokens=30))["a"]
    needle = free.text[7:11]
    request = command("b", "abc", max_new_tokens=30, min_new_tokens=30, stop=["zzzzzz", needle])
    answer = harness.run(request)["b"]
    assert answer.text == free.text[: free.text.index(needle) + 4]
    assert answer.finish.matched == needle


def test_the_context_limits_the_output():
    harness = Harness(context_length=10)
    answer = harness.run(command("a", "abcdef", max_new_tokens=100, ignore_eos=True))["a"]
    assert (len(answer.token_ids), answer.finish.type) == (4, "length")


def test_the_pool_limits_the_output():
    harness = Harness(pool=10)
    answer = harness.run(command("a", "abcdef", max_new_tokens=100, ignore_eos=True))["a"]
    assert (len(answer.token_ids), answer.finish.type) == (4, "length")


def test_zero_new_tokens_computes_and_caches_the_prompt():
    harness = Harness()
    answer = harness.run(command("a", "abcdefgh", max_new_tokens=0))["a"]
    assert (answer.token_ids, answer.finish.type, answer.counts.forward_passes) == ([], "length", 1)
    assert harness.cached == 8
    assert harness.runner.samples == 0


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "config", "status", "says"),
    [
        (command("r", [1] * 20), {"context_length": 20}, 400, "context length is 20"),
        (command("r", [1] * 50), {"pool": 50}, 400, "never fit"),
        (command("r", []), {}, 400, "empty"),
        (command("r", [1, 99]), {}, 400, "99"),
        (command("r", [1, -1]), {}, 400, "-1"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(request_, config, status, says):
    harness = Harness(**config)
    answer = harness.run(request_)["r"]
    assert (answer.finish.type, answer.finish.status) == ("abort", status)
    assert says in answer.finish.message
    assert harness.runner.forwards == 0


def test_a_full_queue_refuses_with_503_and_goes_on():
    harness = Harness(max_queued_requests=3)
    answers = harness.run(*[command(f"r{i}", "abc") for i in range(5)])
    assert [answers[f"r{i}"].finish.type for i in range(3)] == [answers["r0"].finish.type] * 3
    assert [answers[f"r{i}"].finish.status for i in (3, 4)] == [503, 503]
    assert harness.run(command("later", "abc"))["later"].finish.status is None


def test_an_id_that_is_in_use_is_refused():
    harness = Harness()
    harness.scheduler.add([command("r", "abc", max_new_tokens=5), command("r", "xyz")])
    first = harness.scheduler.step()
    assert [o.finish.status for o in first if o.finish] == [400]
    assert harness.scheduler.roster.by_id["r"].tokens.view(0, 3).tolist() == ids("abc")


def test_a_compiler_that_takes_nothing_fails_only_the_constrained_requests(caplog):
    harness = Harness()
    harness.compiler.submit = lambda _: (_ for _ in ()).throw(RuntimeError("shut down"))
    answers = harness.run(command("bad", "abc", constraint=choices("x")), command("good", "abc"))
    assert (answers["bad"].finish.type, answers["bad"].finish.status) == ("abort", 500)
    assert "shut down" in answers["bad"].finish.message
    assert "could not be taken" in caplog.text
    assert_as_alone(harness, command("good", "abc"))


# ---- sampling --------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_text_in_any_batch():
    request = command("r", "abc", max_new_tokens=20, temperature=1.0, seed=7)
    alone = Harness().run(request)["r"].token_ids
    others = [command(f"o{i}", "abd", temperature=1.0, seed=i) for i in range(5)]
    assert Harness().run(*others, request)["r"].token_ids == alone
    assert alone == generate_alone(request, Harness().config)[0]


def test_requests_without_a_seed_get_one_from_the_injected_generator():
    def run(seed):
        harness = Harness(rng=random.Random(seed))
        answers = harness.run(
            *[command(f"r{i}", "abc", max_new_tokens=12, temperature=1.0) for i in range(4)]
        )
        return [answers[f"r{i}"].token_ids for i in range(4)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert len({tuple(tokens) for tokens in run(1)}) > 1


def test_history_is_given_only_when_a_penalty_needs_it():
    harness = Harness()
    harness.run(command("a", "abc", max_new_tokens=2, ignore_eos=True))
    assert all(row.history is None for row in harness.runner.rows)
    seen = []
    sample = harness.runner.sample
    harness.runner.sample = lambda logits, rows: (
        seen.extend((row.history.tolist(), row.output_start) for row in rows) or sample(logits, rows)
    )
    answer = harness.run(command("b", "abc", max_new_tokens=2, ignore_eos=True, presence_penalty=0.5))["b"]
    assert seen == [(ids("abc"), 3), (ids("abc") + answer.token_ids[:1], 3)]


# ---- logprobs --------------------------------------------------------------------------------------------


def true_logprobs(prompt: list[int], tokens: list[int]) -> list[float]:
    context, out = list(prompt), []
    for token in tokens:
        out.append(float(log_softmax(logits_of(fingerprint(context)))[token]))
        context.append(token)
    return out


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("start", [0, 1, 4, 9, 10, 30])
@pytest.mark.parametrize("warm", [False, True])
def test_input_logprobs_are_exact_for_any_chunking_and_cache(chunk, start, warm):
    harness = Harness(chunked_prefill_size=chunk, max_score_rows=4)
    prompt = ids("thequickfo")
    if warm:
        harness.run(command("w", prompt, max_new_tokens=0))
    answer = harness.run(command("r", prompt, max_new_tokens=0, logprob_start=start))["r"]
    expected = [None, *true_logprobs(prompt[:1], prompt[1:])][start:]
    assert answer.input_logprobs == pytest.approx(expected)
    # what the first logprob needs is computed; all before that may come from the cache
    assert answer.counts.cached_tokens == (min(max(start - 1, 0), 9) if warm else 0)


@pytest.mark.parametrize("chunk", [2, 100])
def test_output_logprobs_stand_with_their_tokens(chunk):
    harness = Harness(chunked_prefill_size=chunk)
    prompt = ids("thequick")
    request = command("r", prompt, max_new_tokens=6, ignore_eos=True, return_logprob=True, top_logprobs_num=3)
    answer = harness.run(request)["r"]
    assert answer.logprobs == pytest.approx(true_logprobs(prompt, answer.token_ids))
    assert all(len(output.logprobs) == len(output.token_ids) for output in answer.outputs)
    assert [len(top) for top in answer.top_logprobs] == [3] * 6
    assert answer.top_logprobs[0][0][1] == pytest.approx(
        float(log_softmax(logits_of(fingerprint(prompt))).max())
    )


def test_rows_read_for_input_logprobs_are_bounded():
    harness = Harness(pool=2000, max_score_rows=16, chunked_prefill_size=500)
    answer = harness.run(command("r", [1 + i % 26 for i in range(200)], max_new_tokens=0, logprob_start=0))[
        "r"
    ]
    assert len(answer.input_logprobs) == 200
    assert max(n for batch in harness.runner.batches for n, _ in batch) <= 17


# ---- constraints -----------------------------------------------------------------------------------------


def test_constrained_output_with_and_without_jump_forward_is_the_same():
    texts = ["alphabet", "alphanumeric", "beta", "gammaray", "gammon"]
    for i in range(10):
        results = []
        for jump in (True, False):
            harness = Harness()
            request = command(
                f"r{i}", [1 + i, 2], max_new_tokens=20, constraint=choices(*texts), jump_forward=jump
            )
            answer = harness.run(request)[f"r{i}"]
            assert_as_alone(harness, request)
            assert answer.text in texts
            assert answer.finish.type == "stop"
            assert (
                answer.counts.completion_tokens == answer.counts.sampled_tokens + answer.counts.forced_tokens
            )
            results.append(answer)
        assert results[0].token_ids == results[1].token_ids
        assert results[0].counts.forced_tokens > 0 == results[1].counts.forced_tokens
        assert results[0].counts.forward_passes < results[1].counts.forward_passes


def test_forced_run_is_one_extend():
    harness = Harness()
    answer = harness.run(command("r", "zz", max_new_tokens=30, constraint=choices("aqqqqqx", "aqqqqqy")))["r"]
    # prompt and "aqqqqq" in one extend, one sampled letter, and no forward pass after it
    drafted = 2  # "y" and one letter more
    assert harness.runner.batches == [[(2 + 6 + drafted, 0)]]
    assert (answer.counts.forced_tokens, answer.counts.sampled_tokens) == (6, 1)


def test_a_run_after_a_sampled_token_is_one_extend():
    harness = Harness()
    answer = harness.run(
        command("r", "zz", max_new_tokens=30, constraint=choices("abbbbx", "abbbby", "cddddx", "cddddy"))
    )
    # the first draft is of "cddd" and fails, or is too short; the second is "y" and one letter more
    assert harness.runner.batches == [[(2 + 4, 0)], [(5 + 2, 2)]]
    assert answer["r"].counts.forced_tokens == 4


@pytest.mark.parametrize("logprobs", [False, True])
def test_every_output_says_which_of_its_tokens_were_forced(logprobs):
    texts = ("abbbbx", "abbbby", "cddddx", "cddddy")
    request = command("r", "zz", max_new_tokens=30, return_logprob=logprobs, constraint=choices(*texts))
    answer = Harness().run(request)["r"]
    flags = [flag for o in answer.outputs for flag in o.forced or [False] * len(o.token_ids)]
    assert flags == [False, True, True, True, True, False]
    assert sum(flags) == answer.counts.forced_tokens


def test_outputs_of_free_text_carry_no_flags():
    answer = Harness().run(command("r", "zz", max_new_tokens=4))["r"]
    assert [output.forced for output in answer.outputs] == [None] * len(answer.outputs)


def test_a_single_choice_is_never_sampled():
    harness = Harness()
    answer = harness.run(command("r", "zz", max_new_tokens=30, constraint=choices("hello")))["r"]
    assert (answer.text, answer.finish.type, harness.runner.samples) == ("hello", "stop", 0)


def test_max_new_tokens_cuts_a_forced_run():
    harness = Harness()
    answer = harness.run(command("r", "zz", max_new_tokens=3, constraint=choices("abcdefgh")))["r"]
    assert (answer.text, answer.finish.type) == ("abc", "length")


def test_a_stop_string_inside_a_forced_run_ends_it_there():
    harness = Harness()
    answer = harness.run(command("r", "zz", max_new_tokens=30, stop=["cd"], constraint=choices("abcdefgh")))[
        "r"
    ]
    assert (answer.text, answer.finish.matched) == ("abcd", "cd")


def test_a_stop_token_inside_a_forced_run_ends_it_there():
    harness = Harness()
    request = command("r", "zz", max_new_tokens=30, stop_token_ids=ids("c"), constraint=choices("abcdefgh"))
    answer = harness.run(request)["r"]
    assert (answer.text, answer.finish.matched) == ("abc", ids("c")[0])


def test_text_that_is_complete_at_the_limit_was_not_cut():
    answer = Harness().run(command("r", "zz", max_new_tokens=2, constraint=choices("ab", "cd")))["r"]
    assert answer.finish.type == "stop"


def test_the_empty_choice_is_complete_at_once():
    answer = Harness().run(command("r", "zz", constraint=choices("")))["r"]
    assert (answer.text, answer.finish.type) == ("", "stop")


@pytest.mark.parametrize(
    "texts", [("hello",), ("abbbbx", "abbbby", "cddddx", "cddddy"), ("aqqx", "aqqyzzzz")]
)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_forced_tokens_get_the_true_logprobs(texts, chunk):
    harness = Harness(chunked_prefill_size=chunk)
    prompt = ids("thequick")
    request = command(
        "r", prompt, max_new_tokens=30, constraint=choices(*texts), return_logprob=True, top_logprobs_num=2
    )
    answer = harness.run(request)["r"]
    assert answer.text in texts
    assert answer.logprobs == pytest.approx(true_logprobs(prompt, answer.token_ids))
    assert all(len(output.logprobs) == len(output.token_ids) for output in answer.outputs)
    assert [len(top) for top in answer.top_logprobs] == [2] * len(answer.token_ids)


def test_a_constraint_decides_about_eos_alone():
    harness = Harness()
    for i in range(10):
        request = command(
            f"r{i}",
            [1 + i],
            max_new_tokens=9,
            min_new_tokens=5,
            ignore_eos=True,
            constraint=choices("a", "ab", "abc"),
        )
        answer = harness.run(request)[f"r{i}"]
        assert answer.text in ("a", "ab", "abc")
        assert answer.finish.type == "stop"


def test_a_refused_constraint_is_a_400_and_the_others_go_on():
    harness = Harness()
    bad = command("bad", "abc", constraint=choices("x"))
    bad.constraint = type(bad.constraint)("choices", "[nonsense")
    answers = harness.run(bad, command("good", "abc"))
    assert (answers["bad"].finish.type, answers["bad"].finish.status) == ("abort", 400)
    assert "position" in answers["bad"].finish.message
    assert_as_alone(harness, command("good", "abc"))


@pytest.mark.parametrize("kind", ["broken", "lying"])
def test_a_grammar_that_fails_midway_ends_only_its_request(kind):
    harness = Harness()
    texts = [a + b + c + d for a in "ab" for b in "ab" for c in "ab" for d in "ab"]
    good = command("good", "abc", max_new_tokens=6)
    answers = harness.run(command("bad", "xyz", constraint=choices(*texts, kind=kind)), good)
    assert (answers["bad"].finish.type, answers["bad"].finish.status) == ("error", 500)
    assert len(answers["bad"].text) == 2
    assert_as_alone(harness, good)


def test_requests_wait_for_their_grammar_outside_the_queue():
    harness = Harness(slow_grammars=True)
    waiting = command("c", "abc", constraint=choices("yes", "no"))
    harness.run(waiting, command("free", "abc"))
    assert harness.answer("free").finish is not None
    assert "c" not in harness.outputs
    assert harness.scheduler.stats()["compiling_requests"] == 1
    assert not harness.scheduler.has_work()
    harness.compiler.release()
    assert harness.scheduler.has_work()
    harness.run()
    assert_as_alone(harness, waiting)


def test_masks_belong_to_their_own_rows():
    harness = Harness()
    requests = []
    for i in range(30):
        constraint = choices(*[chr(97 + (i + k) % 26) + "x" * k for k in range(1, 4)]) if i % 3 else None
        requests.append(command(f"r{i}", [1 + i % 26, 5], constraint=constraint, temperature=0.7, seed=i))
    harness.run(*requests)
    for request in requests:
        assert_as_alone(harness, request)


def test_on_grammar_ready_is_called():
    from scheduler_fakes import FakeCompiler, FakeRunner, make_vocabulary

    from trellis.runtime.scheduler import Scheduler, SchedulerConfig

    calls = []
    compiler = FakeCompiler(slow=True)
    scheduler = Scheduler(
        SchedulerConfig(100, 100),
        FakeRunner(100),
        make_vocabulary(),
        compiler,
        on_grammar_ready=lambda: calls.append(1),
    )
    scheduler.add([command("r", "abc", constraint=choices("x"))])
    assert calls == []
    compiler.release()
    assert calls == [1]


def test_logits_of_the_fake_depend_on_the_whole_context():
    assert not np.allclose(logits_of(fingerprint([1, 2, 3])), logits_of(fingerprint([2, 2, 3])))
