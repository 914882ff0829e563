"""Every block of docs/engines.md is run, in its order, against real servers, and the calls of each section are counted.

The sections share their names, as cells of a notebook do. ``time.sleep`` in them moves the clocks of the leases.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from client_help import wait_until
from service_process import ServerProcess, stub_to

from radix_cache_service.pb import prefix_cache_pb2 as pb

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
ADDRESSES = ("127.0.0.1:50051", "127.0.0.1:50052")


class Section(NamedTuple):
    title: str
    blocks: list[tuple[str, str]]  # language and text

    @property
    def code(self) -> str:
        return "\n".join(text for language, text in self.blocks if language == "python")

    @property
    def output(self) -> str:
        return "".join(text for language, text in self.blocks if language == "text")


def sections() -> Iterator[Section]:
    for part in re.split(r"^##+ ", GUIDE, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        yield Section(title, re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def stated_calls() -> dict[str, dict[str, int]]:
    """What the table says that each section costs."""
    rows = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \|.*\| (.+?) \|$", GUIDE, re.MULTILINE)
    assert all(anchor == re.sub("[^a-z0-9_ -]", "", title.lower()).replace(" ", "-") for title, anchor, _ in rows)
    return {
        title: {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", calls)} for title, _, calls in rows
    }


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    path = tmp_path / "now"
    path.write_text("0")
    return path


@pytest.fixture
def servers(clock: Path) -> Iterator[list[ServerProcess]]:
    settings = {"num_blocks": 64, "block_size": 4, "test_clock": clock}
    with ServerProcess(**settings) as first, ServerProcess(**settings) as second:
        yield [first, second]


def num_calls(servers: list[ServerProcess]) -> Counter[str]:
    """How many calls of each method they have answered, but for questions about them."""
    found: Counter[str] = Counter()
    for server in servers:
        with stub_to(server.address) as stub:
            for key, number in stub.GetStats(pb.GetStatsRequest(), timeout=60).num_calls.items():
                found[key.partition("/")[0]] += number
    del found["GetStats"]
    return found


def moving_time(clock: Path) -> Any:
    """A module ``time`` whose ``sleep`` takes no time, but moves its own clock and that of the leases."""
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds
        clock.write_text(str(slept))

    return SimpleNamespace(sleep=sleep, monotonic=lambda: time.monotonic() + slept, time_ns=time.time_ns)


def test_each_section_prints_and_costs_what_it_says(
    servers: list[ServerProcess], clock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = stated_calls()
    names: dict[str, Any] = {}
    expected = num_calls(servers)
    for section in sections():
        if section.title not in stated:
            continue
        code = section.code
        for shown, server in zip(ADDRESSES, servers, strict=True):
            code = code.replace(shown, server.address)
        printed = io.StringIO()
        with monkeypatch.context() as patched, contextlib.redirect_stdout(printed):
            patched.setitem(sys.modules, "time", moving_time(clock))
            exec(compile(code, f"docs/engines.md, {section.title}", "exec"), names)
        assert (section.title, printed.getvalue()) == (section.title, section.output)
        expected.update(stated.pop(section.title))
        with contextlib.suppress(
            AssertionError
        ):  # a message may be under way: not every section waits for its last one
            wait_until(lambda: num_calls(servers) == expected)
        assert (section.title, num_calls(servers)) == (section.title, expected)
    assert not stated, "the table has rows without a section"


def test_excerpts_are_what_is_in_the_files() -> None:
    excerpts = [block for section in sections() for _, block in section.blocks if block.startswith("# examples/")]
    assert excerpts
    for excerpt in excerpts:
        path, _, text = excerpt.removeprefix("# ").partition("\n")
        lines = [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
        assert "\n".join(map(str.strip, text.splitlines())) in "\n".join(lines)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", GUIDE):
        assert (ROOT / "docs" / target).exists(), target
