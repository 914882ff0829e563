"""``radix-cache sweep``: policies x capacities x traces x seeds, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from radix_cache.cli.reading import TRACE, block_size_option, check_apart, checked, output, reading
from radix_cache.cli.show import make_console, plural
from radix_cache.lab import TraceSource, plan_sweep, run_in_processes
from radix_cache.lab import sweep as run_sweep
from radix_cache.lab.sweep import Runner, partial_of
from radix_cache.lab.tables import check_suffix

__all__ = ["sweep"]


@click.command()
@click.argument("traces", nargs=-1, required=True, type=TRACE)
@click.option(
    "--policies", default="lru,optimal", show_default=True, help="Names of the tree's, optimal, or FILE.py:CLASS."
)
@click.option(
    "--capacities",
    default="2%,5%,10%",
    show_default=True,
    help="Blocks, or percentages of a trace's different blocks.",
)
@click.option("--seeds", default="0", show_default=True, help="For traces that are profiles of a generator (.json).")
@block_size_option
@click.option("--processes", type=click.IntRange(1), help="How many.  [default: one for each core]")
@click.option("--ray", metavar="ADDRESS", help="Run on this Ray cluster; auto: the one of this machine.")
@output("--out", "Write the results to this .jsonl, .csv or .parquet file.", is_required=True)
@reading
def sweep(
    traces: tuple[str, ...],
    policies: str,
    capacities: str,
    seeds: str,
    block_size: int | None,
    processes: int | None,
    ray: str | None,
    out: Path,
    open_trace: Callable[[str], TraceSource],
) -> None:
    """Replay traces with many policies and capacities.

    There is a row for each of TRACES, each seed, each policy and each capacity.
    Policies with parameters are separated by semicolons instead of commas: "lru;two-hit:ghost_blocks=40000". What is
    done is kept in OUT.partial until all is: the same command goes on where it was cut off. The same results are the
    same bytes; `radix-cache compare` makes a table and a report of them.
    """
    checked(lambda: check_suffix(out))
    check_apart(out, *traces)
    names = [name.strip() for name in policies.split(";" if ";" in policies else ",")]
    numbers = checked(lambda: [_seed(text) for text in seeds.split(",")])
    jobs = checked(
        lambda: plan_sweep(
            [open_trace(path) for path in traces],
            names,
            [text.strip() for text in capacities.split(",")],
            numbers,
            block_size,
        )
    )
    console = make_console(stderr=True)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    is_quiet = not console.is_terminal
    columns = TextColumn("replays"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with _saying_what_is_kept(out), Progress(*columns, console=console, transient=True, disable=is_quiet) as progress:
        task = progress.add_task("", total=len(jobs))
        rows = run_sweep(
            jobs,
            out,
            _runner(processes, ray),
            lambda num_done: progress.update(task, completed=num_done),
        )
    click.echo(f"{out}: {plural(len(rows), 'row')}")


@contextmanager
def _saying_what_is_kept(out: Path) -> Iterator[None]:
    """Let Ctrl-C say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if (kept := partial_of(out)).exists():
            click.echo(f"what is done is in {kept}: the same command goes on from there", err=True)
        raise


def _runner(processes: int | None, ray: str | None) -> Runner:
    if ray is None:
        return lambda missing: run_in_processes(missing, processes or os.cpu_count())
    if processes is not None:
        raise click.UsageError("--processes are this machine's: say either that or --ray")
    from radix_cache.lab.cluster import run_on_ray

    return lambda missing: run_on_ray(missing, ray)


def _seed(text: str) -> int:
    from radix_cache.errors import InvalidArgument

    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"a seed is an integer, not {text!r}") from None
