"""Every code block of the README is run; what is shown as output is what comes out."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from test_cli_serve import running_server

from radix_cache.cli.app import app
from radix_cache.cli.serve import serve

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:50051"


class Block(NamedTuple):
    language: str
    text: str
    output: str | None  # of the ``text`` block right behind it


def blocks() -> Iterator[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for (language, text), (following, output) in zip(found, [*found[1:], ("", "")], strict=True):
        if language != "text":
            yield Block(language, text, output if following == "text" else None)


PYTHON = [block for block in blocks() if block.language == "python"]
SHELL = [line for block in blocks() if block.language == "sh" for line in block.text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server as the README starts it, but for the port."""
    (line,) = (line for line in SHELL if line.startswith("radix-cache serve"))
    arguments = shlex.split(line, comments=True)[2:]
    at = arguments.index("--listen")
    assert arguments[at + 1] == ADDRESS
    with running_server(*arguments[:at], *arguments[at + 2 :]) as started:
        yield started


def test_all_blocks_are_known() -> None:
    assert {block.language for block in blocks()} == {"python", "sh"}
    assert len(PYTHON) == 3
    assert README.count("```") % 2 == 0


@pytest.mark.parametrize("block", PYTHON, ids=["in_process", "remote", "tenants"])
def test_python(block: Block, address: str) -> None:
    assert block.output is not None, "a block without output shows nothing"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text.replace(ADDRESS, address), "README.md", "exec"), {})
    assert printed.getvalue() == block.output


def test_the_first_example_has_twelve_lines() -> None:
    assert len([line for line in PYTHON[0].text.splitlines() if line]) <= 12


@pytest.mark.parametrize("line", [line for line in SHELL if not line.startswith("radix-cache")])
def test_other_commands_exist(line: str) -> None:
    program, verb, *rest = shlex.split(line, comments=True)
    if program == "make":
        assert re.search(rf"^{verb}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return
    assert (program, verb) == ("pip", "install")
    (extra,) = re.fullmatch(r"\.\[(\w+)\]", rest[0]).groups()
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("radix-cache")])
def test_our_commands(line: str, address: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "tokens": list(range(40))}) + "\n")
    arguments = shlex.split(line.replace(ADDRESS, address).replace("trace.jsonl.gz", str(trace)), comments=True)[1:]
    if arguments[0] == "serve":
        serve.make_context("serve", arguments[1:])  # parses; `address` has run it
        return
    if arguments[0] == "top":
        arguments += ["--count", "1", "--interval", "60"]  # else it goes on; the latter is its patience too
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("https://"):
            assert (ROOT / target).exists(), target
