"""``radix-cache curve``: LRU's hit rate at every capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from radix_cache.cli.numbers import Number
from radix_cache.cli.reading import (
    TRACE,
    block_size_option,
    check_apart,
    checked,
    name_of,
    nothing_in,
    output,
    reading,
)
from radix_cache.cli.show import count, make_console, make_table, percent, print_json
from radix_cache.lab import (
    BlockTrace,
    Curve,
    Request,
    SampledCurve,
    TraceSource,
    block_curve,
    sampled_curve,
    write_rows,
)
from radix_cache.lab.playing import peek, usual_block_size
from radix_cache.lab.tables import check_suffix

__all__ = ["curve"]

_CAPACITIES = "1%,2%,5%,10%,20%,50%,100%"
_HEADS = {
    "num_blocks": "blocks",
    "block_hit_rate": "block hit rate",
    "token_hit_rate": "token hit rate",
    "last_half_block_hit_rate": "last half: block",
    "last_half_token_hit_rate": "token",
    "sampled_block_hit_rate": "sampled: block",
    "block_error": "±",
    "sampled_token_hit_rate": "token",
    "token_error": "±",
}


@click.command()
@click.argument("trace", type=TRACE)
@block_size_option
@click.option(
    "--capacities", default=_CAPACITIES, show_default=True, help="Blocks, or percentages of the different blocks."
)
@click.option(
    "--sample",
    type=Number(0, 1, min_open=True),
    metavar="RATE",
    help="Estimate from this share of the blocks, for traces that do not fit in memory.",
)
@click.option("--check", is_flag=True, help="With --sample: show the exact rates, too.")
@output("--out", "Write the rates at every capacity to this .jsonl, .csv or .parquet file.")
@output("--html", "Draw the curve into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@reading
def curve(
    trace: str,
    block_size: int | None,
    capacities: str,
    sample: float | None,
    check: bool,
    out: Path | None,
    html: Path | None,
    as_json: bool,
    open_trace: Callable[[str], TraceSource],
) -> None:
    """Print LRU's hit rate on TRACE at all capacities, from one pass.

    Exact, and equal to what replays find one by one. With --sample an estimate, with its standard error.
    """
    if out is not None:
        checked(lambda: check_suffix(out))
        check_apart(out, trace)
    if sample is None and check:
        raise click.UsageError("--check goes with --sample")
    first, requests = peek(open_trace(trace).read())
    if first is None:
        raise nothing_in(trace)
    if sample is not None:
        requests = list(requests) if check else requests
        sampled = sampled_curve(requests, sample, block_size or 16)
        exact = block_curve(_blocks(first, requests, block_size)) if check else None
    else:
        sampled, exact = None, block_curve(_blocks(first, requests, block_size))
    num_blocks = exact.num_blocks if exact is not None else sampled.num_blocks if sampled is not None else 0
    if sampled is not None and sampled.num_prompt_blocks and not num_blocks:
        raise click.UsageError(f"--sample {sample}: of {count(sampled.num_prompt_blocks)} blocks none is in a sample")
    scale = BlockTrace(num_blocks=num_blocks)
    sizes = checked(lambda: list(dict.fromkeys(scale.capacity(text.strip()) for text in capacities.split(","))))
    rows = [_row(size, exact, sampled) for size in sizes]
    if out is not None:
        write_rows(out, [_row(size, exact, sampled) for size in range(num_blocks + 1)])
    if html is not None:
        _draw(html, name_of(trace), exact, sampled)
    if as_json:
        print_json({"num_blocks": num_blocks, "capacities": rows})
    else:
        _print(name_of(trace), num_blocks, rows)


def _blocks(first: Request, requests: Iterable[Request], block_size: int | None) -> BlockTrace:
    return BlockTrace.of(requests, block_size or usual_block_size(first))


def _row(size: int, exact: Curve | None, sampled: SampledCurve | None) -> dict[str, Any]:
    row: dict[str, Any] = {"num_blocks": size}
    if exact is not None:
        for prefix, part in (("", exact.whole), ("last_half_", exact.last_half)):
            hits = part.at(size)
            row |= {f"{prefix}{name}": getattr(hits, name) for name in ("block_hit_rate", "token_hit_rate")}
    if sampled is not None:
        found = sampled.at(size)
        row |= {"sampled_block_hit_rate": found.block_hit_rate, "block_error": found.block_error}
        row |= {"sampled_token_hit_rate": found.token_hit_rate, "token_error": found.token_error}
    return row


def _draw(path: Path, name: str, exact: Curve | None, sampled: SampledCurve | None) -> None:
    from radix_cache.lab.plot import line_chart
    from radix_cache.lab.report import curve_line, page, sampled_line

    lines = [] if exact is None else [curve_line("blocks", exact, "block"), curve_line("tokens", exact, "token")]
    if sampled is not None:
        lines.append(sampled_line("blocks, sampled", sampled))
    chart = line_chart(f"LRU on {name}", "capacity, blocks", "hit rate, %", lines, is_log_x=True)
    path.write_text(page(f"LRU on {name}", [chart]), encoding="utf-8")


def _print(name: str, num_blocks: int, rows: Sequence[dict[str, Any]]) -> None:
    console = make_console()
    console.print(f"{name}: LRU, {count(num_blocks)} different blocks", style="bold")
    table = make_table(*(_HEADS[column] for column in rows[0]))
    for row in rows:
        table.add_row(count(row["num_blocks"]), *(percent(rate) for name, rate in row.items() if name != "num_blocks"))
    console.print(table)
