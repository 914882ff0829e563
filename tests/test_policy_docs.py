"""docs/policies.md: its menu is complete, its code runs, and the policy it shows can be given in all three ways."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from radix_cache import Hints
from radix_cache.cli.serve import serve
from radix_cache.policies import BUILT_IN, EvictionPolicy, make_policy

TEXT = (Path(__file__).parent.parent / "docs/policies.md").read_text(encoding="utf-8")
BLOCKS: dict[str, list[str]] = {}
for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
    BLOCKS.setdefault(language, []).append(block)
DEFINITION, USE = BLOCKS["python"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the policy and its entry point, as pip would leave it."""
    (tmp_path / "my_policies.py").write_text(DEFINITION)
    (points,) = (tomllib.loads(text)["project"]["entry-points"] for text in BLOCKS["toml"])
    info = tmp_path / "my_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n")
    lines = [
        f"[{group}]" + "".join(f"\n{name} = {to}" for name, to in named.items()) for group, named in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("my_policies", None)


def test_the_policy_has_about_twenty_lines() -> None:
    assert len([line for line in DEFINITION.splitlines() if line]) <= 20


def run(code: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/policies.md", "exec"), {})
    return printed.getvalue()


@pytest.mark.parametrize(
    "given",
    [
        'ForegroundFirst(background="night")',
        '"my_policies:ForegroundFirst:background=night"',
        '"foreground-first:background=night"',
    ],
    ids=["object", "module and class", "entry point"],
)
def test_it_runs_however_it_is_given(given: str, installed: None) -> None:
    code = USE.replace('ForegroundFirst(background="night")', given)
    assert f"policy={given}" in code
    assert [run(code)] == BLOCKS["text"]


def test_its_parameters_have_defaults(installed: None) -> None:
    made = make_policy("foreground-first")
    assert isinstance(made, EvictionPolicy)
    assert made.background == "batch"


@pytest.mark.parametrize("line", [line for block in BLOCKS["sh"] for line in block.splitlines()])
def test_commands_are_understood(line: str) -> None:
    program, verb, *arguments = shlex.split(line, comments=True)
    assert (program, verb) == ("radix-cache", "serve")
    assert serve.make_context("serve", arguments[:]).params["policy"] == arguments[1]


def rows() -> dict[str, str]:
    """The rows of the menu by name."""
    menu = TEXT.partition("## The menu")[2].partition("## Hints")[0]
    found = {}
    for row in re.findall(r"^\| `.*$", menu, re.MULTILINE):
        for name in re.findall(r"`([\w-]+)`", row.split("|")[1]):
            found[name] = row
    return found


def test_the_menu_is_complete() -> None:
    assert set(rows()) == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_menu_names_parameters_and_hints(name: str) -> None:
    """Each parameter with its default, and no hint that there is not."""
    _, _, _, hints, parameters, _, _ = rows()[name].split("|")
    shown = dict(re.findall(r"`(\w+)`(?: = ([\d.]+))?", parameters))
    known = inspect.signature(BUILT_IN[name]).parameters
    assert set(shown) == set(known)
    for parameter, default in shown.items():
        assert known[parameter].default == (float(default) if default else None)
    assert set(re.findall(r"`(\w+)`", hints)) <= set(Hints._fields)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("https://") or (Path(__file__).parent.parent / "docs" / target).exists(), target
