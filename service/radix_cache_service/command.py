"""The command that serves: ``radix-cache serve``, and ``python -m radix_cache_service``."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from radix_cache.errors import InvalidArgument
from radix_cache_service.settings import CONFIG_VARIABLE, SETTINGS, Setting, read_settings

__all__ = ["option", "serve"]

_METAVARS = {int: "N", float: "X", str: "TEXT"}


class _Text(click.ParamType[Any]):
    """What a setting takes as text."""

    def __init__(self, setting: Setting) -> None:
        self.name = "mode" if setting.is_mode else setting.kind.__name__
        self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value, or fail with a usage error."""
        if not isinstance(value, str):
            return value
        try:
            return self._setting.parse(value)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)


def option(setting: Setting) -> click.Option:
    """Return the setting as an option of a command."""
    flags = [f"{flag}/--no-{flag.removeprefix('--')}" if setting.kind is bool else flag for flag in setting.flags]
    is_text = setting.kind is not bool
    return click.Option(
        [setting.name, *flags],
        type=_Text(setting) if is_text else None,
        multiple=setting.is_list,
        default=f"{setting.default:o}" if setting.is_mode else setting.default,
        show_default=setting.default not in {None, "", ()},
        metavar="MODE" if setting.is_mode else _METAVARS.get(setting.kind),
        hidden=setting.is_hidden,
        help=setting.help_text,
    )


@click.command(params=list(map(option, SETTINGS.values())))
@click.option(
    "--config", type=click.Path(dir_okay=False), help=f"A TOML file of settings; also named by {CONFIG_VARIABLE}."
)
@click.option("--check", is_flag=True, help="Say whether the settings are good, and end.")
@click.pass_context
def serve(ctx: click.Context, /, config: str | None, check: bool, **settings: Any) -> None:
    """Serve a prefix cache over gRPC until SIGTERM or Ctrl-C.

    Prints "listening on ADDRESS" for each address once it serves. Unless tokens are asked for, whoever can reach an
    address may do everything: listen on loopback or on a unix socket, or where only engines can connect.

    Each setting is also an environment variable (--num-blocks: RADIX_CACHE_NUM_BLOCKS, lists separated by commas) and a
    key of the configuration file (num_blocks). A flag goes before a variable, a variable before a key.
    """
    # Read as gRPC is imported, which some settings do; it would write out what peers send, whatever the log's form.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    given = {
        name: value for name, value in settings.items() if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    try:
        checked = read_settings(given, os.environ, config)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    if check:
        click.echo("the settings are good")
        return
    from radix_cache_service.server import serve as run_server  # noqa: PLC0415 - no gRPC for a usage error

    run_server(checked)
