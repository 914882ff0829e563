"""What the commands that read traces have in common: the argument and the options that say how."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from radix_cache.errors import InvalidArgument

if TYPE_CHECKING:
    from radix_cache.lab import TraceSource

__all__ = ["TRACE", "block_size_option", "checked", "name_of", "output", "reading"]

F = TypeVar("F", bound=Callable[..., Any])

TRACE = click.Path(exists=True, dir_okay=False, allow_dash=True)

block_size_option = click.option(
    "--block-size", type=click.IntRange(1), help="Tokens in a block, of traces of token ids.  [default: 16]"
)


def output(name: str, what: str, *, is_required: bool = False) -> Callable[[F], F]:
    """Return the option of a file to be written."""
    return click.option(
        name, type=click.Path(dir_okay=False, writable=True, path_type=Path), help=what, required=is_required
    )


def reading(command: F) -> F:
    """Give a command the options that say how to read; its function gets ``open_trace``, which makes a source."""

    @wraps(command)
    def with_source(
        *args: Any,
        tokens_per_block: int | None,
        reader: str | None,
        tokenizer: str | None,
        is_sorted: bool,
        **options: Any,
    ) -> Any:
        from radix_cache.lab import TraceSource

        def open_trace(path: str) -> TraceSource:
            return TraceSource(path, tokens_per_block, reader, tokenizer, is_sorted)

        return command(*args, open_trace=open_trace, **options)

    for option in reversed(_OPTIONS):
        with_source = option(with_source)
    return with_source  # type: ignore[return-value] # click gives the arguments by name


_OPTIONS = (
    click.option(
        "--tokens-per-block",
        type=click.IntRange(1),
        help="Tokens that one hash id stands for, where the trace doesn't say.  [default: what fits the lengths]",
    ),
    click.option("--reader", metavar="FILE.py:NAME", help="Read with this function, which yields requests."),
    click.option("--tokenizer", metavar="FILE.py:NAME", help="Function from text to token ids, for chat logs."),
    click.option("--sort", "is_sorted", is_flag=True, help="Sort the requests by time; holds all of them."),
)


def name_of(path: str) -> str:
    """Return what a trace is called in a title."""
    return "stdin" if path == "-" else Path(path).name


def checked(make: Callable[[], Any]) -> Any:
    """Return what ``make`` makes; what is wrong with its arguments is wrong usage."""
    try:
        return make()
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
