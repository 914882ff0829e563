"""The command ``radix-cache``.

One file for each command. Nothing here imports more than the standard library until a command runs, and each imports
what it alone needs: what is not installed is named, with the line that installs it.
"""

from __future__ import annotations

import io
import sys

__all__ = ["main"]

_EXTRAS = {
    "click": "service",
    "rich": "service",
    "grpc": "service",
    "google": "service",
    "grpc_health": "service",
    "prometheus_client": "service",
    "pyarrow": "parquet",
    "ray": "ray",
}


def main() -> None:
    """Run the command line; exits with 0, with 2 for bad usage, with 1 for anything else that failed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # where a name can't be shown, its numbers can
    try:
        from radix_cache.cli.app import app

        app(prog_name="radix-cache")
    except ModuleNotFoundError as error:
        sys.exit(explain_missing(error))


def explain_missing(error: ModuleNotFoundError) -> str:
    """Return the line that says what to install, or raise ``error`` again if no extra has the module."""
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package) or ("service" if package.startswith("grpc") else None)
    if extra is None:
        raise error
    return f"Error: {package} is not installed: pip install 'radix-cache[{extra}]'"
