"""The command line: what it prints and how it fails. A server is real and of this file's own."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from test_cli_serve import radix_cache, run, running_server

import radix_cache as library
from radix_cache import PrefixCache
from radix_cache.cli import explain_missing
from radix_cache.cli.app import app
from radix_cache.cli.show import count, duration, make_console, percent
from radix_cache.cli.tree import draw
from radix_cache_service import Client

NO_SERVER = "127.0.0.1:1"
TRACE = "a trace"
BY_HAND = [
    {"timestamp": 0, "input_length": 1200, "output_length": 1, "hash_ids": [0, 1, 2]},
    {"timestamp": 5, "input_length": 1500, "output_length": 1, "hash_ids": [0, 1, 3]},
    {"timestamp": 9, "input_length": 1200, "output_length": 1, "hash_ids": [0, 1, 2]},
    {"timestamp": 9, "input_length": 600, "output_length": 1, "hash_ids": [4, 5]},
]  # hits: 0, 1024, 1200, 0


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in BY_HAND).encode()))
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server with block size 1."""
    with running_server("--num-blocks", "1000", "--block-size", "1") as address:
        yield address


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def row(output: str, name: str) -> list[str]:
    """The figures of the table row ``name``."""
    (line,) = (line for line in output.splitlines() if line.strip().startswith(name + "  "))
    return re.split(r"\s{2,}", line.strip())[1:]


class TestGroup:
    def test_version_and_help(self) -> None:
        assert printed("--version") == f"radix-cache {library.__version__}\n"
        shown = printed("--help")
        commands = "serve route stats top tree leases replay sweep curve compare trace"
        assert re.findall(r"^  (\w+)  ", shown, re.MULTILINE) == commands.split()
        assert "..." not in shown.partition("Commands:")[2], "a summary is cut off"

    def test_unknown_command_is_bad_usage(self) -> None:
        result = invoke("fly")
        assert result.exit_code == 2
        assert "No such command 'fly'" in result.output

    @pytest.mark.parametrize("command", ["stats", "tree"])
    def test_nobody_there_is_one_line(self, command: str) -> None:
        result = invoke(command, NO_SERVER)
        assert result.exit_code == 1
        assert result.output.startswith(f"Error: no answer from {NO_SERVER}: ")
        assert result.output.count("\n") == 1

    @pytest.mark.parametrize("number", ["nan", "inf"])
    def test_what_is_no_finite_number_is_bad_usage(self, number: str, trace: Path) -> None:
        for command in (
            ("stats", NO_SERVER, "--watch", "--interval", number),
            ("top", NO_SERVER, "--interval", number),
            ("replay", trace, "--num-blocks", 9, "--in-time", "--decode-rate", number),
            ("curve", trace, "--sample", number),
        ):
            result = invoke(*command)
            assert result.exit_code == 2, result.output
            assert f"{number} is not in the range" in result.output or "is not a finite number" in result.output

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
    def test_what_a_terminal_cannot_show_is_escaped(self, encoding: str, server: str) -> None:
        with Client(server) as client:
            lease = client.match_prefix([2], num_tokens=1, lease_id="\u72d7")
            status, out, err = run("leases", server, env={**os.environ, "PYTHONIOENCODING": encoding})
            client.release(lease)
        assert status == 0, err
        assert "\\u72d7" in out

    @pytest.mark.parametrize("address", ["", "foo", "host:", ":1", "host:0", "host:65536", "host:x", "unix:", "unix:a"])
    def test_what_is_no_address_is_bad_usage(self, address: str) -> None:
        for arguments in (["stats", address], ["tree", address], ["replay", __file__, "--server", address]):
            result = invoke(*arguments)
            assert result.exit_code == 2
            assert f"{address!r} is neither HOST:PORT nor unix:/path" in result.output

    def test_a_socket_without_a_server(self, tmp_path: Path) -> None:
        result = invoke("stats", f"unix:{tmp_path}/none")
        assert result.exit_code == 1
        assert f"no answer from unix:{tmp_path}/none" in result.output

    @pytest.mark.parametrize(
        ("module", "words"),
        [
            ("grpc", "grpc is not installed: pip install 'radix-cache[service]'"),
            ("grpc_health.v1", "grpc_health is not installed: pip install 'radix-cache[service]'"),
            ("rich.table", "rich is not installed: pip install 'radix-cache[service]'"),
            ("click", "click is not installed: pip install 'radix-cache[service]'"),
        ],
    )
    def test_a_missing_extra_is_named(self, module: str, words: str) -> None:
        assert words in explain_missing(ModuleNotFoundError(name=module))

    def test_another_missing_module_is_a_bug(self) -> None:
        with pytest.raises(ModuleNotFoundError):
            explain_missing(ModuleNotFoundError(name="radix_cache.nothing"))

    @pytest.mark.parametrize(
        ("missing", "arguments"),
        [("click", ["--help"]), ("grpc", ["stats", NO_SERVER]), ("grpc", ["serve"]), ("rich", ["replay", TRACE])],
    )
    def test_a_missing_extra_ends_without_a_traceback(self, missing: str, arguments: list[str], trace: Path) -> None:
        code = f"import sys; sys.modules[{missing!r}] = None; from radix_cache.cli import main; main()"
        played = [str(trace), "--num-blocks", "9"]
        arguments = [part for word in arguments for part in (played if word == TRACE else [word])]
        command = [sys.executable, "-c", code, *arguments]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 1
        assert f"{missing} is not installed: pip install 'radix-cache[service]'" in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_replay_in_process_needs_no_grpc(self, trace: Path) -> None:
        code = "import sys; sys.modules['grpc'] = None; from radix_cache.cli import main; main()"
        command = [sys.executable, "-c", code, "replay", str(trace), "--num-blocks", "9"]
        assert subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0


class TestReplay:
    def test_table(self, trace: Path) -> None:
        shown = printed("replay", trace, "--num-blocks", 100)
        assert shown.startswith("tiny.jsonl.gz: lru, 100 blocks, in process\n")
        assert row(shown, "requests") == ["4", "2"]
        assert row(shown, "prompt tokens") == ["4,500", "1,800"]
        assert row(shown, "hit tokens") == ["2,224", "1,200"]
        assert row(shown, "token hit rate") == ["49.42 %", "66.67 %"]
        assert row(shown, "block hit rate") == ["45.45 %", "60.00 %"]
        assert row(shown, "requests with a hit") == ["50.00 %", "50.00 %"]
        assert re.search(r"^0 blocks evicted; 4 calls in .*, [\d,]+ requests/s$", shown, re.MULTILINE)

    def test_json(self, trace: Path) -> None:
        shown = json.loads(printed("replay", trace, "--num-blocks", 4, "--json"))
        assert shown["whole"]["num_hit_tokens"] == 2224
        assert shown["last_half"]["num_requests"] == 2
        assert shown["num_evicted_blocks"] == 2

    def test_over_grpc(self, trace: Path, server: str) -> None:
        """Twice: each replay has a namespace of its own, so the second finds nothing of the first."""
        for _ in range(2):
            shown = json.loads(printed("replay", trace, "--server", server, "--json"))
            assert shown["whole"]["num_hit_tokens"] == 2224
            assert shown["num_calls"] == 4
        assert f"over gRPC to {server}" in printed("replay", trace, "--server", server)

    def test_token_ids(self, tmp_path: Path) -> None:
        path = tmp_path / "tokens.jsonl"
        path.write_text(f"{json.dumps({'timestamp': 0, 'tokens': list(range(40))})}\n" * 2)
        assert row(printed("replay", path, "--num-blocks", 100), "hit tokens") == ["32", "32"]
        assert row(printed("replay", path, "--num-blocks", 100, "--block-size", 10), "hit tokens") == ["40", "40"]

    def test_tokens_per_block(self, tmp_path: Path) -> None:
        path = tmp_path / "odd.jsonl"
        path.write_text('{"input_length": 20, "hash_ids": [0, 1, 2]}\n' * 2)
        assert row(printed("replay", path, "--num-blocks", 9, "--tokens-per-block", 7), "hit tokens") == ["20", "20"]
        result = invoke("replay", path, "--num-blocks", 9)
        assert result.exit_code == 1
        assert "odd.jsonl, line 1: input_length 20 does not make 3 hash_ids" in result.output

    def test_an_empty_trace(self, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").touch()
        result = invoke("replay", tmp_path / "empty.jsonl", "--num-blocks", 9)
        assert result.exit_code == 1
        assert "there is no request in it" in result.output

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ([], "say either --num-blocks or --server"),
            (["--num-blocks", "9", "--server", NO_SERVER], "say either --num-blocks or --server"),
            (["--server", NO_SERVER, "--policy", "lru"], "--policy and --block-size are the server's own"),
            (["--num-blocks", "0"], "0 is not in the range x>=1"),
            (["--num-blocks", "9", "--policy", "oracle"], "policy 'oracle' is neither built in"),
        ],
    )
    def test_bad_usage(self, trace: Path, options: list[str], words: str) -> None:
        result = invoke("replay", trace, *options)
        assert result.exit_code == 2
        assert words in result.output

    def test_no_such_file(self, tmp_path: Path) -> None:
        result = invoke("replay", tmp_path / "none", "--num-blocks", 9)
        assert result.exit_code == 2
        assert "does not exist" in result.output

    def test_a_hash_id_is_a_block_of_the_server_whatever_its_size(self, trace: Path) -> None:
        with running_server("--num-blocks", "100", "--block-size", "16") as address:
            result = json.loads(printed("replay", trace, "--server", address, "--json"))
        assert result["whole"]["num_hit_tokens"] == 1024 + 1200


class TestTree:
    def cache(self) -> PrefixCache:
        cache = PrefixCache(100, block_size=2)
        for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 4, 9, 10]):
            lease = cache.match_prefix(tokens, ("m", "w7"), num_tokens=6)
            cache.insert(lease, tokens)
            if tokens[4] != 7:
                cache.release(lease)
        return cache

    def drawn(self, **options: int) -> list[str]:
        console = make_console()
        with console.capture() as capture:
            console.print(draw(self.cache().dump(**{"max_span_tokens": 10, **options}), "top"))
        return capture.get().splitlines()

    def test_lines(self) -> None:
        assert self.drawn() == [
            "top",
            "└── ('m', 'w7')",
            "    └── 1 2 3 4  4 tokens in 2 blocks: 0 1, 1 lock, age 0",
            "        ├── 5 6  2 tokens in 1 block: 2, age 4",
            "        ├── 7 8  2 tokens in 1 block: 3, 1 lock, age 2",
            "        └── 9 10  2 tokens in 1 block: 4, age 0",
        ]

    def test_what_is_left_out_is_counted(self) -> None:
        assert self.drawn(max_nodes=3, max_span_tokens=2)[2:] == [
            "    └── 1 2 …  4 tokens in 2 blocks: 0 …, 1 lock, age 0",
            "        ├── 5 6  2 tokens in 1 block: 2, age 4",
            "        └── … 2 more",
        ]

    def test_from_a_server(self, server: str) -> None:
        with Client(server) as client:
            lease = client.match_prefix([7, 8, 9], ("tree", "[bold]"), num_tokens=3)
            client.insert(lease, [7, 8, 9])
            shown = printed("tree", server, "-n", "tree")
            assert shown.startswith(f"{server}: ")
            assert "('tree', '[bold]')" in shown
            assert re.search(r"7 8 9  3 tokens in 3 blocks: \d+ \d+ \d+, 1 lock, age 0", shown)
            top, node = json.loads(printed("tree", server, "-n", "tree", "-n", "[bold]", "--json"))
            assert (top["depth"], top["num_children"], top["namespace"]) == (0, 1, ["tree", "[bold]"])
            assert (node["first_tokens"], node["first_block_ids"]) == ([7, 8, 9], list(lease.block_table))
            assert json.loads(printed("tree", server, "-n", "nothing", "--json")) == []
            assert "--max-nodes shows more" in printed("tree", server, "--max-nodes", 1)
            client.release(lease)


class TestStats:
    def test_tables(self, server: str) -> None:
        with Client(server) as client:
            lease = client.match_prefix([1, 2, 3], ("stats",), num_tokens=4)
            client.insert(lease, [1, 2, 3])
            shown = printed("stats", server)
            client.release(lease)
        assert shown.startswith(f"{server}: 1,000 blocks of 1 token, lru, up 0:")
        assert row(shown, "leased") == ["1", "0.10 %"]
        assert row(shown, "protected") == ["3", "0.30 %"]
        assert row(shown, "leases now") == ["1"]
        assert int(row(shown, "MatchPrefix")[0]) >= 1
        assert re.search(r"\d (µs|ms|s)\b", shown)

    def test_json(self, server: str) -> None:
        printed("stats", server)
        shown = json.loads(printed("stats", server, "--json"))
        assert shown["num_free_blocks"] + shown["num_leased_blocks"] + shown["num_cached_blocks"] == 1000
        assert shown["uptime_s"] > 0
        assert shown["num_calls"]["GetStats/OK"] >= 1
        assert set(shown["latencies"]["GetStats"]) == {"p50_s", "p99_s", "max_s", "num_samples"}

    def test_watch_in_a_pipe_is_a_line_a_round(self, server: str) -> None:
        lines = printed("stats", server, "--watch", "--interval", "0.1", "--count", "3").splitlines()
        assert len(lines) == 3
        assert all(re.match(r"\d+ calls/s, \d+ prompt tokens/s, .* blocks evicted/s; \d+ free", line) for line in lines)

    def test_watch_as_json(self, server: str) -> None:
        lines = printed("stats", server, "--watch", "--interval", "0.1", "--count", "2", "--json").splitlines()
        assert [0 < json.loads(line)["rates"]["num_calls"] < 1000 for line in lines] == [True, True]

    def test_watch_on_a_terminal_shows_rates(self, server: str) -> None:
        status, out, err = run(
            "stats", server, "--watch", "--interval", "0.1", "--count", "2", env={**os.environ, "FORCE_COLOR": "1"}
        )
        assert (status, err) == (0, "")
        assert "in a second" in out

    def test_ctrl_c_ends_a_watch_quietly(self, server: str) -> None:
        with radix_cache("stats", server, "--watch", "--interval", "0.1") as process:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")


class TestShow:
    def test_no_colour_in_a_pipe(self, server: str) -> None:
        assert "\x1b" not in run("tree", server)[1]

    def test_no_color_is_respected(self, server: str) -> None:
        environment = {**os.environ, "FORCE_COLOR": "1", "NO_COLOR": "1"}
        out = run("stats", server, env=environment)[1]
        assert not re.search(r"\x1b\[(3|9)\d", out)

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(None, "-"), (4.2e-5, "42 µs"), (0.0042, "4.20 ms"), (0.42, "420.00 ms"), (1234.5, "1,234.50 s")],
    )
    def test_duration(self, seconds: float | None, text: str) -> None:
        assert duration(seconds) == text

    def test_numbers(self) -> None:
        assert (count(1234567), percent(0.12345), percent(None)) == ("1,234,567", "12.35 %", "-")
