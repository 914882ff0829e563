"""Traces that are made up, by seed, by knobs, and like a real one; and traces that are made anonymous."""

from __future__ import annotations

import io
import json
import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from helpers import Clock
from lab_traces import tokens

from radix_cache import PrefixCache
from radix_cache.errors import InvalidArgument
from radix_cache.lab import (
    Anonymizer,
    Profile,
    RecordingCache,
    Request,
    fit,
    lru_curve,
    read_profile,
    read_trace,
    synthesize,
    trace_info,
)
from radix_cache.lab.writing import as_line
from radix_cache.tokens import unpack_tokens

SMALL = Profile(num_requests=600, block_tokens=16, shared_tokens=300, first_tokens=200, turn_tokens=100)


def test_the_same_seed_makes_the_same_trace() -> None:
    assert list(synthesize(SMALL, 3)) == list(synthesize(SMALL, 3))
    assert list(synthesize(SMALL, 3)) != list(synthesize(SMALL, 4))


def test_requests_are_a_trace(tmp_path: Path) -> None:
    """In time order, each turn extends the one before, and what is written is read again."""
    requests = list(synthesize(replace(SMALL, agent_share=0.3)))
    assert len(requests) == 600
    assert [r.timestamp_ms for r in requests] == sorted(r.timestamp_ms for r in requests)
    latest: dict[str, Request] = {}
    for request in requests:
        before = latest.get(request.conversation)
        assert request.turn == (before.turn or 0) + 1 if before else request.turn == 1
        if before:
            num_whole = before.num_prompt_tokens // 16
            assert request.prompt[: 4 * num_whole] == before.prompt[: 4 * num_whole]
            assert request.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
        latest[request.conversation] = request
    assert {request.request_type for request in requests} == {"chat", "agent"}
    path = tmp_path / "made.jsonl"
    path.write_text("".join(map(as_line, requests)))
    assert list(read_trace(path)) == requests


@pytest.mark.parametrize(
    ("knob", "low", "high"),
    [("turns", 1.0, 6.0), ("shared_tokens", 0.0, 3000.0), ("popularity", 0.0, 3.0)],
)
def test_more_of_what_is_shared_means_more_hits(knob: str, low: float, high: float) -> None:
    few, many = (lru_curve(synthesize(replace(SMALL, **{knob: value}))) for value in (low, high))
    rates = [curve.whole.at(10**9).block_hit_rate or 0 for curve in (few, many)]
    assert rates[0] < rates[1]


def test_means_are_met() -> None:
    made = list(synthesize(replace(SMALL, num_requests=5_000, conversations_per_s=2.0, think_s=1.0)))
    info = trace_info(made)
    assert info.output_tokens.mean == pytest.approx(SMALL.answer_tokens, rel=0.1)
    assert info.turns.mean == pytest.approx(SMALL.turns, rel=0.15)
    assert info.num_conversations / info.seconds == pytest.approx(2.0, rel=0.1)


def test_a_profile_is_found_again() -> None:
    profile = replace(SMALL, num_requests=4_000, shared_prompts=5, think_s=5.0, answer_tokens_per_s=1e9)
    found = fit(list(synthesize(profile)))
    assert found.num_requests == 4_000
    assert found.block_tokens == 16
    assert found.shared_prompts == pytest.approx(5, abs=2)
    for knob in ("conversations_per_s", "turns", "turn_tokens", "answer_tokens", "think_s", "shared_tokens"):
        assert getattr(found, knob) == pytest.approx(getattr(profile, knob), rel=0.25), knob


def test_like_a_public_trace(traces: Path) -> None:
    real = list(islice(read_trace(traces / "conversation_trace.jsonl.gz"), 3_000))
    made = list(synthesize(fit(real)))
    ideal = [lru_curve(requests).whole.at(10**9).block_hit_rate or 0 for requests in (real, made)]
    assert ideal[1] == pytest.approx(ideal[0], abs=0.1)
    assert trace_info(made).prompt_tokens.mean == pytest.approx(trace_info(real).prompt_tokens.mean, rel=0.25)


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ('{"turns": 0.5}', "turns is a number of at least 1, not 0.5"),
        ('{"num_requests": 2.5}', "num_requests is an integer"),
        ('{"agent_share": 1.5}', "agent_share is at most 1"),
        ('{"think_s": Infinity}', "think_s is a number"),
        ('{"turn": 3}', "is no profile: .*turn"),
        ("[]", "is no profile"),
        ("{", "is no profile"),
    ],
)
def test_bad_profiles(tmp_path: Path, knobs: str, why: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(knobs)
    with pytest.raises(InvalidArgument, match=why):
        read_profile(path)


def test_a_profile_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(SMALL.as_dict()))
    assert read_profile(path) == SMALL


def test_two_requests_at_least() -> None:
    with pytest.raises(InvalidArgument, match="two requests or more, not 1"):
        fit([tokens([1])])


# Anonymous traces.


def words(seed: int, num_requests: int = 60) -> list[Request]:
    """Requests of token ids that share prefixes."""
    draw = random.Random(seed)
    base = [draw.randrange(50_000) for _ in range(400)]
    return [
        tokens(base[: draw.randrange(1, 300)] + [draw.randrange(50_000) for _ in range(draw.randrange(40))], [1, 2, 3])
        for _ in range(num_requests)
    ]


def test_hits_are_those_of_the_tokens() -> None:
    """All whole blocks keep their sharing; the ragged last one is a block more, which hits only if all is equal."""
    whole = [replace(r, prompt=r.prompt[: len(r.prompt) // 64 * 64], output=b"") for r in words(1)]
    plain = [replace(r, num_prompt_tokens=r.num_ids) for r in whole]
    anonymizer = Anonymizer(16)
    hidden = [anonymizer.request(request) for request in plain]
    ours, theirs = lru_curve(hidden), lru_curve(plain, 16)
    assert ours.num_blocks == theirs.num_blocks
    assert ours.whole.hit_tokens == theirs.whole.hit_tokens


def test_a_salt_and_a_namespace_decide_what_is_equal() -> None:
    one = Anonymizer(2, b"s" * 16)
    data = tokens([5, 6, 7]).prompt
    first, second = one.blocks(data, ("a", "b")), one.blocks(data, ("ab",))
    assert list(first) == [0, 1]
    assert not set(first) & set(second)
    assert one.blocks(data, ("a", "b")) == first
    assert one._digest(b"x") != Anonymizer(2)._digest(b"x") != Anonymizer(2)._digest(b"x")


@pytest.mark.parametrize("salt", [b"short", b"x" * 65])
def test_bad_salts(salt: bytes) -> None:
    with pytest.raises(InvalidArgument, match="16 to 64 bytes"):
        Anonymizer(2, salt)


def test_hash_ids_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="hash ids"):
        Anonymizer().request(Request(0, 10, 0, b"\0\0\0\0", tokens_per_id=10))


def test_recording_a_cache(tmp_path: Path) -> None:
    out, clock = io.StringIO(), Clock(100.0)
    cache = RecordingCache(PrefixCache(100, 2), out, clock=clock)
    secret = [11, 12, 13, 14, 15]
    with_namespace = cache.match_prefix(secret, ("acme",), num_tokens=9)
    clock.advance(1.5)
    other = cache.match_prefix([11, 12, 99], ("acme",), num_tokens=4)
    cache.insert(with_namespace, secret)
    cache.insert(with_namespace, [*secret, 16, 17, 18], engine_id=None)
    cache.release(with_namespace)
    cache.release(other.lease_id)
    assert cache.stats().num_leases == 0
    assert not any(word in out.getvalue() for word in ("acme", "11", "99"))
    path = tmp_path / "recorded.jsonl"
    path.write_text(out.getvalue())
    first, second = read_trace(path)
    assert (first.timestamp_ms, first.num_prompt_tokens, first.num_output_tokens, first.tokens_per_id) == (0, 5, 3, 2)
    assert list(unpack_tokens(first.prompt)) == [0, 1, 2]
    assert (second.timestamp_ms, list(unpack_tokens(second.prompt))) == (1500, [0, 3])


def test_recording_batches(tmp_path: Path) -> None:
    """As the verbs one by one; what fails in a batch is not recorded, nor are pins and batches that never ran."""
    out, clock = io.StringIO(), Clock(0.0)
    cache = RecordingCache(PrefixCache(3, 2), out, clock=clock)
    clock.advance(2.0)
    with cache.batch() as batch:
        lease = batch.match_prefix([1, 2, 3, 4], ("acme",), num_tokens=4)
        batch.insert(lease, [1, 2, 3, 4, 5])
        batch.match_prefix([7, 8, 9], num_tokens=9)  # there is no room for it
        batch.match_prefix("no tokens", lease_id="bad")
        pin = batch.pin([1, 2], 60.0, ("acme",))

    def leave() -> None:
        with cache.batch() as batch:
            batch.release(lease)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert out.getvalue() == ""
    with cache.record(cache.batch()) as batch:
        batch.release(lease)
        batch.unpin(pin)
    path = tmp_path / "recorded.jsonl"
    path.write_text(out.getvalue())
    (request,) = read_trace(path)
    assert (request.timestamp_ms, request.num_prompt_tokens, request.num_output_tokens) == (2000, 4, 1)
    assert list(unpack_tokens(request.prompt)) == [0, 1]


@pytest.mark.parametrize("in_batch", [False, True])
def test_a_recorded_fork_begins_with_what_its_parent_has_published(in_batch: bool, tmp_path: Path) -> None:
    out = io.StringIO()
    cache = RecordingCache(PrefixCache(100, 2), out, clock=Clock(0.0))
    unknown = cache.pin([], 60.0)
    with cache.batch() if in_batch else nullcontext(cache) as verbs:
        parent = verbs.match_prefix([1, 2, 3], ("acme",), num_tokens=10)
        verbs.insert(parent, [1, 2, 7, 8, 5, 6, 9])  # other than asked for; the last is no whole block
        verbs.insert(parent, [5, 6], offset=4)
        child = verbs.match_prefix([10, 11, 12], parent=parent, num_tokens=12)
        verbs.insert(child, [10, 11, 12, 13], offset=6)
        grandchild = verbs.match_prefix([20], parent=child)
        same = verbs.match_prefix([1, 2, 7, 8, 5, 6, 10, 11, 12, 13, 20], ("acme",))
        left_out = verbs.match_prefix([1], parent=unknown)
        for lease in (grandchild, same, left_out, child, parent):
            verbs.release(lease)
    path = tmp_path / "recorded.jsonl"
    path.write_text(out.getvalue())
    grandchild, same, child, parent = read_trace(path)
    assert (grandchild.num_prompt_tokens, grandchild.num_output_tokens) == (11, 0)
    assert grandchild == same
    assert (child.num_prompt_tokens, child.num_output_tokens) == (9, 1)
    assert list(unpack_tokens(child.prompt))[:4] == list(unpack_tokens(same.prompt))[:4]
    assert (parent.num_prompt_tokens, parent.num_output_tokens) == (3, 4)


def test_an_anonymizer_that_is_given_is_used() -> None:
    anonymizer, out = Anonymizer(2), io.StringIO()
    for prompt in ([1, 2, 3, 4], [1, 2, 5, 6]):
        cache = RecordingCache(PrefixCache(3, 2), out, anonymizer)
        cache.release(cache.match_prefix(prompt))
    assert [json.loads(line)["hash_ids"] for line in out.getvalue().splitlines()] == [[0, 1], [0, 2]]


def test_a_text_is_no_namespace() -> None:
    cache = RecordingCache(PrefixCache(3, 2), io.StringIO())
    with pytest.raises(InvalidArgument, match="namespace is a tuple of strings, not str"):
        cache.match_prefix([1], "acme")


def test_what_fails_is_not_recorded() -> None:
    out = io.StringIO()
    cache = RecordingCache(PrefixCache(1, 2), out)
    with pytest.raises(MemoryError):
        cache.match_prefix([1, 2, 3, 4], num_tokens=4)
    assert out.getvalue() == ""
