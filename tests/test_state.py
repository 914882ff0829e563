"""A state directory in process: what is taken up again, what is refused, and with which words."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept import Engine, Kept, state
from routes import FileClock
from test_frozen import Driver, Step, steps

from radix_cache import Lease, executor, index
from radix_cache.errors import (
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    LeaseExpired,
    LimitExceeded,
    PermissionDenied,
    PoolExhausted,
    StaleLease,
    UnknownLease,
)
from radix_cache.hints import Hints
from radix_cache.operations import Evict, Invalid, MatchPrefix, Release, reset
from radix_cache_service.calls import batch_request
from radix_cache_service.clock import CallClock
from radix_cache_service.convert import Limits, read_batch
from radix_cache_service.errors import PoolInUse
from radix_cache_service.state.directory import StateDir
from radix_cache_service.state.journal import Kind, SegmentReader, StateError
from radix_cache_service.state.recovery import recover


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "state")


def opened(kept: Kept, tokens: list[int], lease_id: str, engine_id: str | None = "E") -> Lease:
    """Open a lease and publish its whole blocks."""
    engine = Engine(kept, engine_id)
    lease = engine.match_prefix(tokens, num_tokens=len(tokens) + 1, lease_id=lease_id)
    engine.insert(lease, tokens)
    return lease


# What is taken up again.


def test_leases_tree_and_pool_are_back(kept: Kept) -> None:
    before = list(opened(kept, [1, 2, 3], "a").block_table)
    was = state(kept.ledger.cache)
    epoch = kept.keeper.epoch
    kept.restart()
    assert kept.keeper.epoch == epoch
    assert list(kept.ledger.cache._executor.leases.get("a").block_table) == before
    now = state(kept.ledger.cache)
    for name in ("nodes", "leases", "free", "gone", "answers"):
        assert getattr(now, name) == getattr(was, name)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_batch_sent_again_gets_the_same_answer_and_changes_nothing(kept: Kept, compacted: bool) -> None:
    def send() -> Any:
        with Engine(kept, "E").batch(seq=2**63 + 5) as batch:
            match = batch.match_prefix([1, 2, 3], num_tokens=4, lease_id="a")
            return match, batch.allocate("a", num_blocks=99)

    lease, refused = send()
    table = list(lease.result().block_table)
    if compacted:
        kept.compact()
    kept.restart()
    before = state(kept.ledger.cache)
    again, refused_again = send()
    assert list(again.result().block_ids) == table
    with pytest.raises(PoolExhausted) as caught:
        refused.result()
    with pytest.raises(PoolExhausted, match=str(caught.value)):
        refused_again.result()
    after = state(kept.ledger.cache)
    assert (after.nodes, after.leases, after.free, after.answers) == (
        before.nodes,
        before.leases,
        before.free,
        before.answers,
    )
    with pytest.raises(InvalidArgument, match="older than"), Engine(kept, "E").batch(seq=7):
        pass


@pytest.mark.parametrize("compacted", [False, True])
def test_a_match_asked_for_again_gets_its_lease(kept: Kept, compacted: bool) -> None:
    opened(kept, [1, 2, 3], "a")
    if compacted:
        kept.compact()
    kept.restart()
    asked = MatchPrefix(b"".join(i.to_bytes(4, "little") for i in [1, 2, 3]), "a", num_tokens=4)
    assert kept.ledger.one(asked, "E").lease_id == "a"
    for other, engine in ((asked._replace(num_tokens=3), "E"), (asked, "F")):
        with pytest.raises(InvalidArgument, match="in use"):
            kept.ledger.one(other, engine)


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize(
    ("hints", "other"),
    [
        (Hints(priority=-1), Hints(priority=-2)),
        (Hints(next_prompt_tokens=7), Hints(next_prompt_tokens=7 + 2**61 - 1)),
        (Hints(priority=0), Hints()),
    ],
)
def test_a_match_with_another_hint_is_another_request(kept: Kept, hints: Hints, other: Hints, compacted: bool) -> None:
    asked = MatchPrefix(b"", "a", num_tokens=1, hints=hints)
    kept.ledger.one(asked, "E")
    if compacted:
        kept.compact()
        kept.restart()
    with pytest.raises(InvalidArgument, match="in use"):
        kept.ledger.one(asked._replace(hints=other), "E")
    assert kept.ledger.one(asked, "E").lease_id == "a"


def test_time_stands_still_while_the_server_is_down(tmp_path: Path) -> None:
    clock = FileClock(tmp_path / "clock")
    kept = Kept(tmp_path / "state", lease_ttl_s=10, test_clock=str(clock.path))
    opened(kept, [1], "of an engine")
    opened(kept, [1], "of nobody", None)
    Engine(kept, "E").pin([1, 2], 15.0, lease_id="pin")
    clock.advance(9)
    kept.ledger.heard("")
    kept.kill()
    clock.advance(1000)
    kept.open()
    clock.advance(5.5)  # 14.5 s of service; the leases were renewed at the start, the pin was not
    kept.ledger.heard("")
    assert set(kept.ledger.cache._executor.leases.by_id) == {"of an engine", "of nobody", "pin"}
    clock.advance(1)
    kept.ledger.heard("")
    assert set(kept.ledger.cache._executor.leases.by_id) == {"of an engine", "of nobody"}
    clock.advance(5)
    kept.ledger.heard("")
    with pytest.raises(LeaseExpired):
        Engine(kept, None).renew("of nobody")
    kept.restart()
    with pytest.raises(LeaseExpired):
        Engine(kept, None).renew("of nobody")


def test_what_a_reset_had_not_freed_yet_is_freed_at_the_start(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state", num_blocks=4000, block_size=1)
    for token in range(1500):
        opened(kept, [token], "a")
        Engine(kept, "E").release("a")
    opened(kept, [5], "held")
    pieces = kept.ledger.reset(reset())
    next(pieces)
    assert kept.ledger.cache.stats().num_cached_blocks > 1
    kept.restart()
    assert kept.ledger.cache.stats().num_cached_blocks == 1  # in the lease's hands
    assert kept.ledger.cache.probe([5]) == 0
    Engine(kept, "E").release("held")
    assert kept.ledger.cache.stats().num_free_blocks == 4000


def test_a_reset_that_is_refused_leaves_one_that_goes_on_alone(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_NUM_SWEPT_NODES", 1)
    for token in range(3):
        opened(kept, [token, token], "a")
        Engine(kept, "E").release("a")
    pieces = kept.ledger.reset(reset())
    next(pieces)
    with pytest.raises(InvalidTokens, match="1 tokens are not whole blocks of 2"):
        next(kept.ledger.reset(reset((), [1])))
    assert kept.ledger.is_sweeping
    assert list(pieces)
    assert kept.ledger.cache.stats().num_free_blocks == 8
    kept.compact()


def test_what_is_done_while_a_reset_goes_on_comes_back_as_well(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefix is taken up again and grows, and of a leaf that it is about to free an eviction takes the tail."""
    monkeypatch.setattr(executor, "_NUM_SWEPT_NODES", 1)
    monkeypatch.setattr(index, "_MAX_TRIMMED_BLOCKS", 2)

    def use(tokens: list[int]) -> None:
        opened(kept, tokens, "a")
        Engine(kept, "E").release("a")

    for tail in ([7] * 8, [8, 8], [9, 9]):
        use([1, 1, *tail])
    next(kept.ledger.reset(reset((), [1, 1])))
    use([1, 1, 5, 5])
    Engine(kept, None).evict(1)
    assert kept.ledger.is_sweeping
    assert kept.ledger.cache.stats().num_cached_blocks == 6  # one is swept, one evicted
    kept.restart()
    assert kept.ledger.cache.stats().num_cached_blocks == 2
    assert kept.ledger.cache.probe([1, 1, 5, 5]) == 4


@settings(max_examples=settings().max_examples // 5)
@given(calls=st.lists(steps, min_size=1, max_size=12), policy=st.sampled_from(["lru", "slru", "priority"]))
def test_a_kill_after_any_record_leaves_what_was_there_then(
    tmp_path_factory: pytest.TempPathFactory, calls: list[Step], policy: str
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    clock = FileClock(folder / "clock")
    kept = Kept(folder / "state", num_blocks=24, lease_ttl_s=20, policy=policy, test_clock=str(clock.path))
    driver = Driver.__new__(Driver)
    driver.clock, driver.cache, driver.num_named, driver.seq = clock, Everybody(kept), 0, 0
    states = {kept.keeper._segment.next_number: state(kept.ledger.cache)}
    for call in calls:
        driver.do(call)
        states[kept.keeper._segment.next_number] = state(kept.ledger.cache)
    kept.kill()
    (written,) = kept.segments()
    content = written.read_bytes()
    for number, expected in states.items():
        copy = folder / f"after {number}"
        shutil.copytree(folder / "state", copy)
        (copy / written.name).write_bytes(content[: end_of(written, kept.keeper.epoch, number)])
        directory = StateDir(copy)
        found = recover(directory, directory.read(), CallClock())
        assert found.next_number == number
        assert state(found.ledger.cache) == expected
        directory.close()
    shutil.rmtree(folder)


def end_of(path: Path, epoch: str, number: int) -> int:
    """Return where the record before ``number`` ends."""
    reader = SegmentReader(path, epoch, 1, is_last=True)
    for record in reader:
        if record.number == number:
            return reader.end
    return reader.end


class Everybody:
    """A kept cache with the face of one in process: ``engine_id`` says who calls."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    @property
    def _executor(self) -> Any:
        return self.kept.ledger.cache._executor

    def heartbeat(self, engine_id: str) -> None:
        Engine(self.kept, engine_id).heartbeat()

    def batch(self, engine_id: str, seq: int) -> Any:
        return Engine(self.kept, engine_id).batch(seq)

    def __getattr__(self, verb: str) -> Any:
        return lambda *args, engine_id=None, **options: getattr(Engine(self.kept, engine_id), verb)(*args, **options)


def test_what_was_refused_before_it_ran_is_answered_again_to_the_byte(kept: Kept) -> None:
    opened(kept, [1, 2, 3], "a")
    errors = [
        PermissionDenied("not yours"),
        LimitExceeded("max_leases_per_client", 3),
        InvalidTokens("token 5 is none", 5),
        InvalidBlocks("block 3", 3),
        UnknownLease("b"),
        LeaseExpired("c"),
        StaleLease("d"),
        InvalidArgument("no"),
    ]

    def send() -> list[bytes]:
        batch = batch_request([MatchPrefix(b"", "n"), *(Release(f"x{n}") for n in range(len(errors)))], "E", 4)
        batch.operations.add()  # no verb at all
        batch.operations.add().renew.lease_id = "n"  # fails as the match that was to open it
        requests, asked = read_batch(batch, Limits(9, 99, 9999, 2, 8))
        asked[:9] = [Invalid(errors[0], "n"), *map(Invalid, errors)]
        return [result.SerializeToString() for result in kept.ledger.batch(batch, requests, asked)]

    before = send()
    for again in (kept.restart, kept.compact, kept.restart):
        again()
        assert send() == before


@pytest.mark.parametrize(
    ("engine_id", "seq", "num_operations"),
    [("E", 4, 0), ("E", 5, 1), ("E" * 2000, None, 0)],
    ids=["older", "of another length", "no engine"],
)
def test_time_passes_with_what_is_refused_as_a_whole(
    tmp_path: Path, engine_id: str, seq: int | None, num_operations: int
) -> None:
    """Else who reads the cache next lets leases run out, and no replay does: nor is a snapshot what it was made of."""
    clock = FileClock(tmp_path / "clock")
    kept = Kept(tmp_path / "state", lease_ttl_s=10.0, test_clock=str(clock.path))
    with Engine(kept, "E").batch(seq=5):
        pass
    opened(kept, [1, 2, 3], "a", "F")
    clock.advance(11)
    refused = batch_request([Evict(1)] * num_operations, engine_id, seq, strict=False)
    with pytest.raises(InvalidArgument):
        kept.ledger.batch(refused, *read_batch(refused, Limits(9, 99, 9999, 2, 8)))
    was = state(kept.ledger.cache)
    assert kept.ledger.cache.lease_of("a") is None
    kept.ledger.cache.stats()
    assert state(kept.ledger.cache) == was == state(kept.replayed().cache)
    kept.compact()
    assert state(kept.ledger.cache) == was


# What is written.


def test_a_call_that_waits_does_not_write_its_prompt_each_time(kept: Kept) -> None:
    opened(kept, [1, 2, 3], "a")
    prompt = MatchPrefix(bytes(4 * 10_000), "b", num_tokens=10_000)
    before = kept.keeper.num_journal_bytes
    for _ in range(10):
        with pytest.raises(PoolExhausted):
            kept.ledger.one(prompt, "E")
    assert kept.keeper.num_journal_bytes - before < 1000
    kept.restart()


def test_what_changes_nothing_is_not_written(kept: Kept) -> None:
    before = kept.keeper.num_journal_bytes
    Engine(kept, None).probe([1, 2, 3])
    kept.ledger.cache.stats()
    kept.ledger.cache.dump()
    assert kept.keeper.num_journal_bytes == before


def test_a_journal_that_is_too_long_becomes_a_snapshot_and_a_failure_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path / "state", max_journal_bytes=3000)
    in_the_way = tmp_path / "state" / "snapshot-00000002.tmp"
    in_the_way.mkdir()

    async def serve() -> None:
        await grow(kept)
        assert "was not compacted, and grows" in caplog.text
        assert kept.keeper.num_journal_bytes > 3000
        in_the_way.rmdir()
        kept.keeper.tend()
        assert kept.keeper._compaction is None  # not before it has grown by as much again
        await grow(kept)
        assert kept.keeper.num_journal_bytes < 3000
        await kept.keeper.close()

    asyncio.run(serve())
    assert [path.name for path in kept.folder.glob("snapshot-*")] == ["snapshot-00000003.db"]
    assert [path.name for path in kept.segments()] == ["journal-00000003.log"]
    was = state(kept.ledger.cache)
    kept.open()
    assert state(kept.ledger.cache).nodes == was.nodes


async def grow(kept: Kept) -> None:
    """Call until the journal is compacted, and that has ended."""
    while kept.keeper._compaction is None:
        opened(kept, [1, 2, 3], "a")
        Engine(kept, "E").release("a")
        kept.keeper.tend()
    await asyncio.wait([kept.keeper._compaction])


def test_a_server_that_ends_takes_its_compaction_with_it(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state", max_journal_bytes=1)

    async def serve() -> None:
        kept.keeper.tend()
        await asyncio.sleep(0.05)
        await kept.keeper.close()

    asyncio.run(serve())
    kept.open()  # the lock is free


# What is refused.


def refusal(kept: Kept, **settings: Any) -> str:
    """Return why a start is refused; it must leave the files as they are."""
    before = {path.name: path.read_bytes() for path in kept.folder.iterdir()}
    with pytest.raises(StateError) as caught:
        Kept(kept.folder, aside=False, **settings)
    assert {path.name: path.read_bytes() for path in kept.folder.iterdir()} == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_blocks", 9),
        ("block_size", 4),
        ("policy", "fifo"),
        ("num_reserved_blocks", 1),
        ("growth_share", 0.5),
        ("lease_ttl_s", 5.0),
        ("layout_fingerprint", "other"),
        ("namespace_limits", ("namespace=a max_blocks=2",)),
    ],
)
def test_a_start_with_other_settings_is_refused_by_name(kept: Kept, setting: str, value: Any) -> None:
    kept.kill()
    assert f"was kept with {setting} " in refusal(kept, **{setting: value})


def test_limits_of_messages_may_change(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state", max_tokens=100)
    with Engine(kept, "E").batch() as batch:
        batch.match_prefix([1] * 90, lease_id="a")
    kept.kill()
    Kept(tmp_path / "state", aside=False, max_tokens=50).kill()


@pytest.mark.parametrize("compacted", [False, True])
def test_no_damaged_byte_is_taken_for_the_state(kept: Kept, compacted: bool) -> None:
    opened(kept, [1, 2, 3], "a")
    if compacted:
        kept.compact()
        opened(kept, [1, 2, 4], "b")
    kept.kill()
    kept.open()  # so that no segment is the last one but this, which has one record
    kept.kill()
    for path in sorted(kept.folder.iterdir()):
        content = path.read_bytes()
        for place in range(0, len(content), 1 + len(content) // 60):
            path.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
            assert path.name in refusal(kept)
        path.write_bytes(content)
    kept.open()
    kept.kill()


def test_a_segment_that_ends_early_or_is_missing_is_refused(kept: Kept) -> None:
    opened(kept, [1, 2, 3], "a")
    kept.restart()
    kept.kill()
    first, second = kept.segments()
    content = first.read_bytes()
    first.write_bytes(content[:-5])
    assert f"{first} ends in the middle of record" in refusal(kept)
    first.write_bytes(content)
    first.rename(kept.folder / "away")
    assert f"{first} is missing" in refusal(kept)
    (kept.folder / "away").rename(first)
    second.unlink()
    assert f"{second} is missing" in refusal(kept)


def test_the_manifest_is_needed(kept: Kept) -> None:
    kept.kill()
    (kept.folder / "state.json").unlink()
    assert "state.json is missing" in refusal(kept)


def test_another_format_is_named(kept: Kept) -> None:
    kept.kill()
    path = kept.folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    assert "has format 99" in refusal(kept)


def test_an_answer_that_comes_out_otherwise_is_noticed(kept: Kept) -> None:
    opened(kept, [1, 2, 3], "a")
    kept.keeper.append(Kind.HEARD, kept.ledger.clock(), 1, b"E")  # as a server of other code might have answered
    kept.kill()
    assert "is answered otherwise than it was" in refusal(kept)


def test_a_torn_record_is_cut_off_and_said(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    opened(kept, [1, 2, 3], "a")
    with caplog.at_level(logging.WARNING):
        kept.restart(num_torn=40)
    assert "ended in 40 bytes of a call that was never answered" in caplog.text
    kept.restart()


def test_a_segment_that_was_only_begun_is_no_damage(kept: Kept) -> None:
    kept.kill()
    for number, content in ((2, b""), (3, b"radix-ca")):
        (kept.folder / f"journal-{number:08}.log").write_bytes(content)
        kept.open()
        kept.kill()
        assert len(kept.segments()) == number


# Another pool.


def test_a_new_life_of_the_memory_starts_cold(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state", pool_epoch="one")
    opened(kept, [1, 2, 3], "a")
    epoch = kept.keeper.epoch
    kept.kill()
    kept = Kept(tmp_path / "state", aside=False, pool_epoch="two", num_blocks=16)  # nothing of before counts
    assert kept.keeper.epoch != epoch
    assert kept.ledger.cache.stats().num_free_blocks == 16
    with pytest.raises(UnknownLease):
        Engine(kept, "E").renew("a")
    opened(kept, [1, 2, 3], "b")
    kept.restart()
    assert len(kept.ledger.cache._executor.leases) == 1
    kept.kill()
    assert "is about pool_epoch 'two', and this start names none" in refusal(kept)


@pytest.mark.parametrize("pool_epoch", ["", "one"])
def test_after_the_machine_went_down_nothing_is_taken_up(tmp_path: Path, pool_epoch: str) -> None:
    kept = Kept(tmp_path / "state", pool_epoch=pool_epoch)
    opened(kept, [1, 2, 3], "a")
    kept.keeper._state.write(replace(kept.keeper._manifest, boot_id="another"))
    kept.restart()
    with pytest.raises(UnknownLease):
        Engine(kept, "E").renew("a")
    with pytest.raises(PoolInUse):
        Engine(kept, "E").match_prefix([1], num_tokens=1)


def test_a_pool_epoch_named_for_the_first_time_may_be_the_old_pool(kept: Kept) -> None:
    opened(kept, [1, 2, 3], "a")
    kept.kill()
    kept = Kept(kept.folder, aside=False, pool_epoch="one")
    with pytest.raises(PoolInUse):
        Engine(kept, "E").match_prefix([1], num_tokens=1)


def test_a_pool_in_use_is_closed_for_one_ttl_of_service(tmp_path: Path) -> None:
    clock = FileClock(tmp_path / "clock")
    settings = {"pool_in_use": True, "lease_ttl_s": 10.0, "test_clock": str(clock.path), "num_reserved_blocks": 1}
    kept = Kept(tmp_path / "state", **settings)
    engine = Engine(kept, "E")
    for _ in range(2):  # a restart neither opens it nor begins anew
        clock.advance(4)
        with pytest.raises(PoolInUse, match="nothing is handed out for another") as caught:
            engine.match_prefix([1], num_tokens=2)
        with engine.batch() as batch:
            needs, does_not = batch.match_prefix([1], num_blocks=2), batch.match_prefix([1])
        with pytest.raises(PoolInUse):
            needs.result()
        does_not.result()
        kept.compact()
        kept.restart()
    assert caught.value.retry_after_s == 2.0
    clock.advance(2)
    assert len(engine.match_prefix([1], num_tokens=2, lease_id="a").block_table) == 1
    with pytest.raises(PoolExhausted) as exhausted:
        engine.match_prefix([1], num_blocks=7)
    assert not isinstance(exhausted.value, PoolInUse)
    kept.restart()
    assert kept.ledger.one(Release("a"), "E") is None
    assert kept.ledger.one(Evict(1), "") == 0
