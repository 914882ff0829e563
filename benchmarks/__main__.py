"""``python -m benchmarks``: measure, print one table, keep ``benchmarks/results/<name>.json``.

Where peers are installed (``.venv-peers``, made by ``python -m benchmarks.install_peers``) it starts itself again under
that Python for all that they take part in, since ours and theirs have to be measured in one process.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.options import Options
from benchmarks.report import Row, save, show

NAMES = (
    "service",
    "match",
    "insert",
    "evict",
    "cycle",
    "lists",
    "memory",
    "nodes",
    "pauses",
    "plots",
    "events",
    "torch_reuse",
)
WITHOUT_PEERS = ("service", "events", "torch_reuse")
PEERS_PYTHON = Path(__file__).parent.parent / ".venv-peers" / "bin" / "python"


def main() -> None:
    """Run what the command line asks for."""
    arguments = _arguments()
    if arguments.what == "list":
        for name in NAMES:
            print(f"{name:11} {importlib.import_module(f'benchmarks.{name}').TITLE}")
        return
    names = arguments.only or list(NAMES)
    if not arguments.no_peers and PEERS_PYTHON.exists() and Path(sys.prefix) != PEERS_PYTHON.parent.parent:
        others = [name for name in names if name not in WITHOUT_PEERS]
        names = [name for name in names if name in WITHOUT_PEERS]
        if others:
            size = [f"--{size}" for size in ("quick", "tiny", "json") if getattr(arguments, size)]
            subprocess.run([PEERS_PYTHON, "-m", "benchmarks", *size, "--only", *others], check=True)
    if names:
        _run(names, arguments)


def _run(names: list[str], arguments: argparse.Namespace) -> None:
    options = Options("tiny" if arguments.tiny else "quick" if arguments.quick else "full", not arguments.no_peers)
    rows: list[Row] = []
    answers: list[dict[str, Any]] = []
    for name in names:
        start = time.perf_counter()
        module = importlib.import_module(f"benchmarks.{name}")
        measured = module.run(options)
        gc.unfreeze()  # what `settle_gc` hid; nodes and their parents hold each other
        gc.collect()
        answers.append(save(name, module.TITLE, options.size, measured))
        rows += measured if name != "plots" else []
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if arguments.json:
        print(json.dumps(answers, indent=1))
    else:
        show(rows, _notes(options))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure radix-cache and its peers.")
    parser.add_argument("what", nargs="?", choices=["run", "list"], default="run", help="list: name the benchmarks")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES, help="run these")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer rounds: a first look")
    size.add_argument("--tiny", action="store_true", help="see that everything runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--no-peers", action="store_true", help="ours alone, in this Python")
    return parser.parse_args()


def _notes(options: Options) -> list[str]:
    if not options.with_peers or options.peers:
        return []
    return ["SGLang is not installed, so its figures are missing: make bench-peers"]


if __name__ == "__main__":
    main()
