"""What is made of the answers: rows of ratios, a table to read, a file to keep."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.timing import Spread, ratio, spread

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and the bound that it should keep. text: what the figure is; is_met: of the figure, not of a guess."""

    text: str
    measured: float
    bound: float
    is_at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the bound is kept."""
        return self.measured >= self.bound if self.is_at_least else self.measured <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.is_at_least else "<="
        return f"{self.text} {sign} {self.bound:,g}: {self.measured:,.3g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    figures: by contestant, in ``unit``; ours come first. ratios: by contestant, its figure over ours, round by round.
    """

    label: str
    figures: dict[str, Spread]
    unit: str = "us"
    ratios: dict[str, Spread] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return {
            "label": self.label,
            "unit": self.unit,
            "figures": {name: value._asdict() for name, value in self.figures.items()},
            "ratios": {name: value._asdict() for name, value in self.ratios.items()},
            "goals": [{**asdict(goal), "is_met": goal.is_met} for goal in self.goals],
        }


def compared(
    label: str, series: Mapping[str, Sequence[float]], ours: Sequence[str], bound: float = 2, goals: Sequence[Goal] = ()
) -> Row:
    """A row that sets everybody against ``ours[0]``; SGLang's default should take at least ``bound`` times as long."""
    ratios = {name: ratio(values, series[ours[0]]) for name, values in series.items() if name not in ours}
    if "SGLang" in ratios:
        goals = [Goal(f"SGLang / {ours[0]}", ratios["SGLang"].median, bound, is_at_least=True), *goals]
    return Row(label, {name: spread(values) for name, values in series.items()}, ratios=ratios, goals=tuple(goals))


def hardware() -> dict[str, Any]:
    """Name what this runs on, and how busy it is."""
    return {
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_average": round(os.getloadavg()[0], 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def save(name: str, title: str, size: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Write ``results/<name>.json``, unless the run was a tiny one, and return what is in it."""
    answer = {
        "name": name,
        "title": title,
        "size": size,
        "hardware": hardware(),
        "rows": [row.as_json() for row in rows],
    }
    if size == "tiny":
        return answer
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(answer, indent=1) + "\n")
    return answer


def show(rows: Sequence[Row], notes: Iterable[str]) -> None:
    """Print one table and what has to be said below it."""
    from rich.console import Console
    from rich.table import Table

    machine = hardware()
    table = Table(
        title=f"{machine['processor']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB, "
        f"load {machine['load_average']}; {machine['system']}, Python {machine['python']}; {machine['commit']}",
        caption="medians, quartiles in brackets; x: times ours, in the same round",
        show_lines=True,
    )
    for heading in ("measured", "figures", "goals"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row.label, _figures(row), "\n".join(map(_verdict, row.goals)))
    console = Console(width=None if os.isatty(1) else 160)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def _figures(row: Row) -> str:
    width = max(map(len, row.figures))
    return "\n".join(_figure(name.ljust(width), row, row.figures[name], row.ratios.get(name)) for name in row.figures)


def _figure(name: str, row: Row, value: Spread, by: Spread | None) -> str:
    text = f"{name} {_number(value.median):>7} {row.unit}{_range(value)}"
    return text if by is None else f"{text}  [bold]{_number(by.median)}x[/]{_range(by)}"


def _range(value: Spread) -> str:
    return "" if value.low == value.high else f" \\[{_number(value.low)} - {_number(value.high)}]"


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _verdict(goal: Goal) -> str:
    return f"[{'green' if goal.is_met else 'red'}]{goal}, {'met' if goal.is_met else 'NOT met'}[/]"
