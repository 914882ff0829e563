"""Every block of docs/torch.md is run, in its order; what is shown as output is what comes out."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_process import ServerProcess

pytest.importorskip("torch")
pytest.importorskip("transformers")

from radix_cache_service.command import serve

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "torch.md"
TEXT = PAGE.read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:50051"
SHOWN_FILE = "/run/pool.json"


def blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    started: list[ServerProcess] = []
    yield started
    for server in started:
        server.stop()


def test_each_block_prints_what_it_says(servers: list[ServerProcess], tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    printed = io.StringIO()
    for language, text in blocks():
        code = text.replace(SHOWN_FILE, str(tmp_path / "pool.json"))
        if language == "python":
            if servers:
                code = code.replace(ADDRESS, servers[0].address)
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "docs/torch.md", "exec"), names)
        elif language == "sh":
            serve.make_context("serve", shlex.split(code)[2:])  # parses
            servers.append(ServerProcess(num_blocks=64, block_size=4, pool_descriptor=tmp_path / "pool.json"))
        else:
            assert printed.getvalue() == text
            printed = io.StringIO()
    assert printed.getvalue() == ""
    assert servers[0].finish()[0] == 1  # with the owner


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", TEXT):
        assert (PAGE.parent / target).exists(), target
