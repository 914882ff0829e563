"""``radix-cache trace``: look at a trace, make one up, make one that can be shared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TextIO

import click

from radix_cache.cli.reading import TRACE, block_size_option, checked, name_of, nothing_in, output, reading
from radix_cache.cli.show import count, duration, make_console, make_table, percent, print_json
from radix_cache.lab import (
    Anonymizer,
    BlockTrace,
    Likeness,
    Profile,
    Request,
    Spread,
    TraceInfo,
    TraceSource,
    fit,
    make_requests,
    read_profile,
    trace_info,
)
from radix_cache.lab.playing import usual_block_size
from radix_cache.lab.writing import as_line

__all__ = ["trace"]

_SHARES = ("1%", "2%", "5%", "10%", "20%", "50%", "100%")


@click.group()
def trace() -> None:
    """Look at traces, make them up, and make them fit to be shared."""


@trace.command()
@click.argument("path", metavar="TRACE", type=TRACE)
@block_size_option
@output("--html", "Draw the trace into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@reading
def info(
    path: str, block_size: int | None, html: Path | None, as_json: bool, open_trace: Callable[[str], TraceSource]
) -> None:
    """Print what TRACE is like: sizes, sharing, ideal hit rates, distances, times and turns."""
    requests = list(open_trace(path).read())
    if not requests:
        raise nothing_in(path)
    found = trace_info(requests, block_size or usual_block_size(requests[0]))
    if html is not None:
        from radix_cache.lab.report import info_report

        html.write_text(info_report(name_of(path), found, requests), encoding="utf-8")
    if as_json:
        print_json(found.as_dict())
    else:
        _print_info(name_of(path), found)


def _print_info(name: str, found: TraceInfo) -> None:
    console = make_console()
    table = make_table(name, "")
    guess = "" if found.is_named else " (a guess)"
    for label, value in (
        ("requests", count(found.num_requests)),
        (f"conversations{guess}", count(found.num_conversations)),
        ("tokens in a block", count(found.tokens_per_block)),
        ("different blocks", count(found.num_blocks)),
        ("looked up blocks", count(found.num_prompt_blocks)),
        ("prompt tokens", count(found.ideal.num_prompt_tokens)),
        ("ideal block hit rate", percent(found.ideal.block_hit_rate)),
        ("ideal token hit rate", percent(found.ideal.token_hit_rate)),
        ("duration", duration(found.seconds)),
        ("earlier than the one before", count(found.num_out_of_order)),
    ):
        table.add_row(label, value)
    console.print(table)
    console.print(_spreads(found))
    curve = make_table("LRU with", *(share.replace("%", " %") for share in _SHARES))
    sizes = [BlockTrace(num_blocks=found.num_blocks).capacity(share) for share in _SHARES]
    curve.add_row("blocks", *(count(size) for size in sizes))
    curve.add_row("block hit rate", *(percent(found.curve.whole.at(size).block_hit_rate) for size in sizes))
    console.print(curve)


def _spreads(found: TraceInfo) -> object:
    table = make_table("", "mean", "p50", "p90", "p99", "max")
    for name, spread, show in (
        ("prompt tokens", found.prompt_tokens, count),
        ("output tokens", found.output_tokens, count),
        ("reuse distance, blocks", found.reuse_distance, count),
        ("turns", found.turns, lambda value: f"{value:.3g}"),
        ("between arrivals", found.gap_s, duration),
        ("between turns", found.think_s, duration),
    ):
        table.add_row(name, *(show(getattr(spread, item.name)) for item in fields(Spread)))
    return table


@trace.command()
@click.option("--like", type=TRACE, help="Take the conversations of this trace, shuffled, with new blocks.")
@click.option("--fit", "fitted", type=TRACE, help="Begin with knobs that are fitted to this trace.")
@click.option("--profile", type=click.Path(exists=True, dir_okay=False), help="Begin with what --save-profile wrote.")
@click.option("--set", "knobs", multiple=True, metavar="KNOB=VALUE", help="Set one knob; once for each.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same trace.")
@output("--out", "Write the trace to this file.  [default: stdout]")
@output(
    "--save-profile", "Write the knobs, or the conversations, to this file: for --profile, or as a trace in sweeps."
)
@block_size_option
@reading
def synth(
    like: str | None,
    fitted: str | None,
    profile: str | None,
    knobs: tuple[str, ...],
    seed: int,
    out: Path | None,
    save_profile: Path | None,
    block_size: int | None,
    open_trace: Callable[[str], TraceSource],
) -> None:
    """Make up a trace.

    By knobs it is of conversations and agents that share the beginnings of their prompts; the knobs and their defaults
    are what --save-profile writes. With --like it has what another trace has, and num_requests is the only knob.
    """
    if sum(path is not None for path in (like, fitted, profile)) > 1:
        raise click.UsageError("say one of --like, --fit and --profile")
    made: Profile | Likeness = Profile()
    if profile is not None:
        made = checked(lambda: read_profile(profile))
    elif (path := like or fitted) is not None:
        requests = list(open_trace(path).read())
        look = fit if like is None else Likeness.of
        made = look(requests, block_size or usual_block_size(requests[0] if requests else None))
    made = _with_knobs(made, knobs)
    if save_profile is not None:
        import json

        indent = 2 if isinstance(made, Profile) else None
        save_profile.write_text(json.dumps(made.as_dict(), indent=indent) + "\n", encoding="utf-8")
        if out is None:
            return
    _write(out, make_requests(made, seed))


def _with_knobs(made: Profile | Likeness, knobs: Iterable[str]) -> Profile | Likeness:
    types = {item.name: item.type for item in fields(Profile)}
    names = list(types) if isinstance(made, Profile) else ["num_requests"]
    values: dict[str, Any] = {}
    for knob in knobs:
        name, _, text = knob.partition("=")
        if name not in names:
            raise click.UsageError(f"there is no knob {name!r} here, only {', '.join(names)}")
        try:
            values[name] = int(text) if types[name] == "int" else float(text)
        except ValueError:
            kind = "an integer" if types[name] == "int" else "a number"
            raise click.UsageError(f"{name} is {kind}, not {text!r}") from None
    return checked(lambda: replace(made, **values))  # type: ignore[no-any-return] # it checks each


@trace.command()
@click.argument("path", metavar="TRACE", type=TRACE)
@click.option("--block-size", type=click.IntRange(2), default=16, show_default=True, help="Tokens in a block.")
@click.option(
    "--salt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of 16 to 64 secret bytes.  [default: random ones, which are not kept]",
)
@output("--out", "Write the trace to this file.  [default: stdout]")
@reading
def record(
    path: str, block_size: int, salt_file: Path | None, out: Path | None, open_trace: Callable[[str], TraceSource]
) -> None:
    """Turn a TRACE of token ids or a chat log into one of salted hash ids, which can be shared.

    Blocks become numbers, names of conversations, too; nothing of a prompt is kept. `radix_cache.lab.RecordingCache`
    does the same to a cache or a client while it is in use, `radix-cache serve --record-file` to a server.
    """
    salt = None if salt_file is None else salt_file.read_bytes()
    anonymizer = checked(lambda: Anonymizer(block_size, salt))
    _write(out, map(anonymizer.request, open_trace(path).read()))


def _write(out: Path | None, requests: Iterable[Request]) -> None:
    with _opened(out) as file:
        file.writelines(map(as_line, requests))


@contextmanager
def _opened(out: Path | None) -> Iterator[TextIO]:
    """Yield where to write. A file is replaced when all is written: it may be the trace that is read meanwhile."""
    if out is None:
        yield sys.stdout
        return
    if out.is_file():
        out = out.resolve()  # a link stays: it is what it leads to that is replaced
    aside = out.with_name(f".{out.name}.new") if out.is_file() or not out.exists() else out
    try:
        with aside.open("w", encoding="utf-8") as file:
            yield file
        if aside is not out:
            aside.replace(out)
    except OSError as error:
        error.filename = error.filename or str(out)  # to write is all that names no file
        raise
    finally:
        if aside is not out:
            aside.unlink(missing_ok=True)
