"""The chaos harness (`tests/chaos`): a short run in which all goes wrong once at least, and proof that it can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chaos.growth import Growth, Sample
from chaos.judge import Judge
from chaos.request import Request, Violation
from chaos.routes import Op

ROOT = Path(__file__).parent.parent
SECONDS = 60


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, the figures, and all that was said."""
    figures = folder / "figures.json"
    command = [sys.executable, "-m", "tests.chaos", "--json", str(figures), *arguments]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=500)
    said = ended.stdout + ended.stderr
    assert figures.exists(), said
    return ended.returncode, json.loads(figures.read_text()), said


@pytest.mark.timeout(550)
def test_nothing_is_corrupted_or_lost_while_everything_breaks(tmp_path: Path) -> None:
    for seconds in (SECONDS, 5 * SECONDS):  # the latter for a machine that is too slow for it all in a minute
        status, figures, said = run(tmp_path, "--seconds", str(seconds), "--seed", "1")
        assert (status, figures["violations"]) == (0, []), said
        assert "every promise was kept" in said
        if is_enough(figures):
            break
    assert [name for name, count in figures["faults"].items() if not count] == [], said
    totals = figures["totals"]
    assert [name for name, count in totals.items() if not count] == [], said
    assert totals["num_checked_blocks"] > 100 * figures["num_blocks"]
    census = figures["census"]
    assert census["num_taken"] > 1
    assert census["num_leases"] == 0
    assert census["num_acknowledged_and_cached"] > 0
    assert census["num_evicted_blocks"] > 10 * figures["num_blocks"], "the pool was not too small"


def is_enough(figures: dict[str, Any]) -> bool:
    """Whether all that can happen has happened, and often."""
    num_checked, num_evicted = figures["totals"]["num_checked_blocks"], figures["census"]["num_evicted_blocks"]
    is_all = all(figures["faults"].values()) and all(figures["totals"].values()) and figures["census"]["num_taken"] > 1
    return is_all and num_checked > 100 * figures["num_blocks"] and num_evicted > 10 * figures["num_blocks"]


def test_memory_that_grows_is_told_from_memory_that_settles() -> None:
    minutes = [step / 10 for step in range(50)]
    for value, slope in (
        (lambda minute: 50 + 2 * minute, 2.0),
        (lambda minute: 50 + min(minute, 2.0), 0.0),
        (lambda minute: 50 + 0.2 * (round(minute * 10) % 2), 0.0),
    ):
        growth = Growth(1000, 1, [Sample(60 * minute, value(minute)) for minute in minutes])
        assert growth.per_minute == pytest.approx(slope, abs=0.05)
        assert growth.is_flat is (slope < 1)
    assert not Growth(49, 1, growth.samples).is_flat


WRONG_KV = {"a private block was written by somebody else", "a cached block holds other KV"}
# A server that does what it must not do breaks many promises at once; which is seen first, and by whom, is chance.
WRONG_TREE = WRONG_KV | {
    "a block is cached under other tokens",
    "a block is removed that was not stored",
    "a block is stored behind one that is not there",
    "a block is stored twice",
    "a block table that cannot be one",
    "a cached block has two places",
    "a lease is not what its engine was told",
    "inserted blocks are neither cached nor evicted nor reset",
    "inserts were answered that",
    "something is leased that was not",
    "the blocks of the metrics do not add up",
    "the counters are not what they were",
    "the events do not tell what is cached",
    "the figures do not add up",
    "the integrity check failed",
    "the server does not answer",
    "the server has ended by itself",  # once it has seen for itself that its cache is not whole
    "the server did not start",  # on a journal whose calls come out otherwise now
    "the server had internal errors",
    "the tree has other blocks than are counted",
    "the tree is not what it was",
    "what a lease has published is not found",
}


@pytest.mark.timeout(550)
@pytest.mark.parametrize(
    ("plant", "what"),
    [
        ("write-after-release", WRONG_KV),
        ("ignore-valid-until", WRONG_KV),
        ("hand-out-twice", WRONG_TREE),
        ("forget-inserts", WRONG_TREE),
    ],
)
def test_a_planted_fault_is_caught_in_the_act(tmp_path: Path, plant: str, what: set[str]) -> None:
    status, figures, said = run(tmp_path, "--seconds", "400", "--seed", "1", "--plant", plant)  # ends with the first
    assert status == 1, said
    found = figures["violations"][0]
    is_answer = found["what"].endswith("got an error that it cannot get")
    assert any(found["what"].startswith(each) for each in what) or (what == WRONG_TREE and is_answer), said
    assert f"BROKEN: {found['what']}" in said
    if "who" in found:  # else it was seen at rest, by the census, or by those who only look on
        assert found["who"].startswith("engine ")
        assert found["when"] > 0
    if any(found["what"].startswith(each) for each in WRONG_KV):
        assert "its lease no. " in found["last_written_by"]


@pytest.mark.parametrize("num_found", [4, 2])
def test_what_a_lease_has_published_must_be_found(num_found: int) -> None:
    """The question of an engine that a forgotten insert answers wrongly."""
    judge = Judge(SimpleNamespace(valid_until=10.0, epoch="E"), lambda: 5.0, 8, 1)
    judge.begin()
    request = Request([1, 2, 3, 4, 5], ("model",), 9, 2, lease=SimpleNamespace(lease_id="a"))
    op = Op("probe", request, num_before=4, value=num_found)
    if num_found == 4:
        judge.judge_probe(op)
        return
    with pytest.raises(Violation, match="what a lease has published is not found"):
        judge.judge_probe(op)
