"""examples/cluster.py in a short setting: four nodes, one of them killed and brought back in the midst of it."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("dynamo") is None:
    pytest.skip("ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'", allow_module_level=True)

ROOT = Path(__file__).parent.parent


def play(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / "cluster.py"), *arguments]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_router_finds_what_is_cached_and_spreads_the_load() -> None:
    found: dict[str, Any] = json.loads(play("--requests", "500", "--blocks", "800", "--json"))
    robin, router, disturbed = found["runs"]
    assert [run["name"] for run in found["runs"]] == ["round robin", "router", "router, node-2 killed"]
    for run in found["runs"]:
        assert sum(work["num_requests"] for work in run["nodes"].values()) == 500
    assert router["hit_rate"] >= 1.8 * robin["hit_rate"]
    assert router["spread"] <= 1.5
    assert disturbed["hit_rate"] > robin["hit_rate"]
    nodes = disturbed["nodes"]
    assert (
        0
        < nodes["node-2"]["num_requests"]
        < min(nodes[name]["num_requests"] for name in ("node-1", "node-3", "node-4"))
    )


def test_what_is_printed_says_it_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    cluster = importlib.import_module("cluster")
    work = {f"node-{number}": cluster.Work(10, 1000, 100 * number) for number in (1, 2, 3)}
    runs = [cluster.Run(name, 1.0, work) for name in ("round robin", "router")]
    runs.append(cluster.Run("router, node-2 killed", 1.0, work, (0.002, 0.5), 3))
    found = cluster.verdict(runs)
    assert (found["gain"], round(found["spread"], 3), found["is_good"]) == (1.0, 1.125, False)
    cluster.show(runs, found)
    said = capsys.readouterr().out
    assert len(re.findall(r"^ *node-\d +10 +1,000 ", said, re.MULTILINE)) == 9
    assert "hit rate: 1.00 times that of round robin" in said
    assert "noticed the kill after 2 ms, the return after 500 ms" in said
