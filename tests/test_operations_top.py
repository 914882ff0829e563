"""The live views, in a terminal."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console
from security_help import ALICE, ENTRIES, write_tokens
from service_process import ServerProcess, own_address
from terminal import Terminal
from test_cli_serve import radix_cache, run

from radix_cache.cli.app import app
from radix_cache.cli.rates import num_failed, rates_between, share
from radix_cache.cli.top import _bar, overview
from radix_cache_service import Client
from radix_cache_service.calls import ServerStats

NOBODY = "127.0.0.1:1"
CTRL_C = b"\x03"
EMPTY = ServerStats(0, 0, 0, 0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(num_blocks=64) as process:
        yield process


# Rates.


def test_rates_are_gains_by_the_server_s_own_clock() -> None:
    before = replace(EMPTY, uptime_s=10.0, counters={"num_hit_tokens": 5}, num_calls={"Probe/OK": 1})
    now = replace(
        EMPTY,
        uptime_s=14.0,
        counters={"num_hit_tokens": 25, "num_new": 4},
        num_calls={"Probe/OK": 5, "Free/NOT_FOUND": 4},
        num_operations={"Free/OK": 7, "Match/RESOURCE_EXHAUSTED": 8},
    )
    assert rates_between(before, now) == {"num_hit_tokens": 5, "num_new": 1, "num_calls": 2, "num_failed": 3}
    assert num_failed(now) == 12


def test_a_server_that_started_anew_gained_what_it_has() -> None:
    before = replace(EMPTY, uptime_s=1000.0, counters={"num_hit_tokens": 500}, num_calls={"Probe/OK": 100})
    now = replace(EMPTY, uptime_s=2.0, counters={"num_hit_tokens": 4}, num_calls={"Probe/OK": 6})
    assert rates_between(before, now) == {"num_hit_tokens": 2, "num_calls": 3, "num_failed": 0}


def test_a_share_of_nothing_is_none() -> None:
    assert (share(1, 4), share(0, 0)) == (0.25, None)


# The bar.


@pytest.mark.parametrize(
    ("leased", "protected", "evictable", "free", "bar"),
    [
        (0, 0, 0, 64, "░░░░░░░░"),
        (16, 16, 16, 16, "██▓▓▒▒░░"),
        (1, 0, 0, 63, "█░░░░░░░"),
        (1, 1, 1, 997, "█▓▒░░░░░"),
        (64, 0, 0, 0, "████████"),
        (0, 0, 0, 0, "░░░░░░░░"),
        (0, 1, 998, 1, "▓▒▒▒▒▒▒░"),
    ],
)
def test_the_bar_shows_whatever_is_there(leased: int, protected: int, evictable: int, free: int, bar: str) -> None:
    stats = replace(
        EMPTY,
        num_leased_blocks=leased,
        num_protected_blocks=protected,
        num_evictable_blocks=evictable,
        num_free_blocks=free,
    )
    assert _bar(stats).plain == bar


# top.


def test_top_fits_80_columns_and_is_live(server: ServerProcess) -> None:
    view = Terminal("top", server.address, NOBODY, "--interval", "0.2")
    view.wait_until(lambda: "█ leased ▓ protected ▒ evictable ░ free" in view.text)
    assert re.search(r"server +pool +hit rate +calls/s +fails/s +evict/s +leases +waiting\n", view.text)
    assert re.search(rf"{NOBODY} +no answer", view.text)
    with Client(server.address, engine_id="E") as client:
        lease = client.match_prefix([1, 2, 3, 4], num_tokens=40)
        client.insert(lease, [1, 2, 3, 4])
        view.wait_until(lambda: re.search(rf"{server.address} +██▓░░░░░ ", view.text) is not None)
        client.release(lease)
    view.wait_until(lambda: re.search(rf"{server.address} +▒░░░░░░░ .* 0 +0", view.text) is not None)
    assert max(map(len, view.lines)) <= 80
    view.press(CTRL_C)
    assert view.finish() == 0
    assert "Traceback" not in view.text
    assert view.raw.count("\x1b[?1049h") == view.raw.count("\x1b[?1049l") == 1, "the screen of before is back"


def test_top_outlives_a_restart() -> None:
    first = ServerProcess(own_address(), num_blocks=64)
    view = Terminal("top", first.address, "--interval", "0.1")
    view.wait_until(lambda: "░░░░░░░░" in view.text)
    first.stop(signal.SIGKILL)
    view.wait_until(lambda: any("no answer" in line for line in view.lines))
    with ServerProcess(first.address, num_blocks=64):
        view.wait_until(lambda: any("░░░░░░░░" in line for line in view.lines))
        view.press(CTRL_C)
        assert view.finish() == 0


def test_top_in_a_pipe_is_a_table_a_round(server: ServerProcess) -> None:
    status, out, err = run("top", server.address, NOBODY, "--interval", "3", "--count", "2")  # which is its patience
    assert (status, err) == (0, "")
    assert len(re.findall(r"^server ", out, re.MULTILINE)) == 2
    assert out.count("no answer") == 2
    assert "\x1b" not in out


def test_top_says_why_there_is_nothing_to_show(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    (tmp_path / "alice").write_text(ALICE)
    with ServerProcess(tokens_file=tokens) as server:
        for flags, why in (
            ([], "a token is needed here"),
            (
                ["--token-file", f"{tmp_path}/alice"],
                "GetStats concerns all namespaces, and token 'alice' may not use all",
            ),
        ):
            status, out, err = run("top", server.address, NOBODY, "--count", "1", "--interval", "60", *flags)
            assert (status, err) == (1, ""), "there are figures of none"
            assert re.search(rf"^{server.address} +refused", out, re.MULTILINE)
            assert re.search(rf"^{NOBODY} +no answer", out, re.MULTILINE)
            said = " ".join(out.split())
            assert f"{server.address}: {why}" in said
            assert re.search(rf"{NOBODY}: .*Connection refused", said)


def test_top_folds_long_addresses_and_nothing_else() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    address = "unix:/run/radix-cache/a-rather-long-name/of-a-folder/cache.sock"
    row = type("Row", (), {"now": replace(EMPTY, num_free_blocks=1, num_leases=123_456), "rates": None, "error": None})
    console.print(overview([address], [row]))
    shown = console.export_text()
    assert "123,456" in shown
    assert "waiting" in shown
    assert "".join(line.split(" ")[0] for line in shown.splitlines()[1:-1]) == address


@pytest.mark.parametrize("arguments", [[], ["nowhere"], [NOBODY, "--interval", "0"]])
def test_bad_usage_of_top(arguments: list[str]) -> None:
    assert run("top", *arguments)[0] == 2


# stats --watch.


def test_stats_watch_fits_a_terminal(server: ServerProcess) -> None:
    with Client(server.address) as client, client.session() as session:
        session.probe([1])
        view = Terminal("stats", server.address, "--watch", "--interval", "0.1", num_lines=32)
        view.wait_until(lambda: "Probe in a batch" in view.text)
        view.press(CTRL_C)
        assert view.finish() == 0
    assert "in a second" in view.text
    assert re.search(r"streams open +1\b", view.text)
    assert re.search(r"calls waiting for blocks +0\b", view.text)
    assert "Traceback" not in view.text


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_stats_watch_in_a_pipe_outlives_a_restart(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A round without an answer says so; the exit status is that of the last one."""
    address = f"unix:{tmp_path}/s.sock"
    server = ServerProcess(address)
    with radix_cache("stats", address, "--watch", "--interval", "0.1", *flags) as view:
        assert view.stdout is not None
        answered = '"uptime_s"' if flags else "calls/s"
        read_until(view.stdout, answered)
        server.stop(signal.SIGKILL)
        read_until(view.stdout, f"no answer from {address}: ")
        with ServerProcess(address):
            read_until(view.stdout, answered)
            view.send_signal(signal.SIGINT)
            assert view.wait(60) == 0


def read_until(lines: Iterator[str], text: str) -> None:
    assert any(text in line for line in lines), text


def test_stats_watch_on_a_terminal_outlives_a_restart(tmp_path: Path) -> None:
    """What was known last stays in sight, and what is wrong stands below it."""
    address = f"unix:{tmp_path}/s.sock"
    server = ServerProcess(address)
    view = Terminal("stats", address, "--watch", "--interval", "0.1", num_lines=32)
    view.wait_until(lambda: any("streams open" in line for line in view.lines))
    server.stop(signal.SIGKILL)
    view.wait_until(lambda: any("no answer from" in line for line in view.lines))
    view.wait_until(lambda: any("streams open" in line for line in view.lines))
    with ServerProcess(address):
        view.wait_until(
            lambda: (
                any("streams open" in line for line in view.lines)
                and not any("no answer from" in line for line in view.lines)
            )
        )
        view.press(CTRL_C)
        assert view.finish() == 0


def test_a_last_round_without_an_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("top", NOBODY, "--count", "1")[0] == 1
    assert run("stats", NOBODY, "--watch", "--count", "1")[0] == 1, "there is nothing to watch"
    with ServerProcess() as server:
        pause = SimpleNamespace(sleep=lambda _: server.stop(signal.SIGKILL))
        monkeypatch.setattr("radix_cache.cli.stats.time", pause)
        watched = CliRunner().invoke(app, ["stats", server.address, "--watch", "--count", "1"])
    assert watched.exit_code == 1
    assert f"no answer from {server.address}: " in watched.output
