"""docs/lab.md is run from top to bottom: its commands, its policy, its notebook, and what they print."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from radix_cache.cli.app import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")


def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed, num_compared = "", 0
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        if language == "text":
            assert squeezed(printed) == squeezed(text)
            num_compared += 1
        elif "class Shallow" in text:
            Path("shallow.py").write_text(text)
        elif language == "python":
            printed = run_python(text)
        else:
            printed = "".join(map(run_command, text.splitlines()))
    assert num_compared == 3
    for name in ("info.html", "curve.html", "report.html"):
        assert Path(name).stat().st_size > 1_000


def run_python(text: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "lab.md", "exec"), {})
    return printed.getvalue()


def run_command(line: str) -> str:
    program, *arguments = shlex.split(line, comments=True)
    if program == "pip":
        assert arguments == ["install", ".[lab]"]
        return ""
    assert program == "radix-cache"
    if arguments[0] == "sweep":
        arguments += ["--processes", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def squeezed(text: str) -> list[str]:
    """Lines without the blanks at their ends, blank lines left out."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_links_lead_somewhere() -> None:
    for name in ("lab.md", "experiments.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target
