"""``radix-cache serve`` as a process: what it prints, what it refuses, how it ends. `running_server` is shared."""

from __future__ import annotations

import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from radix_cache.cli.app import app
from radix_cache.cli.serve import serve
from radix_cache_service import Client, ServerConfig


def radix_cache(*arguments: str, **options: object) -> subprocess.Popen[str]:
    """Start the command as a user would; output is piped."""
    command = [sys.executable, "-c", "from radix_cache.cli import main; main()", *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def run(*arguments: str, **options: object) -> tuple[int, str, str]:
    """Run the command to its end; return status, stdout and stderr."""
    with radix_cache(*arguments, **options) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@contextmanager
def running_server(*options: str) -> Iterator[str]:
    """Run a server on a free port; yield its address."""
    with radix_cache("serve", "--listen", "127.0.0.1:0", *options) as process:
        try:
            yield address_of(process)
        finally:
            process.terminate()
            process.wait(timeout=60)


def address_of(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline()
    assert line.startswith("listening on "), line + process.stderr.read()
    return line.split()[2]


def test_every_setting_has_a_flag() -> None:
    settings = {field.name for field in fields(ServerConfig)}
    assert {parameter.name for parameter in serve.params} == {*settings, "config", "check"}


def test_help_says_the_defaults() -> None:
    shown = " ".join(CliRunner().invoke(app, ["serve", "--help"]).output.split())
    assert "[default: 127.0.0.1:50051]" in shown
    assert "[default: 65536]" in shown
    assert "[default: 660]" in shown


def test_serves_on_all_addresses_and_ends_on_sigterm(tmp_path: Path) -> None:
    socket = f"unix:{tmp_path}/cache.sock"
    options = (
        "--num-blocks",
        "99",
        "--block-size",
        "4",
        "--reserve-blocks",
        "3",
        "--lease-ttl",
        "7",
        "--growth-share",
        "0",
    )
    with radix_cache("serve", "--listen", "127.0.0.1:0", "--listen", socket, "--uds-mode", "600", *options) as process:
        tcp = address_of(process)
        assert re.fullmatch(r"127\.0\.0\.1:\d+", tcp)
        assert address_of(process) == socket
        for address in (tcp, socket):
            with Client(address) as client:
                said = client.describe()
                assert (said.num_blocks, said.block_size, said.num_reserved_blocks) == (99, 4, 3)
                assert (said.lease_ttl_s, said.growth_share, said.policy) == (7.0, 0.0, "lru")
        assert stat.S_IMODE((tmp_path / "cache.sock").stat().st_mode) == 0o600
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert not (tmp_path / "cache.sock").exists()


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--num-blocks", "0", "num_blocks is at least 1"),
        ("--num-blocks", "many", "'many' is not a valid integer"),
        ("--listen", "nowhere", "'nowhere' is neither host:port nor unix:/path"),
        ("--policy", "oracle", "policy 'oracle' is neither built in"),
        ("--lease-ttl", "-1", "lease_ttl_s is a number of seconds above 0 and up to 1e+09, not -1.0"),
        ("--growth-share", "1", "growth_share is at least 0 and below 1, not 1"),
        ("--uds-mode", "999", "'999' is not an octal number"),
        ("--wat", "1", "No such option"),
    ],
)
def test_bad_usage_is_2(option: str, value: str, words: str) -> None:
    result = CliRunner().invoke(app, ["serve", option, value])
    assert result.exit_code == 2
    assert words in result.output


def test_a_taken_address_is_1_and_named() -> None:
    with running_server() as address:
        status, out, err = run("serve", "--listen", address)
    assert (status, out) == (1, "")
    assert address in err
    assert "Traceback" not in err
