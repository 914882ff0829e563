"""The command that routes: ``radix-cache route``."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from radix_cache.errors import InvalidArgument
from radix_cache_service.command import option
from radix_cache_service.router.config import RouterConfig
from radix_cache_service.settings import Settings

__all__ = ["ROUTER_SETTINGS", "route"]

ROUTER_SETTINGS = Settings(RouterConfig, "RADIX_CACHE_ROUTE_")


@click.command(params=list(map(option, ROUTER_SETTINGS.by_name.values())))
@click.option(
    "--config",
    type=click.Path(dir_okay=False),
    help=f"A TOML file of settings; also named by {ROUTER_SETTINGS.config_variable}.",
)
@click.option("--check", is_flag=True, help="Say whether the settings are good, and end.")
@click.pass_context
def route(ctx: click.Context, /, config: str | None, check: bool, **settings: Any) -> None:
    """Say which of several servers to ask for a prompt, over gRPC.

    Ends with SIGTERM or Ctrl-C. Prints "listening on ADDRESS" for each address once it serves. The servers publish
    their events over ZeroMQ (radix-cache serve --events-listen). Prompts are not sent on; the caller asks the node that
    it is told.

    Each setting is also an environment variable (--max-load: RADIX_CACHE_ROUTE_MAX_LOAD, lists separated by commas) and
    a key of the configuration file (max_load). A flag goes before a variable, a variable before a key.
    """
    # Read as gRPC is imported, which some settings do; it would write out what peers send, whatever the log's form.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    given = {
        name: value for name, value in settings.items() if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    try:
        checked = ROUTER_SETTINGS.read(given, os.environ, config)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    if check:
        click.echo("the settings are good")
        return
    from radix_cache_service.router.server import route as run_router  # noqa: PLC0415 - no gRPC for a usage error

    run_router(checked)
