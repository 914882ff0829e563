"""Traces like another one: what is kept of it, what is made of that, and how near LRU's curves are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from lab_traces import chats, tokens

from radix_cache.errors import InvalidArgument
from radix_cache.lab import (
    Likeness,
    Request,
    TraceSource,
    lru_curve,
    read_profile,
    read_trace,
    resample,
    sweep,
)
from radix_cache.lab.likeness import Chat, Turn
from radix_cache.lab.sweep import plan_sweep
from radix_cache.lab.writing import as_line
from radix_cache.tokens import pack_tokens, unpack_tokens

LAB = (Path(__file__).parent.parent / "docs" / "lab.md").read_text(encoding="utf-8")


def asked(at_ms: float, conversation: str, ids: list[int]) -> Request:
    """A request for blocks of ten tokens, which is answered with three."""
    return Request(at_ms, 10 * len(ids) - 1, 3, pack_tokens(ids), tokens_per_id=10, conversation=conversation)


SMALL = [
    asked(0, "acme", [7001, 7002, 7003]),
    asked(100, "bolt", [7001, 7002, 7004]),  # shares two blocks with the first one
    asked(250, "acme", [7001, 7002, 7003, 7005]),
    asked(400, "acme", [7001, 7009]),  # goes back to its first block
    asked(450, "cord", [7001, 7002, 7004, 7006]),  # 7004 was last used at 100, 7002 at 250, 7001 at 400
    asked(500, "acme", [7001, 7002, 7003, 7005, 7007]),  # goes on where it was two requests ago
]


def test_what_is_kept_of_a_trace() -> None:
    acme = (Turn(0, 0, 0, 3, 29, 3), Turn(250, 1, 3, 4, 39, 3), Turn(150, 1, 1, 2, 19, 3), Turn(100, 2, 4, 5, 49, 3))
    assert Likeness.of(SMALL).chats == (
        Chat(100, 0, 0, 0, 0, "", acme),
        Chat(350, 100, 0, 1, 1, "", (Turn(0, 0, 2, 3, 29, 3),)),
        Chat(50, 350, 2, 0, 1, "", (Turn(0, 0, 3, 4, 39, 3),)),
    )


def test_there_is_nothing_else_in_it() -> None:
    written = json.dumps(Likeness.of(SMALL).as_dict())
    assert not any(word in written for word in ("acme", "bolt", "700"))


def test_conversations_stay_whole() -> None:
    """All come before one comes again, each with the lengths and waits of its requests."""
    likeness = Likeness.of(chats(3))
    made = list(resample(replace(likeness, num_requests=3 * likeness.num_requests), 1))
    assert [request.timestamp_ms for request in made] == sorted(request.timestamp_ms for request in made)
    for number in (0, 1):
        numbers = range(number * len(likeness.chats), (number + 1) * len(likeness.chats))
        found = [[r for r in made if r.conversation == str(number)] for number in numbers]
        assert [[r.turn for r in turns] for turns in found] == [list(range(1, len(turns) + 1)) for turns in found]
        expected = Counter(tuple((turn.wait_ms, *turn[3:]) for turn in chat.turns) for chat in likeness.chats)
        assert Counter(map(shape, found)) == expected


def shape(turns: list[Request]) -> tuple[Any, ...]:
    """Waits and lengths of a conversation's requests."""
    times = [turns[0].timestamp_ms, *(turn.timestamp_ms for turn in turns)]
    waits = [later - earlier for earlier, later in pairwise(times)]
    sizes = [(r.num_ids, r.num_prompt_tokens, r.num_output_tokens) for r in turns]
    return tuple((wait, *size) for wait, size in zip(waits, sizes, strict=True))


def test_a_seed_is_a_trace() -> None:
    likeness = Likeness.of(chats(3))
    assert list(resample(likeness, 1)) == list(resample(likeness, 1)) != list(resample(likeness, 2))


def test_longer_and_shorter() -> None:
    """After the last conversation they come again, with new blocks."""
    likeness = Likeness.of(SMALL)
    assert len(list(resample(replace(likeness, num_requests=4)))) == 4
    made = list(resample(replace(likeness, num_requests=60)))
    assert len(made) == 60
    assert len({request.conversation for request in made}) >= 30
    assert lru_curve(made).num_blocks > 5 * lru_curve(SMALL).num_blocks
    assert "".join(map(as_line, made)).count('"turn":4') == 10


def test_one_conversation_is_repeated_exactly() -> None:
    alone = [asked(0, "a", [1, 2]), asked(50, "a", [1, 2, 3]), asked(80, "a", [1, 2, 3, 4])]
    made = list(resample(Likeness.of(alone)))
    assert [(r.timestamp_ms, unpack_tokens(r.prompt).tolist()) for r in made] == [
        (0, [0, 1]),
        (50, [0, 1, 2]),
        (80, [0, 1, 2, 3]),
    ]


def test_token_ids_become_blocks() -> None:
    likeness = Likeness.of([tokens([1, 2, 3, 4, 5]), tokens([1, 2, 9])], block_size=2)
    made = list(resample(likeness))
    assert [(r.tokens_per_id, r.num_prompt_tokens, r.num_ids) for r in made] == [(2, 5, 2), (2, 3, 1)]


def test_two_requests_at_least() -> None:
    with pytest.raises(InvalidArgument, match="two requests or more, not 1"):
        Likeness.of([tokens([1])])


PUBLIC = ["conversation_trace", "synthetic_trace", "mooncake_arxiv_1000", "lmcache_agent_16"]


@pytest.mark.parametrize("name", PUBLIC)
def test_curves_are_near_those_of_public_traces(traces: Path, name: str) -> None:
    """LRU's block hit rates at 400 shares of the different blocks of each, and those that docs/lab.md shows."""
    real = list(read_trace(traces / f"{name}.jsonl.gz"))
    made = list(resample(Likeness.of(real)))
    assert len(made) == len(real)
    curves = [lru_curve(requests) for requests in (real, made)]

    def rates(share: int) -> list[float]:
        """At a share in 400th."""
        return [curve.whole.at(max(curve.num_blocks * share // 400, 1)).block_hit_rate or 0 for curve in curves]

    assert max(abs(theirs - ours) for theirs, ours in map(rates, range(1, 401))) < 0.03
    cells = [" / ".join(f"{100 * rate:.1f}" for rate in rates(4 * percent)) for percent in (1, 2, 5, 10, 20, 50, 100)]
    assert f"| {name} | {' | '.join(cells)} |\n" in LAB


def written(tmp_path: Path, change: Callable[[dict[str, Any]], object] = lambda saved: None) -> Path:
    saved = json.loads(json.dumps(Likeness.of(SMALL).as_dict()))
    change(saved)
    path = tmp_path / "like.json"
    path.write_text(json.dumps(saved))
    return path


def test_it_is_written_and_read(tmp_path: Path) -> None:
    assert read_profile(written(tmp_path)) == Likeness.of(SMALL)


def test_it_is_a_trace_in_sweeps(tmp_path: Path) -> None:
    jobs = plan_sweep([TraceSource(str(written(tmp_path)))], ["lru"], ["5"], seeds=[1, 2])
    assert [row["num_requests"] for row in sweep(jobs)] == [6, 6]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda saved: saved.update(num_requests=0), "num_requests"),
        (lambda saved: saved.update(tokens_per_block=1.5), "tokens_per_block"),
        (lambda saved: saved.update(conversations=[]), "one conversation or more"),
        (lambda saved: saved.update(conversations=3), "is no profile"),
        (lambda saved: saved.pop("num_requests"), "is no profile"),
        (lambda saved: saved["conversations"][0].pop(), "is no profile"),
        (lambda saved: saved["conversations"][1].__setitem__(0, -1), "conversation 1 has -1"),
        (lambda saved: saved["conversations"][1].__setitem__(2, 0.5), "conversation 1 has 0.5"),
        (lambda saved: saved["conversations"][1].__setitem__(6, []), "one request or more"),
        (lambda saved: saved["conversations"][0][6][1].__setitem__(0, "x"), "request 1 of conversation 0 has 'x'"),
        (lambda saved: saved["conversations"][0][6][1].__setitem__(1, 2), "keeps 3 of 4 blocks, of 2 requests ago"),
        (lambda saved: saved["conversations"][0][6][1].__setitem__(2, 9), "keeps 9 of 4 blocks"),
    ],
)
def test_bad_files(tmp_path: Path, change: Callable[[dict[str, Any]], object], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        read_profile(written(tmp_path, change))
