"""Settings from flags, variables, a file and the defaults: who goes first, and what is refused in which words."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from service_process import ServerProcess

from radix_cache.errors import InvalidArgument
from radix_cache_service import Client
from radix_cache_service.command import option, serve
from radix_cache_service.config import ServerConfig, setting
from radix_cache_service.settings import SETTINGS, read_settings, settings_of


@dataclass(frozen=True, slots=True)
class Every:
    """A field of each type that there may be."""

    whole: int = setting(1, "A number.")
    real: float = setting(0.5, "A number.", "--short")
    truth: bool = setting(False, "Yes or no.")
    text: str = setting("a", "A text.")
    several: tuple[str, ...] = setting(("a",), "Texts.")
    absent: float | None = setting(None, "A number, or nothing.")
    mode: int = setting(0o660, "A mode.", is_mode=True)


KINDS = {item.name: item for item in settings_of(Every)}


@pytest.mark.parametrize(
    ("name", "flags", "variable", "key", "value"),
    [
        ("whole", ["--whole", "7"], "7", 7, 7),
        ("real", ["--real", "0.25"], "0.25", 0.25, 0.25),
        ("real", ["--short", "2"], "2", 2, 2.0),
        ("truth", ["--truth"], "yes", True, True),
        ("truth", ["--no-truth"], "0", False, False),
        ("text", ["--text", ""], "", "", ""),
        ("several", ["--several", "x", "--several", "y"], "x, y", ["x", "y"], ("x", "y")),
        ("absent", ["--absent", "1.5"], "1.5", 1.5, 1.5),
        ("mode", ["--mode", "600"], "600", "600", 0o600),
    ],
)
def test_each_type_is_a_flag_a_variable_and_a_key(
    name: str, flags: list[str], variable: str, key: Any, value: Any
) -> None:
    said: dict[str, Any] = {}
    command = click.Command("it", params=list(map(option, KINDS.values())), callback=said.update)
    command.main(flags, standalone_mode=False)
    for found in (said[name], KINDS[name].parse_variable(variable), KINDS[name].check_key(key)):
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "variable", "key"),
    [
        ("whole", "1.5", 1.5),
        ("whole", "many", "7"),
        ("whole", "true", True),
        ("real", "much", "0.5"),
        ("real", "true", True),
        ("truth", "2", 1),
        ("several", None, "x"),
        ("several", None, [1]),
        ("text", None, 3),
        ("mode", "rw-", "999"),
    ],
)
def test_each_type_refuses_what_it_is_not(name: str, variable: str | None, key: Any) -> None:
    with pytest.raises(InvalidArgument, match="is not"):
        KINDS[name].check_key(key)
    if variable is not None:
        with pytest.raises(InvalidArgument, match="is not"):
            KINDS[name].parse_variable(variable)


def test_every_field_of_the_config_is_a_setting() -> None:
    assert list(SETTINGS) == [item.name for item in fields(ServerConfig)]
    assert all(known.help_text.endswith(".") for known in SETTINGS.values())
    flags = [flag for known in SETTINGS.values() for flag in known.flags]
    assert len(set(flags)) == len(flags)


def test_the_help_names_every_flag_that_is_not_hidden() -> None:
    shown = CliRunner().invoke(serve, ["--help"]).output
    for known in SETTINGS.values():
        assert (known.flags[0] in shown) is not known.is_hidden


def test_settings_can_be_checked_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radix_cache_service.server.serve", None)
    result = CliRunner().invoke(serve, ["--check", "--num-blocks", "5"])
    assert (result.exit_code, result.output) == (0, "the settings are good\n")
    assert CliRunner().invoke(serve, ["--check", "--num-blocks", "0"]).exit_code == 2


# Who goes first.


def toml(folder: Path, text: str) -> str:
    path = folder / "cache.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_before_a_variable_before_a_key_before_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "num_blocks = 1\nblock_size = 1\nmax_streams = 1\n")
    environ = {"RADIX_CACHE_NUM_BLOCKS": "2", "RADIX_CACHE_BLOCK_SIZE": "2"}
    config = read_settings({"num_blocks": 3}, environ, file)
    assert (config.num_blocks, config.block_size, config.max_streams) == (3, 2, 1)
    assert config.max_operations == ServerConfig().max_operations


def test_a_flag_that_says_the_default_counts(tmp_path: Path) -> None:
    file = toml(tmp_path, "num_blocks = 0")
    result = CliRunner().invoke(serve, ["--config", file, "--num-blocks", "65536", "--block-size", "0"])
    assert "block_size is at least 1" in result.output
    assert "(--block-size)" in result.output


def test_a_variable_may_name_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "num_blocks = 5")
    assert read_settings({}, {"RADIX_CACHE_CONFIG": file}).num_blocks == 5
    other = tmp_path / "other.toml"
    other.write_text("num_blocks = 6")
    assert read_settings({}, {"RADIX_CACHE_CONFIG": file}, str(other)).num_blocks == 6


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert read_settings({}, {"RADIX_CACHE_NUM_BLOCKS": "", "RADIX_CACHE_CONFIG": ""}) == ServerConfig()


def test_a_server_takes_all_three(tmp_path: Path) -> None:
    file = toml(tmp_path, 'layout_fingerprint = "file"\nmax_operations = 7\nmax_tokens = 100\n')
    environ = {"RADIX_CACHE_MAX_OPERATIONS": "8", "RADIX_CACHE_LAYOUT_FINGERPRINT": "variable"}
    with ServerProcess(config=file, layout_fingerprint="flag", environ=environ) as server:
        with Client(server.address) as client:
            said = client.describe()
        assert (said.layout_fingerprint, said.max_operations, said.max_tokens) == ("flag", 8, 100)


# What is refused.


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"RADIX_CACHE_NUM_BLOKS": "3"},
            "unknown environment variable RADIX_CACHE_NUM_BLOKS; did you mean RADIX_CACHE",
        ),
        ({"RADIX_CACHE_num_blocks": "3"}, "unknown environment variable RADIX_CACHE_num_blocks"),
        ({"RADIX_CACHE_TEST_CLOCK": "x"}, "unknown environment variable RADIX_CACHE_TEST_CLOCK"),
        ({"RADIX_CACHE_NUM_BLOCKS": "many"}, "RADIX_CACHE_NUM_BLOCKS: 'many' is not a valid integer"),
        ({"RADIX_CACHE_NUM_BLOCKS": "0"}, r"num_blocks is at least 1 .*, not 0 \(RADIX_CACHE_NUM_BLOCKS\)"),
        ({"RADIX_CACHE_LISTEN": "127.0.0.1:1,,"}, r"listen: '' is neither .* \(RADIX_CACHE_LISTEN\)"),
        (
            {"RADIX_CACHE_POLICY": "slru:protected_hits=-4"},
            r"policy 'slru:protected_hits=-4': protected_hits is .*, not -4 \(RADIX_CACHE_POLICY\)",
        ),
        ({"RADIX_CACHE_POOL_DESCRIPTOR": "/x"}, r"'/x': No such file or directory \(RADIX_CACHE_POOL_DESCRIPTOR\)"),
        (
            {"RADIX_CACHE_LISTEN": "unix:/" + 107 * "a"},
            r"has a path of 108 bytes, at most 107 \(RADIX_CACHE_LISTEN\)",
        ),
        ({"RADIX_CACHE_UDS_MODE": "rwx"}, "RADIX_CACHE_UDS_MODE: 'rwx' is not an octal number such as 660"),
        ({"RADIX_CACHE_CONFIG": "/no/such.toml"}, "configuration file /no/such.toml: No such file"),
    ],
)
def test_a_bad_variable_is_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_settings({}, environ)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_block = 3", r"unknown key 'num_block' in .*cache\.toml; did you mean num_blocks\?"),
        ("[server]\nnum_blocks = 3", r"unknown key 'server' in .*cache\.toml"),
        ('test_clock = "x"', "unknown key 'test_clock'"),
        ("num_blocks = 1.5", r"num_blocks in .*cache\.toml: 1\.5 is not a valid integer"),
        ("num_blocks = true", r"num_blocks in .*cache\.toml: True is not a valid integer"),
        ("num_blocks = 0", r"num_blocks is at least 1 .*, not 0 \(num_blocks in .*cache\.toml\)"),
        ('listen = "127.0.0.1:1"', r"listen in .*cache\.toml: '127\.0\.0\.1:1' is not a list"),
        ("num_blocks =\n", r"configuration file .*cache\.toml: .*line 1"),
        ('policy = "\udcff"', r"configuration file .*cache\.toml: .*utf-8"),
    ],
)
def test_a_bad_key_is_named_with_its_file(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "cache.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidArgument, match=words):
        read_settings({}, {}, str(file))


def test_what_only_another_setting_makes_wrong_is_named_too(tmp_path: Path) -> None:
    file = toml(tmp_path, "num_reserved_blocks = 9")
    with pytest.raises(InvalidArgument, match=r"num_reserved_blocks .*9.*\(num_reserved_blocks in .*cache\.toml\)"):
        read_settings({"num_blocks": 8}, {}, file)


def test_variables_of_others_are_left_alone() -> None:
    """Kubernetes sets these for a service that is called radix-cache."""
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_50051_TCP", "PORT_50051_TCP_ADDR")
    environ = {f"RADIX_CACHE_{name}": "tcp://10.0.0.1:50051" for name in names}
    others = {"RADIX_CACHE_METRICS_SERVICE_HOST": "10.0.0.2", "RADIX_CACHE_TRACES": "/traces", "HOME": "/root"}
    client = {"RADIX_CACHE_CLIENT_TOKEN_FILE": "/token"}
    assert read_settings({}, {**environ, **others, **client}) == ServerConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metrics_listen", "9464"),
        ("metrics_listen", "unix:/run/metrics.sock"),
        ("otlp_endpoint", "localhost:4317"),
        ("trace_share", 1.5),
        ("trace_share", float("nan")),
        ("log_format", "xml"),
        ("log_level", "INFO"),
    ],
)
def test_bad_settings_of_what_watches_the_server(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig(**{name: value})
    assert name in str(caught.value)
    assert str(value) in str(caught.value)


def test_a_bad_setting_opens_no_port_and_is_one_line(tmp_path: Path) -> None:
    socket = tmp_path / "cache.sock"
    command = [sys.executable, "-m", "radix_cache_service", "--listen", f"unix:{socket}"]
    ended = subprocess.run(
        command, env={**os.environ, "RADIX_CACHE_BLOCK_SIZE": "0"}, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1].endswith("(RADIX_CACHE_BLOCK_SIZE)")
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_limit_that_cannot_be_kept_names_its_key() -> None:
    with pytest.raises(InvalidArgument, match="namespace_limits: min_blocks is at least 0 and at most 9, not 20"):
        ServerConfig(namespace_limits=("namespace=a max_blocks=9 min_blocks=20",))
    with pytest.raises(
        InvalidArgument, match="namespace_limits: 'namespace=a max_blocks=1 max_blocks=2' is not of the"
    ):
        ServerConfig(namespace_limits=("namespace=a max_blocks=1 max_blocks=2",))
    with pytest.raises(InvalidArgument, match="'namespace=a min_blocks=2' is the second one for its namespaces"):
        ServerConfig(namespace_limits=("namespace=a max_blocks=9", "namespace=a min_blocks=2"))


def test_a_mode_in_a_file_is_a_text(tmp_path: Path) -> None:
    """A number would be read in another base than it was written in."""
    file = tmp_path / "server.toml"
    file.write_text("uds_mode = 440\n")
    result = CliRunner().invoke(serve, ["--check", "--config", str(file)])
    assert result.exit_code != 0
    assert "uds_mode" in result.output
    assert "write a mode as a text" in result.output
