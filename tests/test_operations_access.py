"""The commands that look at a server, where it wants TLS and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme
from click.testing import CliRunner, Result
from security_help import ENTRIES, ROOT, Issued, root_of, write_tokens
from service_process import ServerProcess

from radix_cache.cli.app import app


class Secured(NamedTuple):
    address: str
    flags: list[str]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A server that wants a client's certificate and a token, and the flags that satisfy it."""
    folder = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    server, client = Issued(folder, authority, "127.0.0.1"), Issued(folder, authority, "client.example")
    root = root_of(folder, "root", authority)
    (folder / "token").write_text(f"{ROOT}\n")
    settings = {
        "tls_certificate": server.certificate,
        "tls_private_key": server.private_key,
        "tls_client_ca": root,
        "tokens_file": write_tokens(folder / "tokens.toml", ENTRIES),
    }
    flags = {
        "--tls-ca": root,
        "--tls-certificate": client.certificate,
        "--tls-private-key": client.private_key,
        "--token-file": folder / "token",
    }
    with ServerProcess(block_size=1, **settings) as process:
        yield Secured(process.address, [str(part) for item in flags.items() for part in item])


def invoke(command: str, *arguments: str, environ: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [command, *arguments], env=environ)


def trace_in(folder: Path) -> str:
    path = folder / "trace.jsonl"
    path.write_text('{"timestamp": 0, "tokens": [1, 2, 3], "output_tokens": []}\n')
    return str(path)


@pytest.mark.parametrize("command", ["stats", "tree", "top", "leases", "replay"])
def test_with_the_flags_each_command_gets_in(secured: Secured, command: str, tmp_path: Path) -> None:
    arguments = {
        "stats": [secured.address, "--json"],
        "tree": [secured.address],
        "leases": [secured.address],
        "top": [secured.address, "--count", "1", "--interval", "60"],
        "replay": [trace_in(tmp_path), "--server", secured.address],
    }[command]
    result = invoke(command, *arguments, *secured.flags)
    assert result.exit_code == 0, result.output
    assert "no answer" not in result.output


def test_variables_do_as_well(secured: Secured) -> None:
    pairs = zip(secured.flags[::2], secured.flags[1::2], strict=True)
    environ = {f"RADIX_CACHE_CLIENT_{flag[2:].upper().replace('-', '_')}": value for flag, value in pairs}
    result = invoke("stats", secured.address, "--json", environ=environ)
    assert json.loads(result.output)["num_leases"] == 0


@pytest.mark.parametrize("missing", range(0, 8, 2))
def test_without_one_of_them_it_is_one_line(secured: Secured, missing: int) -> None:
    flags = secured.flags[:missing] + secured.flags[missing + 2 :]
    result = invoke("stats", secured.address, *flags)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "Traceback" not in result.output
    assert ROOT not in result.output


def test_a_token_goes_nowhere_in_the_clear(secured: Secured) -> None:
    result = invoke("stats", "192.0.2.1:50051", *secured.flags[-2:])
    assert result.exit_code == 1
    assert "in the clear" in result.output


@pytest.mark.parametrize("content", ["", "with a space in the middle", "short", "\x00\xff"])
def test_a_file_without_a_token_is_named(secured: Secured, tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    result = invoke("stats", secured.address, *secured.flags[:-2], "--token-file", str(path))
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: --token-file {path} has no token in it: ")
    assert len(content) < 2 or content not in result.output


@pytest.mark.parametrize("flag", ["--tls-ca", "--tls-certificate", "--tls-private-key"])
def test_a_file_that_is_no_pem_is_named(secured: Secured, tmp_path: Path, flag: str) -> None:
    path = tmp_path / "pem"
    path.write_text("no PEM")
    result = invoke("stats", secured.address, *secured.flags, flag, str(path))
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert f"{path}: this is no PEM file" in result.output


def test_a_file_that_is_not_there_is_bad_usage(secured: Secured) -> None:
    assert invoke("stats", secured.address, "--token-file", "/no/such/file").exit_code == 2
