"""``radix-cache compare``: the results of sweeps as a table and as a report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from radix_cache.cli.reading import checked, output
from radix_cache.cli.show import count, make_console, make_table, print_json
from radix_cache.lab import Comparison, read_rows
from radix_cache.lab import compare as compare_rows
from radix_cache.lab.compare import METRICS

__all__ = ["compare"]


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--metric", type=click.Choice(METRICS), default=METRICS[0], show_default=True, help="What is hit.")
@click.option("--last-half", is_flag=True, help="Count the last half of the requests, when the cache is warm.")
@output("--html", "Write tables and pictures into this one file.")
@click.option("--json", "as_json", is_flag=True, help="Print the points as JSON.")
def compare(results: tuple[Path, ...], metric: str, last_half: bool, html: Path | None, as_json: bool) -> None:
    """Print what sweeps found, policy by policy.

    RESULTS are files that `radix-cache sweep` wrote. Of several seeds there is the mean, ± its standard error. In
    brackets is the share of what lies between LRU and the optimum that a policy has, where the results have both.
    """
    rows = checked(lambda: [row for path in results for row in read_rows(path)])
    comparisons = checked(lambda: compare_rows(rows, metric, last_half=last_half))
    if not comparisons:
        raise click.UsageError(f"there is no row in {', '.join(map(str, results))}")
    part = "the last half of the requests" if last_half else "all requests"
    if html is not None:
        from radix_cache.lab.report import comparison_report

        html.write_text(comparison_report(comparisons, metric, part), encoding="utf-8")
    if as_json:
        print_json([asdict(comparison) for comparison in comparisons])
        return
    for comparison in comparisons:
        _print(comparison, f"{metric} hit rate in %, {part}")


def _print(comparison: Comparison, what: str) -> None:
    console = make_console()
    blocks = count(comparison.num_trace_blocks)
    console.print(f"{comparison.trace}, {blocks} different blocks: {what}", style="bold")
    table = make_table("policy", *(count(size) for size in comparison.capacities))
    for policy in comparison.policies:
        points = (comparison.at(policy, size) for size in comparison.capacities)
        table.add_row(policy, *("-" if point is None else str(point) for point in points))
    console.print(table)
