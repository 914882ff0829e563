"""The lab's reports in a real browser, where Chromium is installed: all is drawn, nothing loaded, no text cut off."""

from __future__ import annotations

import json
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from lab_traces import chats
from test_lab_sweep import ROWS, row

from radix_cache.lab import compare, trace_info
from radix_cache.lab.report import comparison_report, info_report

# What the browser has made of the page, left where it can be read from outside.
_LOOK = """<script>addEventListener("load", () => {
  const all = (name) => [...document.querySelectorAll(name)];
  const inside = (text) => {
    const outer = text.closest("svg").getBoundingClientRect(), inner = text.getBoundingClientRect();
    return inner.left >= outer.left && inner.right <= outer.right && inner.top >= outer.top
      && inner.bottom <= outer.bottom && inner.width > 0;
  };
  document.title = JSON.stringify({
    drawn: all("svg").filter((svg) => svg.getBoundingClientRect().width > 300).length,
    lines: all("polyline").filter((line) => line.getTotalLength() > 50).length,
    outside: all("text").filter((text) => !inside(text)).map((text) => text.textContent),
    cells: all("td").filter((cell) => cell.getBoundingClientRect().height > 0).length,
    loaded: performance.getEntriesByType("resource").length,
  });
});</script>"""


LONG = "./policies/of/ours/shallow.py:Shallow:bonus=500,depth=2048"
SOME = [*ROWS, row(LONG, 5, 0.3), row(LONG, 10, 0.5)]


@pytest.fixture(scope="module")
def chromium() -> str:
    """The program."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("chromium is not installed")
    return found


@pytest.mark.parametrize(
    ("report", "num_charts", "num_lines", "num_cells"),
    [
        (comparison_report(compare(SOME), "block", "all requests"), 1, 3, 12),  # the optimum is one point
        (info_report("chats", trace_info(chats(1)), chats(1)), 4, 4, 12),
    ],
    ids=["compare", "info"],
)
def test_a_browser_shows_it(
    chromium: str, tmp_path: Path, report: str, num_charts: int, num_lines: int, num_cells: int
) -> None:
    page = tmp_path / "report.html"
    page.write_text(report.replace("</body>", f"{_LOOK}</body>"), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
    ]
    run = subprocess.run([chromium, *options, page.as_uri()], capture_output=True, text=True, check=True)
    seen = json.loads(unescape(run.stdout.partition("<title>")[2].partition("</title>")[0]))
    assert seen == {"drawn": num_charts, "lines": num_lines, "outside": [], "cells": num_cells, "loaded": 0}
