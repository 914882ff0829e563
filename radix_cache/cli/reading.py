"""What the commands that read traces have in common: the argument and the options that say how."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from radix_cache.errors import InvalidArgument

if TYPE_CHECKING:
    from radix_cache.lab import TraceSource

__all__ = ["TRACE", "block_size_option", "check_apart", "checked", "name_of", "nothing_in", "output", "reading"]

F = TypeVar("F", bound=Callable[..., Any])

TRACE = click.Path(exists=True, dir_okay=False, allow_dash=True)

block_size_option = click.option(
    "--block-size", type=click.IntRange(1), help="Tokens in a block, of traces of token ids.  [default: 16]"
)


class _OutputPath(click.Path):
    """A file to be written, in a directory that is there: told before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail with a usage error."""
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment] # as path_type says
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no directory {path.parent}", param, ctx)
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"{path}: the directory {path.parent} cannot be written to", param, ctx)
        return path


def output(name: str, what: str, *, is_required: bool = False) -> Callable[[F], F]:
    """Return the option of a file to be written."""
    return click.option(name, type=_OutputPath(), help=what, required=is_required)


def check_apart(out: Path | None, *traces: str) -> None:
    """Raise a usage error if results would be written over a trace."""
    for trace in traces:
        if out is not None and trace != "-" and out.exists() and out.samefile(trace):
            raise click.UsageError(f"--out {out} is the trace itself, which would be lost")


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
        type=click.IntRange(1, 2**53),
        help="Tokens that one hash id stands for, where the trace doesn't say.  [default: what fits the lengths]",
    ),
    click.option("--reader", metavar="FILE.py:NAME", help="Read with this function, which yields requests."),
    click.option("--tokenizer", metavar="FILE.py:NAME", help="Function from text to token ids, for chat logs."),
    click.option("--sort", "is_sorted", is_flag=True, help="Sort the requests by time; holds all of them."),
)


def name_of(path: str) -> str:
    """Return what a trace is called in a title."""
    return "stdin" if path == "-" else Path(path).name


def nothing_in(path: str) -> click.ClickException:
    """Return the error for a trace without requests."""
    return click.ClickException(f"{name_of(path)}: there is no request in it")


def checked(make: Callable[[], Any]) -> Any:
    """Return what ``make`` makes; what is wrong with its arguments is wrong usage."""
    try:
        return make()
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
