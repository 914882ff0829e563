"""The demos as processes, in a short setting: they end well, say what they did, and notice what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def demo(*arguments: str, trace: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), *arguments]
    environment = {**os.environ, "TRACE": trace}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, env=environment)


def figures(output: str, name: str) -> list[int]:
    (line,) = (line for line in output.splitlines() if line.strip().startswith(name + "  "))
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", line.strip().removeprefix(name))]


@pytest.mark.parametrize(
    ("options", "script"), [([], "chat.py"), (["DEMO=light"], "demo.py"), (["TRACE=x.jsonl"], "demo.py")]
)
def test_what_make_runs(options: list[str], script: str) -> None:
    command = ["make", "--dry-run", "demo", *options]
    planned = subprocess.run(command, check=True, capture_output=True, text=True, cwd=EXAMPLES.parent).stdout
    (first, *_) = re.findall(r"python examples/(\w+\.py)", planned)
    assert first == script


def test_a_real_model_that_is_not_there_is_said_so() -> None:
    """Status 3, on which make runs the light demo."""
    code = "import sys; sys.modules['transformers'] = sys.modules['torch'] = None; import chat; sys.exit(chat.main())"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, env=environment)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr == "no real model here: torch is not installed: pip install 'radix-cache[demo]'\n"


@pytest.mark.slow
def test_a_real_model_says_the_same_with_the_cache() -> None:
    command = [sys.executable, str(EXAMPLES / "chat.py"), "--new-tokens", "6"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    if ended.returncode == 3:
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("the same ") == 4
    assert "BROKEN" not in ended.stdout


def test_engines_share_a_pool_that_is_too_small() -> None:
    ended = demo("--conversations", "25", "--blocks", "150")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "BROKEN" not in ended.stdout
    assert ended.stdout.count("holds: ") == 2
    assert "0 leased" in ended.stdout
    first, second, both = figures(ended.stdout, "requests finished")
    assert first + second == both
    assert min(first, second) > 25
    for name in ("requests aborted by their user", "refusals for lack of blocks", "requests preempted and resumed"):
        assert figures(ended.stdout, name)[2] > 0, name
    assert figures(ended.stdout, "tokens found in the cache instead")[2] > 10_000
    assert figures(ended.stdout, "blocks evicted")[0] > 0
    assert "('demo-model', 'weights-1')" in ended.stdout
    assert "\x1b" not in ended.stdout
    assert ended.stderr == ""


def test_a_trace_is_replayed_through_a_server(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "input_length": 1200, "hash_ids": [0, 1, number]} for number in (2, 3, 4, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = demo("--trace-blocks", "4", trace=str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert figures(ended.stdout, "prefill tokens saved")[:2] == [3072, 3072]
    assert figures(ended.stdout, "prefill tokens saved")[2] == 3248
    assert "both found the same" in ended.stdout


def test_a_pool_that_cannot_hold_one_request_is_refused() -> None:
    ended = demo("--blocks", "5")
    assert ended.returncode == 2
    assert "--blocks is at least" in ended.stderr


@pytest.fixture
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("examples_importable")
class TestKVMemory:
    def test_wrong_blocks_are_noticed(self, tmp_path: Path) -> None:
        from kv_memory import KVMemory

        KVMemory.create(tmp_path / "kv", num_blocks=4, block_size=2)
        memory = KVMemory(tmp_path / "kv", block_size=2)
        memory.compute([3, 0], [7, 8, 9], 0, 3)
        assert memory.check([3, 0], [7, 8, 9]) == 3
        with pytest.raises(AssertionError, match="position 2 of 3: block 1 holds other KV"):
            memory.check([3, 1], [7, 8, 9])
        with pytest.raises(AssertionError, match="position 0 of 3"):
            memory.check([3, 0], [6, 8, 9])
        memory.compute([0], [1], 0, 1)  # by an engine that was handed block 0 as well
        with pytest.raises(AssertionError, match="block 0 holds other KV"):
            memory.check([3, 0], [7, 8, 9])

    def test_kv_depends_on_all_before(self, tmp_path: Path) -> None:
        from kv_memory import KVMemory

        KVMemory.create(tmp_path / "kv", num_blocks=4, block_size=2)
        memory = KVMemory(tmp_path / "kv", block_size=2)
        memory.compute([0, 1], [1, 2, 5], 0, 3)
        memory.compute([2, 3], [1, 3, 5], 0, 3)
        assert memory.sample([0, 1], 3) != memory.sample([2, 3], 3)


@pytest.mark.usefixtures("examples_importable")
def test_an_engine_runs_in_process_too(tmp_path: Path) -> None:
    """The same engine over a `PrefixCache`: the verbs are the same."""
    from engine import Engine
    from kv_memory import KVMemory
    from workload import conversations, run

    from radix_cache import PrefixCache

    KVMemory.create(tmp_path / "kv", num_blocks=100, block_size=16)
    cache = PrefixCache(100, block_size=16)
    engine = Engine(cache.batch, KVMemory(tmp_path / "kv", block_size=16), block_size=16)
    *_, num_ended = run(engine, conversations(seed=3, engine=0, number=20))
    assert num_ended == 20
    assert engine.totals.num_preempted > 0
    assert engine.totals.num_checked_tokens > engine.totals.num_reused_tokens > 0
    cache.check_integrity()
    assert (cache.stats().num_leases, cache.stats().num_leased_blocks) == (0, 0)
