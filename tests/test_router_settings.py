"""The settings of a router, its command, and what docs/routing.md says of them and of its metrics."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from scraping import read_metrics
from service_process import ROUTE, RouterProcess, StartFailed
from test_operations_docs import row

from radix_cache.cli.app import app
from radix_cache.errors import InvalidArgument
from radix_cache_service.router.command import ROUTER_SETTINGS, route
from radix_cache_service.router.config import RouterConfig
from radix_cache_service.settings import read_settings

needs_dynamo = pytest.mark.skipif(find_spec("dynamo") is None, reason="ai-dynamo-runtime is not installed")
TEXT = (Path(__file__).parent.parent / "docs" / "routing.md").read_text(encoding="utf-8")
TOKEN = "0123456789abcdef-router"


def rows(section: str) -> list[str]:
    """The rows of a section's table, without its head."""
    part = TEXT.partition(f"### {section}\n")[2].partition("\n##")[0]
    return [line for line in part.splitlines() if line.startswith("| `")]


@needs_dynamo
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": ()}, "listen needs at least one address"),
        ({"listen": ("nowhere",)}, "listen: 'nowhere' is neither"),
        ({"nodes": ("127.0.0.1:1",)}, "nodes: '127.0.0.1:1' is not NAME=ADDRESS"),
        ({"nodes": ("a=x",)}, "node a: 'x' is neither host:port nor unix:/path"),
        ({"nodes": ("a b=127.0.0.1:1",)}, "a node's name is 1 to 64 letters"),
        ({"nodes": ("a=dns:///localhost:1",)}, "node a: 'dns:///localhost:1' has more than a host and a port"),
        ({"nodes": ("a=ipv4:127.0.0.1:1",)}, "node a: 'ipv4:127.0.0.1:1' has more than a host and a port"),
        ({"nodes": ("a=::1:1",)}, "node a: '::1:1' has more than a host and a port"),
        ({"nodes": ("a=127.0.0.1:1", "a=127.0.0.1:2")}, "nodes: node a is there already, at 127.0.0.1:1"),
        ({"nodes": ("a=127.0.0.1:1", "b=127.0.0.1:1")}, "nodes: nodes a and b are both at 127.0.0.1:1"),
        ({"block_size": 0}, "block_size is at least 1"),
        ({"heartbeat_s": 0}, "heartbeat_s is a number of seconds above 0"),
        ({"request_ttl_s": -1}, "request_ttl_s"),
        ({"max_load": 0.9}, "max_load is at least 1"),
        ({"max_load": float("nan")}, "max_load is at least 1"),
        ({"prefill_weight": -1}, "prefill_weight is at least 0"),
        ({"request_weight": -1}, "request_weight is at least 0"),
        ({"max_requests": 0}, "max_requests is at least 1"),
        ({"log_level": "loud"}, "log_level is one of"),
        ({"metrics_listen": "9465"}, "metrics_listen: '9465' is not host:port"),
        ({"tls_certificate": "x.pem"}, "tls_certificate and tls_private_key go together"),
        ({"node_tls_certificate": "x.pem"}, "certificate and private_key go together"),
        ({"node_token_file": "/nowhere/token"}, "node_token_file /nowhere/token: No such file"),
        ({"tokens_file": "/nowhere/tokens"}, "tokens_file /nowhere/tokens"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        RouterConfig(**settings)


@needs_dynamo
def test_the_token_for_nodes_leaves_the_machine_only_if_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    settings: dict[str, Any] = {"nodes": ("a=10.0.0.1:50051",), "node_token_file": str(path)}
    with pytest.raises(InvalidArgument, match=r"would go to 10\.0\.0\.1:50051 in the clear") as refused:
        RouterConfig(**settings)
    assert TOKEN not in str(refused.value)
    RouterConfig(**settings, node_tls=True)
    RouterConfig(**settings, allow_plaintext_tokens=True)
    path.write_text("short")
    with pytest.raises(InvalidArgument, match="has no token in it") as refused:
        RouterConfig(**settings)


@needs_dynamo
def test_settings_come_from_flags_variables_and_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text('nodes = ["a=127.0.0.1:1"]\nmax_load = 2\nrequest_weight = 1\n')
    environ = {
        "RADIX_CACHE_ROUTE_CONFIG": str(path),
        "RADIX_CACHE_ROUTE_MAX_LOAD": "3",
        "RADIX_CACHE_ROUTE_REQUEST_WEIGHT": "2",
        "RADIX_CACHE_NUM_BLOCKS": "the server's, not ours",
    }
    config = ROUTER_SETTINGS.read({"max_load": 4.0}, environ)
    assert (config.nodes, config.max_load, config.request_weight) == (("a=127.0.0.1:1",), 4.0, 2)
    with pytest.raises(InvalidArgument, match="did you mean RADIX_CACHE_ROUTE_NODES"):
        ROUTER_SETTINGS.read({}, {"RADIX_CACHE_ROUTE_NODE": "a=127.0.0.1:1"})
    with pytest.raises(InvalidArgument, match=r"max_load is at least 1.*\(RADIX_CACHE_ROUTE_MAX_LOAD\)"):
        ROUTER_SETTINGS.read({}, {"RADIX_CACHE_ROUTE_MAX_LOAD": "0"})
    assert read_settings({}, {"RADIX_CACHE_ROUTE_MAX_LOAD": "3"}).num_blocks == 65536


@needs_dynamo
def test_the_command_checks_its_settings() -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["route", "--node", "a=127.0.0.1:1", "--node", "b=unix:/b.sock", "--check"])
    assert (good.exit_code, good.output) == (0, "the settings are good\n")
    bad = runner.invoke(app, ["route", "--node", "a"])
    assert bad.exit_code == 2
    assert "nodes: 'a' is not NAME=ADDRESS (--nodes)" in bad.output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("raise ModuleNotFoundError(\"No module named 'dynamo'\")", "No module named 'dynamo'"),
        ("raise ImportError('libfoo.so.1: cannot open')", r"libfoo\.so\.1: cannot open"),
        ("", "cannot import name 'SelectionService'"),
    ],
    ids=["missing", "broken", "another version"],
)
@pytest.mark.parametrize("is_check", [True, False])
def test_the_extra_is_named_where_it_can_not_be_used(tmp_path: Path, content: str, said: str, is_check: bool) -> None:
    package = tmp_path / "dynamo" / "llm"
    package.mkdir(parents=True)
    (tmp_path / "dynamo" / "__init__.py").touch()
    (package / "__init__.py").write_text(content)
    command = [sys.executable, *ROUTE, "--node", "a=127.0.0.1:1", *["--check"] * is_check]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=60)
    assert ended.returncode == 2
    assert "route needs more: pip install 'radix-cache[service,router]' (on Linux, x86-64)" in ended.stderr
    assert re.search(said, ended.stderr), ended.stderr


@needs_dynamo
def test_a_taken_port_ends_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartFailed) as failed:
            RouterProcess(address)
    assert failed.value.status == 1
    assert f"cannot listen on {address}" in failed.value.errors


@needs_dynamo
@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_good_order(name: signal.Signals) -> None:
    assert RouterProcess(node="a=127.0.0.1:1", heartbeat=0.5, log_level="error").stop(name) == (0, "")


def test_the_documented_settings_are_those_that_there_are() -> None:
    assert rows("Settings of the router") == [row(setting) for setting in ROUTER_SETTINGS.by_name.values()]


@needs_dynamo
def test_the_documented_metrics_are_those_that_there_are() -> None:
    with RouterProcess(metrics_listen="127.0.0.1:0") as router:
        metrics = read_metrics(router.metrics_address).values()
    seen = [
        f"| `{metric.name + '_total' * (metric.type == 'counter')}` | {metric.type} | {metric.documentation} |"
        for metric in metrics
        if not metric.name.startswith("process_")
    ]
    assert rows("Metrics of the router") == seen


def test_commands_of_the_page_are_understood() -> None:
    lines = re.findall(r"^(radix-cache route .*?)(?: +#.*)?$", TEXT, re.MULTILINE)
    assert lines
    for line in lines:
        route.make_context("route", line.split()[2:])
    assert click.Context(app).command.get_command(click.Context(app), "route") is route  # type: ignore[attr-defined]
