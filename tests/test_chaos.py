"""The chaos harness (`tests/chaos`): a short run in which all goes wrong once at least, and proof that it can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos.growth import Growth, Sample

ROOT = Path(__file__).parent.parent
SECONDS = 60


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, the figures, and all that was said."""
    figures = folder / "figures.json"
    command = [sys.executable, "-m", "tests.chaos", "--json", str(figures), *arguments]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=200)
    said = ended.stdout + ended.stderr
    assert figures.exists(), said
    return ended.returncode, json.loads(figures.read_text()), said


@pytest.mark.timeout(240)
def test_nothing_is_corrupted_or_lost_while_everything_breaks(tmp_path: Path) -> None:
    status, figures, said = run(tmp_path, "--seconds", str(SECONDS), "--seed", "1")
    assert (status, figures["violations"]) == (0, []), said
    assert "every promise was kept" in said
    assert [name for name, count in figures["faults"].items() if not count] == [], said
    totals = figures["totals"]
    assert [name for name, count in totals.items() if not count] == [], said
    assert totals["num_checked_blocks"] > 100 * figures["num_blocks"]
    census = figures["census"]
    assert census["num_taken"] > 1
    assert census["num_leases"] == 0
    assert census["num_acknowledged_and_cached"] > 0
    assert census["num_evicted_blocks"] > 10 * figures["num_blocks"], "the pool was not too small"


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
TWO_OWNERS = WRONG_KV | {  # whichever of them is seen first
    "a block table that cannot be one",
    "a block is cached under other tokens",
    "a block is stored twice",
    "a cached block has two places",
    "the integrity check failed",
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("plant", "what"),
    [
        ("write-after-release", WRONG_KV),
        ("ignore-valid-until", WRONG_KV),
        ("hand-out-twice", TWO_OWNERS),
        ("forget-inserts", {"what a lease has published is not found"}),
    ],
)
def test_a_planted_fault_is_caught_in_the_act(tmp_path: Path, plant: str, what: set[str]) -> None:
    status, figures, said = run(tmp_path, "--seconds", "150", "--seed", "1", "--plant", plant)  # ends with the first
    assert status == 1, said
    found = figures["violations"][0]
    assert any(found["what"].startswith(each) for each in what), said
    assert f"BROKEN: {found['what']}" in said
    if what != TWO_OWNERS:  # the census and the mirror of the events may be the first to see that
        assert found["who"].startswith("engine ")
        assert found["when"] > 0
    if any(found["what"].startswith(each) for each in WRONG_KV):
        assert "its lease no. " in found["last_written_by"]
