"""What a run says: a line as it goes, tables at its end, and the same as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radix_cache.cli.show import count, make_console, make_table

from .board import TOTALS

if TYPE_CHECKING:
    from .conductor import Conductor

_last_shown = [0.0]
_CALL_FAULTS = (
    "call_deadline",
    "call_cancelled",
    "reply_lost",
    "reply_lost_then_repeated",
    "batch_sent_again",
    "stream_dropped",
)


def show_progress(conductor: Conductor) -> None:
    """Write a line, every second on a terminal, else every ten."""
    is_terminal = sys.stderr.isatty()
    if time.monotonic() - _last_shown[0] < (1 if is_terminal else 10):
        return
    _last_shown[0] = time.monotonic()
    board = conductor.board
    text = (
        f"{conductor.elapsed_s:5.0f} s: {count(board.total('num_steps'))} steps, "
        f"{count(board.total('num_operations'))} operations, "
        f"{count(board.total('num_checked_blocks'))} blocks checked, "
        f"{sum(conductor.faults.counts.values())} faults, server {conductor.server.life}, "
        f"{conductor.growths.by_name['server, KiB'].last / 1024:.0f} MiB"
    )
    print(f"\r\x1b[K{text}" if is_terminal else text, end="" if is_terminal else "\n", file=sys.stderr, flush=True)


def summary(conductor: Conductor) -> dict[str, Any]:
    """Return all figures of a run that has ended."""
    totals = {name: conductor.board.total(name) for name in TOTALS}
    faults = {name: conductor.faults.counts[name] for name in conductor.faults.names()}
    faults |= {name: totals.pop(name) for name in _CALL_FAULTS}
    faults["figures_scraped"] = conductor.scraper.num_scrapes
    faults["metrics_scraped"] = conductor.scraper.num_metrics
    growth = {
        name: {
            "num_seconds": round(seen.num_seconds, 1),
            "last": round(seen.last),
            "per_minute": round(seen.per_minute),
            "is_flat": seen.is_flat,
        }
        for name, seen in conductor.growths.by_name.items()
    }
    return {
        "seed": conductor.settings.seed,
        "seconds": round(conductor.elapsed_s, 1),
        "num_engines": conductor.settings.num_engines,
        "num_blocks": conductor.settings.num_blocks,
        "faults": faults,
        "totals": totals,
        "growth": growth,
        "census": {
            "num_taken": conductor.num_censuses,
            "num_compared_blocks": conductor.census.num_compared_blocks,
            "num_compared_leases": conductor.census.num_compared_leases,
            "num_mirrored_events": conductor.mirror.num_events,
            **conductor.last_census,
        },
        "clock": {
            "num_ticks": conductor.clock.num_ticks,
            "slowest_tick_s": round(conductor.clock.slowest_tick_s, 3),
        },
        "violations": conductor.violations,
        "has_passed": not conductor.violations and conductor.growths.are_flat,
    }


def print_summary(figures: dict[str, Any]) -> None:
    """Print tables, and what was broken."""
    console = make_console()
    for title in ("faults", "totals", "census"):
        table = make_table(title, "")
        for name, number in figures[title].items():
            table.add_row(_words(name), count(number))
        console.print(table)
    table = make_table("memory", "in the end", "more a minute", "over seconds")
    for name, seen in figures["growth"].items():
        table.add_row(name, count(seen["last"]), count(seen["per_minute"]), str(seen["num_seconds"]))
        if not seen["is_flat"]:
            console.print(f"BROKEN: memory grows: {name}", style="bold red")
    console.print(table)
    for violation in figures["violations"]:
        console.print(f"BROKEN: {violation['what']}", style="bold red")
        for name, fact in violation.items():
            if name != "what":
                console.print(f"    {_words(name)}: {fact}", markup=False)
    if figures["has_passed"]:
        console.print("every promise was kept", style="green")
    else:
        console.print(f"seed {figures['seed']}, {figures['num_engines']} engines, {figures['seconds']} s")


def _words(name: str) -> str:
    return name.removeprefix("num_").replace("_", " ")


def write_json(figures: dict[str, Any], path: Path) -> None:
    """Write the same for a program."""
    path.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")
