"""Segments of a journal that are lost, and starts and rotations that a kill cuts short: which is which."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kept import Engine, Kept
from test_state import grow, opened, refusal

from radix_cache_service.errors import PoolInUse
from radix_cache_service.state.keeper import Keeper


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "state")


@pytest.mark.parametrize("served_after", ["a start", "a restart", "a compaction", "a failed compaction"])
def test_the_last_segment_is_there_with_what_it_is_known_to_hold(kept: Kept, served_after: str) -> None:
    opened(kept, [1, 2, 3], "a")
    if served_after == "a restart":
        kept.restart()
    elif served_after == "a compaction":
        kept.compact()
    elif served_after == "a failed compaction":
        kept.keeper.rotate()
        kept.keeper.name_segment()
    opened(kept, [1, 2, 4], "b")
    kept.kill()
    last = kept.segments()[-1]
    content = last.read_bytes()
    line = content.index(b"\n") + 1
    is_started = served_after in {"a start", "a restart"}
    for end in [0, 5, line - 1, *([line, line + 10] if is_started else [])]:
        last.write_bytes(content[:end])
        assert f"{last} is damaged: it was longer" in refusal(kept)
    last.unlink()
    assert f"{last} is missing" in refusal(kept)
    last.write_bytes(content)
    kept.open()
    assert {"a", "b"} <= {*kept.ledger.cache._executor.leases.by_id}


@pytest.mark.parametrize("num_bytes", [0, 7, None])
def test_a_kill_while_a_segment_follows_another_loses_nothing(kept: Kept, num_bytes: int | None) -> None:
    opened(kept, [1, 2, 3], "a")
    kept.keeper.rotate()
    kept.kill()  # before the manifest knows of the new segment
    last = kept.segments()[-1]
    last.write_bytes(last.read_bytes()[:num_bytes])
    for _ in range(2):
        kept.open()
        assert "a" in kept.ledger.cache._executor.leases.by_id
        opened(kept, [5], "b")
        Engine(kept, "E").release("b")
        kept.kill()


def test_a_compaction_names_the_new_segment_before_it_begins(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state", max_journal_bytes=1)
    (kept.folder / "snapshot-00000002.tmp").mkdir()  # so that it fails

    async def serve() -> None:
        await grow(kept)

    asyncio.run(serve())
    kept.kill()
    (kept.folder / "snapshot-00000002.tmp").rmdir()
    last = kept.segments()[-1]
    assert last.name == "journal-00000002.log"
    last.unlink()
    assert f"{last} is missing" in refusal(kept)


@pytest.mark.parametrize("written", ["nothing", "line", "torn", "all"])
@pytest.mark.parametrize("in_use_again", [False, True])
def test_a_start_that_was_killed_before_it_served_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, in_use_again: bool
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    place = {"nothing": "_opened", "line": "append", "torn": "append", "all": "name_segment"}[written]
    with monkeypatch.context() as patched:
        patched.setattr(Keeper, place, die)
        with pytest.raises(KeyboardInterrupt):
            Kept(tmp_path / "state", pool_in_use=True)
    if written == "torn":
        with (tmp_path / "state" / "journal-00000001.log").open("ab") as file:
            file.write(bytes(10))
    kept = Kept(tmp_path / "state", aside=False, pool_in_use=in_use_again)
    for _ in range(2):
        with pytest.raises(PoolInUse):
            Engine(kept, "E").match_prefix([1], num_tokens=1)
        kept.restart()
    assert len(kept.segments()) == 3
