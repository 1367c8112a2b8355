"""In which order waiting requests are admitted: each policy, what all of them owe, and how to bring one's own."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_fakes import Harness, assert_as_alone, command

from trellis.errors import InvalidRequestError
from trellis.runtime.scheduler import POLICIES, Policy, QueueView
from trellis.runtime.scheduler.lineup import AGED_EVERY
from trellis.runtime.scheduler.policy import find_policy, load_policy, order

reverse = Policy(lambda queue: np.arange(len(queue))[::-1])
broken = Policy(lambda queue: np.zeros(len(queue), np.intp))
not_a_policy = 7


def queue(waited, cached=None, priority=None, paths=None, prompt=None, output=None, seed=0, numbers=None):
    n = len(waited)
    output = np.array(output or [10] * n, np.int64)
    return QueueView(
        number=np.array(numbers or list(range(n)), np.int64),
        waited_s=np.array(waited, np.float64),
        prompt_tokens=np.array(prompt or [100] * n, np.int64),
        cached_tokens=np.array(cached or [0] * n, np.int64),
        path=paths or [()] * n,
        max_new_tokens=output,
        expected_tokens=output // 2,
        priority=np.array(priority or [0] * n, np.int64),
        seed=seed,
    )


def rows(name: str, view: QueueView) -> list[int]:
    return POLICIES[name].order(view).tolist()


# ---- each policy -----------------------------------------------------------------------------------------


def test_fcfs_is_the_order_of_arrival():
    assert rows("fcfs", queue([3, 2, 1], [0, 50, 90])) == [0, 1, 2]


def test_lpm_takes_the_longest_match_first_and_of_equals_the_oldest():
    assert rows("lpm", queue([4, 3, 2, 1], [10, 50, 10, 90])) == [3, 1, 0, 2]


def test_lof_takes_the_longest_output_first_and_of_equals_the_oldest():
    assert rows("lof", queue([4, 3, 2, 1], output=[10, 50, 10, 90])) == [3, 1, 0, 2]


def test_dfs_weight_keeps_subtrees_together_heavy_ones_first_and_deep_requests_before_shallow_ones():
    paths = [(), (0,), (1,), (1, 2), (0, 3), (1, 2), ()]
    assert rows("dfs-weight", queue([0] * 7, paths=paths)) == [3, 5, 2, 4, 1, 0, 6]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=14))
def test_dfs_weight_visits_every_subtree_once(prefixes):
    """No request of another subtree comes between two of the same one, at any depth."""
    nodes: dict[tuple[int, ...], int] = {}
    paths = [
        [nodes.setdefault(tuple(prefix[:k]), len(nodes)) for k in range(1, len(prefix) + 1)]
        for prefix in prefixes
    ]
    visited = [paths[row] for row in rows("dfs-weight", queue([0] * len(paths), paths=paths))]
    weight = Counter(node for path in paths for node in path)
    for node in weight:
        at = [k for k, path in enumerate(visited) if node in path]
        assert at[-1] - at[0] + 1 == len(at) == weight[node]


def test_random_is_a_shuffle_that_depends_on_the_seed_and_the_request_alone():
    whole = rows("random", queue([0] * 50, seed=3))
    assert whole == rows("random", queue([9] * 50, seed=3)) != rows("random", queue([0] * 50, seed=4))
    assert sorted(whole) == list(range(50)) != whole
    later = [number for number in range(50) if number % 3]  # the others have been admitted meanwhile
    assert [later[row] for row in rows("random", queue([0] * len(later), numbers=later, seed=3))] == [
        number for number in whole if number % 3
    ]


def test_hrrn_takes_short_work_first_until_long_work_has_waited_in_proportion():
    sizes = {"prompt": [100, 100, 100], "cached": [0, 80, 0], "output": [20, 20, 220]}  # work: 110, 30, 210
    assert rows("hrrn", queue([0, 0, 0], **sizes)) == [1, 0, 2]
    assert rows("hrrn", queue([9, 2, 1], **sizes)) == [0, 1, 2]
    assert rows("hrrn", queue([4, 1, 9], **sizes)) == [2, 0, 1]


# ---- what all of them owe --------------------------------------------------------------------------------


def test_priority_comes_before_the_policy():
    view = queue([30, 3, 30, 1], [0, 50, 10, 90], priority=[0, 1, 0, 1])
    assert order(POLICIES["lpm"], view).tolist() == [3, 1, 2, 0]


@st.composite
def views(draw):
    n = draw(st.integers(0, 16))
    numbers = st.lists(st.integers(0, 30), min_size=n, max_size=n)
    paths = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=n, max_size=n))
    ranked = sorted(zip(draw(numbers), draw(numbers), strict=True), key=lambda each: (-each[0] % 3, -each[1]))
    return queue(
        [waited for _, waited in ranked],
        draw(numbers),
        [priority % 3 for priority, _ in ranked],
        paths=paths,
        output=draw(numbers),
    )


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(view=views())
def test_every_policy_orders_every_request_once_by_priority(name, view):
    placed = order(POLICIES[name], view)
    assert sorted(placed.tolist()) == list(range(len(view)))
    assert (np.diff(view.priority[placed]) <= 0).all()


@pytest.mark.parametrize("bad", [[0, 0], [0], [0, 2], [-1, 0]])
def test_an_order_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="did not order 2 requests"):
        order(Policy(lambda _: np.array(bad)), queue([0, 0]))


class Stream:
    """Requests that match a warm prefix better than one cold request, for ever, and one place to run in."""

    def __init__(self, policy: str, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.prefix = [self.rng.randint(1, 26) for _ in range(40)]
        self.harness = Harness(
            pool=400, max_running_requests=2, policy=policy, max_overtake_s=10.0, policy_window=8
        )
        self.harness.run(command("warm", self.prefix, max_new_tokens=0))
        self.running: set[str] = set()

    def better(self, name: str) -> None:
        length = self.rng.randint(35, 40)
        output = self.rng.choice([1, 4])
        self.harness.scheduler.add([command(name, [*self.prefix[:length], 1], max_new_tokens=output)])

    def step(self) -> list[str]:
        """The requests that were admitted in this step, in order."""
        before = {request.rid for request in self.harness.scheduler.roster.waiting}
        self.harness.step()
        self.harness.clock.now += 1
        after = {request.rid for request in self.harness.scheduler.roster.waiting}
        return sorted(before - after)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("k", [1, 3])
def test_the_kth_oldest_is_overtaken_by_fewer_than_four_k_once_it_has_waited_too_long(name, k):
    """Whatever comes: better matches, shorter prompts, longer outputs, for ever."""
    stream = Stream(name)
    cold = [command(f"cold{i}", [26 - i] * 60, max_new_tokens=2) for i in range(k)]
    stream.harness.scheduler.add(cold)
    overtaken, before, last = 0, 0, f"cold{k - 1}"
    for second in range(120):
        for n in range(3):
            stream.better(f"younger{second:03}.{n}")
        admitted = stream.step()
        younger = sum(rid.startswith("younger") for rid in admitted)
        if last in admitted:
            break
        overtaken += younger if second >= 10 else 0
        before += younger if second < 10 else 0
    else:
        pytest.fail("it was never admitted")
    assert overtaken < k * AGED_EVERY
    if name == "lpm":
        assert before > 0, "the stream is no better than the cold request: this proves nothing"


def test_a_request_beyond_the_window_is_reached():
    """The window holds the oldest: younger ones come into it only when less than eight are older."""
    stream = Stream("lpm")
    for i in range(30):
        stream.better(f"older{i:02}")
    stream.harness.scheduler.add([command("cold", [26] * 60, max_new_tokens=2)])
    admitted: list[str] = []
    for second in range(200):
        stream.better(f"younger{second}")
        admitted += stream.step()
        if "cold" in admitted:
            break
    else:
        pytest.fail("it was never admitted")
    assert len([rid for rid in admitted if rid.startswith("younger")]) < 8 * AGED_EVERY


def test_a_high_priority_is_seen_however_long_the_queue():
    harness = Harness(pool=400, max_running_requests=1, policy_window=4)
    harness.scheduler.add([command(f"r{i:02}", [1 + i, 2], max_new_tokens=2) for i in range(20)])
    harness.step()
    harness.scheduler.add([command("high", [5, 5], priority=3, max_new_tokens=2)])
    while "high" not in harness.outputs:
        harness.step()
    assert len(harness.scheduler.roster.waiting) >= 17


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000))
def test_every_policy_serves_everything_exactly(name, seed):
    rng = random.Random(seed)
    harness = Harness(pool=120, policy=name, chunked_prefill_size=16, max_running_requests=4, policy_window=5)
    families = [[rng.randint(1, 26) for _ in range(30)] for _ in range(3)]
    requests = [
        command(
            f"r{i}",
            [*rng.choice(families)[: rng.randint(1, 30)], rng.randint(1, 26)],
            max_new_tokens=rng.randint(1, 9),
        )
        for i in range(14)
    ]
    harness.run(*requests)
    for request in requests:
        assert_as_alone(harness, request)


def test_groups_with_a_common_new_prefix_are_admitted_together():
    """Cold requests of five families come interleaved, and the pool holds two families: each prefix is computed
    once, as the first of a family draws the others after it."""
    rng = random.Random(1)
    families = [[rng.randint(1, 26) for _ in range(60)] for _ in range(5)]
    requests = [
        command(f"{k}.{i}", [*families[k], 1 + i, 2], max_new_tokens=2, ignore_eos=True)
        for i in range(6)
        for k in range(5)
    ]
    harness = Harness(pool=150, policy="lpm", chunked_prefill_size=70, policy_window=64)
    harness.run(*requests)
    assert harness.scheduler.counters.computed_prompt_tokens <= 5 * 60 + 30 * 2


# ---- one's own -------------------------------------------------------------------------------------------


def test_an_unknown_policy_names_those_there_are():
    with pytest.raises(InvalidRequestError, match=r"'best'.*dfs-weight, fcfs, hrrn, lof, lpm, random"):
        find_policy("best")


def test_a_policy_of_ones_own_is_named_by_module_and_attribute():
    assert load_policy(f"{__name__}:reverse") is reverse
    harness = Harness(policy=f"{__name__}:reverse", max_running_requests=1)
    harness.scheduler.add([command(rid, [1, 2], max_new_tokens=1) for rid in "abc"])
    assert [harness.step()[0].rid for _ in range(3)] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:x", "no_such_module"),
        (f"{__name__}:missing", "missing"),
        (f"{__name__}:not_a_policy", "is a int"),
        (":x", "imported"),
        ("luck", "unknown policy"),
    ],
)
def test_what_is_no_policy_is_refused(name, says):
    with pytest.raises(InvalidRequestError, match=says):
        load_policy(name)


def test_a_client_can_switch_to_the_policy_of_the_start_but_not_import_another():
    harness = Harness(policy=f"{__name__}:reverse")
    harness.scheduler.set_policy("fcfs")
    harness.scheduler.set_policy(f"{__name__}:reverse")
    assert harness.scheduler.stats()["policy"] == f"{__name__}:reverse"
    with pytest.raises(InvalidRequestError, match="unknown policy"):
        harness.scheduler.set_policy(f"{__name__}:broken")


def test_a_policy_that_fails_costs_its_order_and_nothing_else(caplog):
    harness = Harness(policy=f"{__name__}:broken", max_running_requests=1)
    harness.scheduler.add([command(rid, [1, 2], max_new_tokens=1) for rid in "abc"])
    assert [harness.step()[0].rid for _ in range(3)] == ["a", "b", "c"]
    assert caplog.text.count("policy failed") == 1  # in three steps


def test_a_policy_can_not_touch_priorities():
    def equal_rights(view):
        view.priority[:] = 0
        return np.arange(len(view))[::-1]

    assert order(Policy(equal_rights), queue([3, 2, 1], priority=[5, 5, 1])).tolist() == [1, 0, 2]
