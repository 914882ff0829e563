"""The numbers of events rise from start to start, whatever the clock says meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers import cached
from service_process import ServerProcess, StartFailed

from radix_cache_service import Client
from radix_cache_service.state.journal import StateError
from radix_cache_service.state.numbers import FILE, STEP, Numbers

ENVIRON = {"RADIX_CACHE_EVENTS": "true"}


class SetBack(ServerProcess):
    """A server that reads a clock an hour behind."""

    command = (
        "-c",
        """
import time
now_ns = time.time_ns
time.time_ns = lambda: now_ns() - 3600 * 10**9
from radix_cache_service.__main__ import main
main()
""",
    )


@pytest.mark.parametrize("pool_epochs", [("", ""), ("a", "b")], ids=["kept", "cold"])
def test_a_clock_that_was_set_back_does_not_set_the_numbers_back(tmp_path: Path, pool_epochs: tuple[str, str]) -> None:
    seqs = []
    for kind, pool_epoch in zip((ServerProcess, SetBack), pool_epochs, strict=True):
        pool = {"pool_epoch": pool_epoch} if pool_epoch else {}
        with kind(environ=ENVIRON, state_dir=tmp_path, **pool) as server:
            with Client(server.address) as client:
                watched = client.watch_events()
                seqs.append(next(watched).seq)
                cached(client, [len(seqs)] * 4)
                seqs.append(next(batch for batch in watched if batch.events).seq)
                watched.close()
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    assert seqs == sorted(set(seqs))


def test_without_a_state_directory_they_go_by_the_clock() -> None:
    numbers = Numbers(now_us=lambda: 1000)
    assert numbers.start == 1000
    assert numbers.after(2000) == 2001


def test_the_file_is_ahead_of_all_numbers_and_seldom_written(tmp_path: Path) -> None:
    numbers = Numbers(str(tmp_path), lambda: 1000)
    assert not (tmp_path / FILE).exists()  # nothing was numbered
    last, written = numbers.start, set()
    for _ in range(10):
        last = numbers.after(last + STEP // 4)
        written.add(int((tmp_path / FILE).read_text()))
        assert Numbers(str(tmp_path), lambda: 0).start > last
    assert len(written) < 5
    assert Numbers(str(tmp_path), lambda: 2 * max(written)).start == 2 * max(written)


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f"{FILE}.tmp").mkdir()
    numbers = Numbers(str(tmp_path), lambda: 1000)
    assert numbers.after(numbers.after(numbers.start)) == 1002
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / FILE} cannot be written: Is a directory"
    ]


@pytest.mark.parametrize("text", ["", "-5", "12 13", "0x10", "9" * 19, "1" * 30, "\N{ARABIC-INDIC DIGIT ONE}"])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(StateError, match=FILE):
        Numbers(str(tmp_path))


def test_a_server_names_the_damaged_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("soon\n")
    with pytest.raises(StartFailed, match=rf"{FILE} is damaged") as caught:
        ServerProcess(environ=ENVIRON, state_dir=tmp_path)
    assert caught.value.status == 1
