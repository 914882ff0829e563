"""docs/operations.md says what is there: settings, metrics, alerts, links, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml
from scraping import read_metrics
from service_process import ServerProcess

from radix_cache.cli.app import app
from radix_cache_service.settings import SETTINGS, Setting

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operations.md"
TEXT = PAGE.read_text(encoding="utf-8")


def rows(section: str) -> list[str]:
    """The rows of the section's table, without its head."""
    part = re.split(rf"^## {section}\n", TEXT, flags=re.MULTILINE)[1].partition("\n## ")[0]
    return [line for line in part.splitlines() if line.startswith("| `")]


def row(setting: Setting) -> str:
    """What the table of settings has to say."""
    default = setting.default
    if setting.is_mode:
        shown = f"{default:o}"
    elif setting.is_list:
        shown = ", ".join(default)
    elif setting.kind is bool:
        shown = str(default).lower()
    else:
        shown = "" if default is None else str(default)
    return f"| `{setting.name}` | {f'`{shown}`' if shown else ''} | {setting.help_text} |"


def test_the_table_of_settings_has_them_all_as_they_are() -> None:
    assert rows("Settings") == [row(setting) for setting in SETTINGS.values() if not setting.is_hidden]


def test_the_table_of_metrics_has_them_all_as_they_are() -> None:
    with ServerProcess(metrics_listen="127.0.0.1:0") as server:
        metrics = read_metrics(server.metrics_address).values()
    names = [metric.name + "_total" * (metric.type == "counter") for metric in metrics]
    seen = [
        f"| `{name}` | {metric.type} | {metric.documentation} |"
        for name, metric in zip(names, metrics, strict=True)
        if not name.startswith("process_")
    ]
    assert rows("Metrics") == seen
    named = set(re.findall(r"process_\w+", TEXT))
    assert named <= {*names}


def test_each_alert_has_its_section() -> None:
    groups = yaml.safe_load((ROOT / "examples" / "deploy" / "alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    assert re.findall(r"^### (RadixCache\w+)$", TEXT, re.MULTILINE) == alerts


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)(.*?)\)", TEXT))))
def test_links_lead_somewhere(link: str) -> None:
    name, _, anchor = link.partition("#")
    target = PAGE.parent / name if name else PAGE
    assert target.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def commands() -> list[str]:
    """Every command line of ours on the page: in blocks, and those with arguments in running text."""
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("radix-cache ")]
    return lines + re.findall(r"`(radix-cache \w[^`]*?)`", TEXT.replace("\n", " "))


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_commands_are_understood(line: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.touch()
    said = line.replace("ADDRESS...", "127.0.0.1:1").replace("ADDRESS", "127.0.0.1:1").replace("TRACE", str(trace))
    name, *arguments = shlex.split(said)[1:]
    context = click.Context(app)
    command = app.get_command(context, name)
    assert command is not None
    try:
        command.make_context(name, arguments)
    except click.exceptions.Exit as ended:
        assert ended.exit_code == 0  # noqa: PT017 - it was asked for help


def test_settings_that_are_named_exist() -> None:
    words = set(re.findall(r"`((?:max|lease|drain|grace|metrics|log|trace|otlp|state|pool|growth)_\w+)`", TEXT))
    assert words - {"max_blocks"} <= {*SETTINGS}
    assert len(words) > 10
