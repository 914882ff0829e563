"""The tree's policies against implementations by others: SGLang's eight, and libCacheSim's flat ones.

Both run live where ``make bench-peers`` put them; what they answered is also kept here, and ours is held to that
everywhere. kvcache-simulator, for LRU and the optimum, is in test_lab_optimal.py; docs/experiments.md has the table.
"""

from __future__ import annotations

import json
import random
import subprocess
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from radix_cache import Hints, RadixTree

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"

Step = list[Any]


def ask(package: str, module: str, question: Any) -> Any:
    """Return what ``module`` answers, run where the peers are; skip where they are not."""
    if not list((PYTHON.parent.parent / "lib").glob(f"python*/site-packages/{package}/__init__.py")):
        pytest.skip(f"{package} is not installed: make bench-peers")
    command = [PYTHON, "-m", f"tests.{module}"]
    run = subprocess.run(command, cwd=ROOT, input=json.dumps(question), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


# SGLang.

SGLANG = ["lru", "lfu", "fifo", "filo", "mru", "slru", "priority", "tlru"]


def ours(policy: str, parameters: dict[str, int], steps: list[Step]) -> list[list[int]]:
    """Return what each eviction frees; blocks are of one token, and numbered as they come, from 1."""
    tree = RadixTree(1, ":".join([policy, ",".join(f"{OURS[name]}={value}" for name, value in parameters.items())]))
    freed, num_blocks = [], 0
    for verb, *arguments in steps:
        if verb == "evict":
            freed.append(list(tree.evict(min(arguments[0], tree.num_evictable_blocks))))
        elif verb == "match":
            tree.release(tree.match_prefix(arguments[0]))
        else:
            tokens, priority = arguments
            hints = Hints(priority=priority)
            with tree.match_prefix(tokens, hints=hints) as match:
                num_new = len(tokens) - len(match.block_ids)
                new = range(num_blocks + 1, num_blocks + num_new + 1)
                tree.insert(tokens, [*match.block_ids, *new], hints=hints)
            num_blocks += num_new
    return freed


OURS = {
    "protected_threshold": "protected_hits",
    "threshold": "threshold",
    "next_prompt_estimate": "next_prompt_tokens",
}
PARAMETERS = {
    "slru": {"protected_threshold": 3},
    "tlru": {"threshold": 2, "next_prompt_estimate": 1},
}


def drawn(policy: str, seed: int) -> tuple[str, dict[str, int], list[Step]]:
    """A script over three tokens. Prompts come token by token, so a node is one block there, too, and none is cut."""
    draw = random.Random(seed)
    parameters = {name: draw.randint(1, 5) for name in PARAMETERS.get(policy, {})}
    steps: list[Step] = []
    prompts: list[list[int]] = []
    for _ in range(50):
        kind = draw.random()
        if kind < 0.6 or not prompts:
            prompts.append([draw.randint(1, 3) for _ in range(draw.randint(1, 5))])
            priority = draw.randint(0, 3) if policy == "priority" else 0
            steps += [["insert", list(prompts[-1][: stop + 1]), priority] for stop in range(len(prompts[-1]))]
        elif kind < 0.8:
            steps.append(["match", draw.choice(prompts)])
        else:
            steps.append(["evict", draw.randint(1, 4)])
    return policy, parameters, [*steps, ["evict", 1000]]


# 1, 2, 3 is a conversation that branches after 2 into 4; 5 is another, 6 and 7 a third.
STEPS: list[Step] = [
    ["insert", [1], 1],
    ["insert", [1, 2], 1],
    ["insert", [1, 2, 3], 1],
    ["insert", [1, 2, 4], 0],
    ["insert", [5], 2],
    ["insert", [6], 0],
    ["insert", [6, 7], 0],
    ["insert", [1, 2, 3], 0],
    ["match", [5]],
    ["evict", 2],
    ["insert", [8], 0],
    ["evict", 100],
]

# By hand. Last touched: 4, then 6 and 7, then 1 to 3, 5, 8. Inserted 5, 4, 2, 1, 1, 2, 1, 1 times.
FREED = {
    "lru": [[4, 7], [6, 3, 2, 1, 5, 8]],
    "lfu": [[4, 7], [5, 8, 6, 3, 2, 1]],
    "fifo": [[3, 4], [2, 1, 5, 7, 6, 8]],
    "filo": [[7, 6], [8, 5, 4, 3, 2, 1]],
    "mru": [[5, 3], [8, 7, 6, 4, 2, 1]],
    "slru": [[4, 7], [6, 3, 5, 8, 2, 1]],  # 1 and 2 are protected: they have three hits
    "priority": [[4, 7], [6, 8, 3, 2, 1, 5]],  # 1 to 3 have 1, 5 has 2, the others 0
    "tlru": [[4, 7], [3, 5, 8, 6, 2, 1]],  # of L blocks L + 1 - 2 are kept: all but the last
}


@pytest.mark.parametrize("policy", SGLANG)
def test_orders_by_hand(policy: str) -> None:
    assert ours(policy, PARAMETERS.get(policy, {}), STEPS) == FREED[policy]


CUT: list[Step] = [["insert", [1, 2], 0], ["insert", [3, 4], 0], ["insert", [1], 0], ["evict", 1], ["evict", 1]]


def test_a_cut_is_no_use() -> None:
    """A request that ends within a node does not use the rest of it, which goes first."""
    assert ours("lru", {}, CUT) == [[2], [4]]


def test_sglang_evicts_the_same_in_the_same_order() -> None:
    """In the scripts drawn and by hand; not in the last one, where the rest of a node that is cut counts as used there,
    and a leaf goes whole.
    """
    drawn_ones = [drawn(policy, seed) for policy in SGLANG for seed in range(20)]
    by_hand = [(policy, PARAMETERS.get(policy, {}), STEPS) for policy in SGLANG]
    *theirs, cut = ask("sglang", "sglang_orders", [*drawn_ones, *by_hand, ("lru", {}, CUT)])
    for script, freed in zip(drawn_ones, theirs[: len(drawn_ones)], strict=True):
        assert ours(*script) == freed, script[:2]
    assert theirs[len(drawn_ones) :] == list(FREED.values())
    assert cut == [[3, 4], [2]]


# libCacheSim: prompts of one block.

CAPACITY = 60


def uses() -> list[int]:
    """5,000 uses of 1,000 objects, by Zipf's law."""
    weights = list(accumulate(1 / rank for rank in range(1, 1001)))
    return random.Random(1).choices(range(1, 1001), cum_weights=weights, k=5000)


def hits_of_ours(policy: str, uses: list[int], capacity: int, *, evicts_last: bool = False) -> str:
    """Return a digit for each use: whether it was a hit. Blocks are evicted for what comes, or after it came."""
    tree, free, digits = RadixTree(1, policy), list(range(capacity + evicts_last)), []
    hints = Hints(cost_s=1.0)
    for use in uses:
        with tree.match_prefix([use]) as match:
            digits.append("01"[len(match.block_ids)])
            if not match.block_ids and not free:
                free += tree.evict(1)
            tree.insert([use], match.block_ids or [free.pop()], hints=hints)
        if evicts_last and not free:
            free += tree.evict(1)
    return "".join(digits)


def hits_of_their_lfuda(uses: list[int], capacity: int) -> str:
    """LFUDA as libCacheSim has it: a use adds the age to P; by the published rule P is the age plus the number of uses.

    And where nothing of P = age is left, the age goes on to the next P, before anything of that is evicted.
    """
    scores: dict[int, int] = {}  # in the order of last use
    age = highest = 0
    digits = []
    for use in uses:
        is_hit = use in scores
        digits.append("01"[is_hit])
        if is_hit:
            gone = scores.pop(use)
            new = gone + age
            highest = max(highest, new)
        elif len(scores) == capacity:
            gone = age = scores.pop(min(scores, key=lambda one: scores[one]))
        else:
            gone = -1
        if gone == age and gone not in scores.values():
            age = min((score for score in scores.values() if age < score <= highest), default=age)
        scores[use] = new if is_hit else age + 1
    return "".join(digits)


PAIRS = [("lru", "LRU"), ("fifo", "FIFO"), ("lfu", "LFU"), ("lfu-da", "GDSF"), ("pgdsf", "GDSF")]
NUM_HITS = {"LRU": 2441, "FIFO": 2155, "LFU": 2828, "GDSF": 2735, "LFUDA": 2875}


@pytest.mark.parametrize(("policy", "theirs"), PAIRS)
def test_hits_that_libcachesim_had(policy: str, theirs: str) -> None:
    """Greedy dual-size frequency on objects of one size and cost is LFU-DA; there, what comes is let in first."""
    found = hits_of_ours(policy, uses(), CAPACITY, evicts_last=theirs == "GDSF")
    assert found.count("1") == NUM_HITS[theirs]


def test_libcachesim_hits_at_the_same_uses() -> None:
    answers = ask("libcachesim", "libcachesim_hits", [list(NUM_HITS), CAPACITY, uses()])
    theirs = dict(zip(NUM_HITS, answers, strict=True))
    assert {name: found.count("1") for name, found in theirs.items()} == NUM_HITS
    for policy, name in PAIRS:
        assert hits_of_ours(policy, uses(), CAPACITY, evicts_last=name == "GDSF") == theirs[name], policy
    assert hits_of_their_lfuda(uses(), CAPACITY) == theirs["LFUDA"]


def test_libcachesim_s_lfuda_explains_its_hits() -> None:
    assert hits_of_their_lfuda(uses(), CAPACITY).count("1") == NUM_HITS["LFUDA"]


THREE_TIMES = [1, 1, 1, 2, 3, 1]


def test_the_two_rules_for_one_name() -> None:
    """1 is used three times, 2 once, then 3 comes. The age is 0 as yet, so there P of 1 is what it came with."""
    assert hits_of_ours("lfu-da", THREE_TIMES, 2) == "011001", "P of 1 is 3, of 2 it is 1: 2 goes"
    assert hits_of_their_lfuda(THREE_TIMES, 2) == "011000", "both are 1, and 1 is older: 1 goes"


def test_libcachesim_has_the_other_one() -> None:
    assert ask("libcachesim", "libcachesim_hits", [["LFUDA"], 2, THREE_TIMES]) == ["011000"]
