"""Who waits for whom, how a step's budget is spent, and in which order requests are admitted."""

from __future__ import annotations

import pytest
from scheduler_fakes import Harness, assert_as_alone, choices, command, ids

from trellis.errors import InvalidRequestError


def numbers(n: int, start: int = 0) -> list[int]:
    return [1 + (start + i * 7) % 26 for i in range(n)]


# ---- followers -------------------------------------------------------------------------------------------


def test_a_follower_waits_for_a_prefill_that_is_still_in_progress():
    """The leader is slow (few score rows a step), so there is budget for the follower; it must not compute the
    shared prefix a second time."""
    harness = Harness(pool=400, max_score_rows=10)
    leader = command("leader", numbers(100), max_new_tokens=1, logprob_start=0)
    follower = command("follower", [*numbers(80), 3, 3, 3], max_new_tokens=1)
    harness.scheduler.add([leader, follower])
    harness.step()
    assert [request.rid for request in harness.scheduler.roster.waiting] == ["follower"]
    harness.run()
    assert harness.answer("follower").counts.cached_tokens == 80
    assert harness.runner.computed <= 100 + 3 + 1
    assert_as_alone(harness, follower)


def test_a_follower_goes_on_as_soon_as_its_own_part_is_there():
    harness = Harness(pool=400, max_score_rows=10)
    leader = command("leader", numbers(200), max_new_tokens=1, logprob_start=0)
    follower = command("follower", [*numbers(25), 3, 3, 3], max_new_tokens=1)
    harness.scheduler.add([leader, follower])
    steps = 0
    while "follower" not in harness.outputs:
        harness.step()
        steps += 1
    assert steps == 3
    assert harness.scheduler.roster.by_id["leader"].prefilling


def test_those_who_share_less_than_is_there_do_not_wait():
    harness = Harness(pool=400, max_score_rows=10)
    leader = command("leader", numbers(100), max_new_tokens=1, logprob_start=0)
    other = command("other", [*numbers(5), 3, 3, 3], max_new_tokens=1)
    harness.scheduler.add([leader, other])
    harness.step()
    assert "other" in harness.outputs


def test_namespaces_do_not_follow_each_other():
    harness = Harness(pool=400, max_score_rows=10)
    leader = command("leader", numbers(100), max_new_tokens=1, logprob_start=0)
    harness.scheduler.add([leader, command("other", numbers(100), max_new_tokens=1, namespace="x")])
    harness.step()
    assert "other" in harness.outputs


def test_nobody_waits_for_a_prefill_whose_tokens_do_not_get_into_the_tree():
    """The leader computes again, into private slots, what the tree has, as it needs the logits."""
    harness = Harness(pool=400, max_score_rows=10, policy="fcfs")
    harness.run(command("first", numbers(50), max_new_tokens=0))
    leader = command("leader", numbers(100), max_new_tokens=1, logprob_start=0)
    other = command("other", numbers(100), max_new_tokens=1)
    harness.scheduler.add([leader, other])
    harness.step()
    assert harness.answer("other").counts.cached_tokens == 50
    harness.run()
    assert len(harness.answer("leader").input_logprobs) == 100


def test_a_follower_goes_on_when_its_leader_is_retracted_or_gone():
    harness = Harness(pool=400, max_score_rows=10)
    harness.scheduler.add(
        [command("leader", numbers(100), logprob_start=0), command("f", numbers(100), max_new_tokens=2)]
    )
    harness.step()
    harness.scheduler.abort("leader")
    harness.step()
    assert harness.answer("f").counts.cached_tokens == 10
    harness.run()
    assert_as_alone(harness, command("f", numbers(100), max_new_tokens=2))


def test_identical_requests_of_one_step_compute_one_token_each_beyond_the_first():
    harness = Harness(pool=400)
    harness.run(*[command(f"r{i}", numbers(50), max_new_tokens=1) for i in range(10)])
    assert harness.runner.batches[0] == [(50, 0)] + [(1, 49)] * 9
    assert harness.free + harness.cached == 400
    assert harness.cached == 50


def test_a_prefill_takes_over_what_another_one_finished_meanwhile():
    """A request that needs logits recomputes what is cached into private slots; when it has caught up, it gives
    the duplicates back and shares the tree's."""
    harness = Harness(pool=200, chunked_prefill_size=10)
    harness.run(command("first", numbers(35), max_new_tokens=0))
    harness.scheduler.add(
        [command("scored", numbers(60), max_new_tokens=30, ignore_eos=True, logprob_start=0)]
    )
    for _ in range(6):
        harness.step()
    request = harness.scheduler.roster.by_id["scored"]
    assert request.computed == 60
    assert request.private == 0
    harness.run()
    assert len(harness.answer("scored").input_logprobs) == 60


# ---- budget ----------------------------------------------------------------------------------------------


def test_running_requests_get_a_token_every_step_while_a_long_prompt_is_prefilled():
    harness = Harness(pool=3000, chunked_prefill_size=50)
    harness.scheduler.add(
        [command(f"r{i}", [1 + i, 2], max_new_tokens=60, ignore_eos=True) for i in range(4)]
    )
    harness.step()
    harness.scheduler.add([command("long", numbers(1000), max_new_tokens=1)])
    for _ in range(20):
        outputs = harness.step()
        assert {f"r{i}" for i in range(4)} <= {output.rid for output in outputs}
        batch = harness.runner.batches[-1]
        assert sum(n for n, _ in batch) <= 50 + 4
    assert harness.answer("long").finish is not None


def test_prefill_goes_on_under_long_forced_runs():
    texts = ["".join("abcd"[(i >> (2 * k)) % 4] + "q" * 18 for k in range(3)) for i in range(64)]
    harness = Harness(pool=3000, chunked_prefill_size=40, prefill_min_share=0.25)
    harness.scheduler.add(
        [command(f"r{i}", [1 + i, 2], max_new_tokens=60, constraint=choices(*texts)) for i in range(8)]
    )
    harness.step()
    harness.scheduler.add([command("long", numbers(60), max_new_tokens=1)])
    computed = 0
    while "long" not in harness.outputs:
        forced = harness.scheduler.counters.forced_tokens
        harness.step()
        long = harness.scheduler.roster.by_id.get("long")
        now = long.computed if long else 60
        assert now - computed >= min(10, 60 - computed), f"after {forced} forced tokens"
        computed = now
    harness.run()
    assert all(harness.answer(f"r{i}").text in texts for i in range(8))


def test_a_forced_run_longer_than_the_budget_is_cut_into_chunks():
    text = "a" + "b" * 50
    harness = Harness(chunked_prefill_size=8)
    request = command("r", "zz", max_new_tokens=100, constraint=choices(text + "x", text + "y", "c"))
    answer = harness.run(request)["r"]
    assert_as_alone(harness, request)
    assert max(n for batch in harness.runner.batches for n, _ in batch) <= 8
    assert answer.text != "c" or answer.counts.forced_tokens == 0


def test_no_more_than_max_running_requests_run():
    harness = Harness(max_running_requests=3)
    harness.run(*[command(f"r{i}", [1 + i, 2], max_new_tokens=5, ignore_eos=True) for i in range(10)])
    assert max(len(batch) for batch in harness.runner.batches) == 3


@pytest.mark.parametrize(("pool", "together"), [(79, 1), (80, 2)])
def test_admission_leaves_room_for_what_running_requests_will_need(pool, together):
    """Both have 20 tokens and b ends after 20 more: the peak is 2 x 40 tokens, though 90 are to come in all."""
    harness = Harness(pool=pool, output_share_start=1.0, output_share_floor=1.0)
    a = command("a", numbers(20), max_new_tokens=50, ignore_eos=True)
    b = command("b", numbers(20, 3), max_new_tokens=20, ignore_eos=True)
    harness.scheduler.add([a, b])
    harness.step()
    assert len(harness.scheduler.roster.running) == together
    harness.run()
    assert harness.scheduler.counters.retractions == 0


def test_what_a_step_shares_counts_once_in_admission():
    """Forty shared tokens, and fifteen each of their own: 40 + 2 x 15 fit exactly."""
    for pool, together in [(70, 2), (69, 1)]:
        harness = Harness(pool=pool, output_share_start=1.0, output_share_floor=1.0)
        requests = [
            command(f"r{i}", [*numbers(40), *[1 + i] * 5], max_new_tokens=10, ignore_eos=True)
            for i in range(2)
        ]
        harness.scheduler.add(requests)
        harness.step()
        assert len(harness.scheduler.roster.running) == together
        harness.run()


# ---- order -----------------------------------------------------------------------------------------------


def admission_order(harness: Harness) -> list[str]:
    seen: list[str] = []
    while harness.scheduler.has_work():
        harness.step()
        seen += [request.rid for request in harness.scheduler.roster.running if request.rid not in seen]
        seen += [rid for rid in harness.outputs if rid not in seen]
    return seen


def one_at_a_time(policy: str, **config) -> Harness:
    harness = Harness(pool=1000, max_running_requests=1, policy=policy, **config)
    harness.run(command("warm", numbers(50), max_new_tokens=0))
    harness.outputs.clear()
    return harness


def test_lpm_serves_the_best_match_first_and_fcfs_the_oldest():
    requests = [
        command("cold", numbers(20, 9)),
        command("some", [*numbers(20), 5]),
        command("most", [*numbers(45), 5]),
    ]
    for policy, expected in [("lpm", ["most", "some", "cold"]), ("fcfs", ["cold", "some", "most"])]:
        harness = one_at_a_time(policy)
        harness.scheduler.add(requests)
        assert admission_order(harness) == expected


def test_ageing_bounds_how_long_a_cold_request_is_overtaken():
    harness = one_at_a_time("lpm", max_overtake_s=10.0, max_lag_s=100.0)
    harness.scheduler.add([command("cold", numbers(20, 9), max_new_tokens=1)])
    overtaken_at = []
    for second in range(30):
        harness.scheduler.add([command(f"warm{second}", [*numbers(45), 1 + second % 26], max_new_tokens=1)])
        harness.step()
        overtaken_at.append("cold" not in harness.outputs)
        harness.clock.now += 1
    assert overtaken_at == [True] * 10 + [False] * 20


def test_who_lags_behind_half_of_the_queue_is_next():
    """One cold request and two better ones each second, of which one is served: these pass it until half of the queue
    came three seconds later."""
    harness = one_at_a_time("lpm", max_overtake_s=100.0, max_lag_s=3.0)
    harness.scheduler.add([command("cold", numbers(20, 9), max_new_tokens=1)])
    lags = []
    while "cold" not in harness.outputs:
        warm = [command(f"warm{len(lags)}.{n}", numbers(45 - n), max_new_tokens=1) for n in range(2)]
        harness.scheduler.add(warm)
        arrivals = sorted(request.arrival for request in harness.scheduler.roster.waiting)
        lags.append(arrivals[len(arrivals) // 2] - arrivals[0])
        harness.step()
        harness.clock.now += 1
    assert len(lags) > 3
    assert max(lags[:-1]) < 3.0 <= lags[-1]


def test_a_batch_that_came_at_once_is_served_as_the_policy_says():
    """However long it takes: nobody lags behind the others. With arrivals a second apart the oldest comes first."""
    for apart, first in [(0.0, "warm"), (1.0, "cold")]:
        harness = one_at_a_time("lpm", max_overtake_s=100.0, max_lag_s=3.0)
        for n in range(8):
            prompt = [*numbers(45), n] if n % 2 else numbers(20, 9 + n)
            harness.scheduler.add([command(f"{'warm' if n % 2 else 'cold'}{n}", prompt, max_new_tokens=1)])
            harness.clock.now += apart
        harness.clock.now += 20
        assert admission_order(harness)[0].startswith(first)


def test_priorities_come_first():
    harness = one_at_a_time("lpm")
    harness.scheduler.add(
        [command("low", numbers(45), priority=0), command("high", numbers(9, 9), priority=5)]
    )
    assert admission_order(harness) == ["high", "low"]


def test_the_policy_can_be_switched_while_running():
    harness = one_at_a_time("lpm")
    harness.scheduler.add([command("cold", numbers(20, 9)), command("some", [*numbers(20), 5])])
    harness.scheduler.set_policy("fcfs")
    assert admission_order(harness) == ["cold", "some"]
    assert harness.scheduler.stats()["policy"] == "fcfs"
    with pytest.raises(InvalidRequestError, match="unknown policy"):
        harness.scheduler.set_policy("nonsense")


def test_beyond_the_window_requests_keep_the_order_of_arrival():
    harness = one_at_a_time("lpm", policy_window=2)
    harness.scheduler.add(
        [command("a", numbers(9, 9)), command("b", [*numbers(20), 5]), command("c", [*numbers(45), 5])]
    )
    assert admission_order(harness) == ["b", "c", "a"]


# ---- numbers ---------------------------------------------------------------------------------------------


def test_stats_describe_the_pool_completely():
    harness = Harness(pool=100)
    harness.scheduler.add([command("r", ids("abcdefgh"), max_new_tokens=10, ignore_eos=True)])
    for _ in range(4):
        harness.step()
        stats = harness.scheduler.stats()
        books = ("free_tokens", "evictable_tokens", "protected_tokens", "private_tokens")
        assert sum(stats[name] for name in books) == stats["pool_tokens"] == 100
    assert stats["running_requests"] == 1
    assert stats["protected_tokens"] == 8
    assert stats["private_tokens"] == 3
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats["requests"], stats["finished"], stats["sampled_tokens"]) == (1, 1, 10)
    assert stats["forward_passes"] == 10
    assert stats["cache"]["tokens"] == 17


def test_the_snapshot_shows_the_tree():
    harness = Harness()
    harness.run(command("r", "abcdefgh", max_new_tokens=0))
    harness.clock.now = 5.0
    tree = harness.scheduler.cache_snapshot(limit=10, edge_tokens=3)
    assert (tree["nodes"], tree["tokens"]) == (1, 8)
    (node,) = tree["shown"]
    assert node["token_ids"] == ids("abc")
    assert (node["length"], node["locks"], node["idle_s"], node["age_s"]) == (8, 0, 5.0, 5.0)


def test_the_snapshot_keeps_the_names_and_the_texts_of_namespaces_to_itself():
    harness = Harness()
    salts = ["sesame", "sesame seed"]
    harness.run(*[command(salt, "abcdefgh", max_new_tokens=0, namespace=salt) for salt in salts])
    harness.run(command("open", "abcdefgh", max_new_tokens=0))
    tree = harness.scheduler.cache_snapshot(limit=10, edge_tokens=3)
    labels = {node["namespace"]: node["token_ids"] for node in tree["shown"]}
    assert len(labels) == 3
    assert labels.pop("") == ids("abc")
    assert set(labels.values()) == {None}
    assert "sesame" not in str(tree)
    one = next(iter(labels))
    only = harness.scheduler.cache_snapshot(limit=10, edge_tokens=3, namespace=one)
    assert [node["namespace"] for node in only["shown"]] == [one]
    other = Harness().scheduler._cache_view
    assert other.label("sesame") not in labels, "another process, another key"


def test_the_last_request_ends_with_length_when_nothing_can_give_way(caplog):
    """Slots that nobody owns (a defect) are taken from the pool, so that what admission promised is not there."""
    harness = Harness(pool=30)
    harness.scheduler.add([command("r", "abcdef", max_new_tokens=20, ignore_eos=True)])
    harness.step()
    assert harness.scheduler.memory.pool.alloc(20) is not None
    while harness.scheduler.has_work():
        for output in harness.scheduler.step():
            harness.outputs.setdefault("r", []).append(output)
    answer = harness.answer("r")
    assert answer.finish.type == "length"
    assert len(answer.token_ids) == 5
    assert "slot books" in caplog.text
    assert harness.scheduler.counters.drifts == 1
