"""How figures look: shared by the commands that print tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "count",
    "duration",
    "make_console",
    "make_table",
    "percent",
    "plural",
    "print_json",
    "printable",
    "with_progress",
]

T = TypeVar("T")

_WIDTH_OF_FILES = 400  # nothing is cut that somebody may want to copy


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that leaves numbers uncoloured and does not fold lines at 80 where nobody looks."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=_WIDTH_OF_FILES)
    return console


def make_table(*columns: str) -> Table:
    """Return an empty table: names on the left, figures on the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def with_progress(items: Iterator[T], count_all: Callable[[], int], what: str) -> Iterator[T]:
    """Yield ``items``, with a bar on stderr where that is a terminal; only then they are counted first."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(items, total=count_all())


def printable(text: str) -> str:
    """Return ``text``, which a stranger chose, without what a terminal or a table would take for a command."""
    from rich.markup import escape

    return escape("".join(char if char.isprintable() else repr(char)[1:-1] for char in text))


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=indent))


def count(number: float) -> str:
    """Return a whole number with commas."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """Return a number and what it counts."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def percent(rate: float | None) -> str:
    """Return a rate in percent; a dash where there was nothing to divide by."""
    return "-" if rate is None else f"{100 * rate:.2f} %"


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that suits them."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"
