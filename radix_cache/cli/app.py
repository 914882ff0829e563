"""The group of commands, and how errors end: one line on stderr, no traceback."""

from __future__ import annotations

import importlib
from typing import Any

import click

from radix_cache import __version__
from radix_cache.errors import RadixCacheError

__all__ = ["app"]

_COMMANDS = ("serve", "route", "stats", "top", "tree", "leases", "replay", "sweep", "curve", "compare", "trace")


class Commands(click.Group):
    """A group that imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, or None."""
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"radix_cache.cli.{cmd_name}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what is wrong with its surroundings becomes one line."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except RadixCacheError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            raise click.ClickException(_described(error)) from error


def _described(error: OSError) -> str:
    """Return what is wrong with which file, where the error knows."""
    return str(error) if error.filename is None or error.strerror is None else f"{error.filename}: {error.strerror}"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="radix-cache %(version)s")
def app() -> None:
    """A prefix cache for LLM inference engines.

    ADDRESS is where a server listens: HOST:PORT or unix:/path.
    """
