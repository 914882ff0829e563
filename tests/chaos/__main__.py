from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .report import print_summary, show_progress, summary, write_json
from .settings import Folder


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Engines at full load, and everything breaks."
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (%(default)s)")
    parser.add_argument("--engines", type=int, default=4, help="engine processes, two at least (%(default)s)")
    parser.add_argument("--blocks", type=int, default=192, help="in the pool (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of every random choice (%(default)s)")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two faults (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--keep", type=Path, help="keep the run's files in this new folder")
    parser.add_argument("--plant", default="", help=argparse.SUPPRESS)  # a fault of the harness's own, for its tests
    options = parser.parse_args(arguments)
    if options.engines < 2:
        parser.error(f"--engines is at least 2, not {options.engines}")
    if options.blocks < 64:
        parser.error(f"--blocks is at least 64, not {options.blocks}: the longest request would wait for ever")
    return options


def main() -> int:
    """Run, and say how it went: 0 if every promise was kept, 1 if not."""
    from .conductor import Conductor

    options = parse()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        if options.keep is not None:
            options.keep.mkdir(parents=True)
        folder = Folder(options.keep or Path(temporary))
        conductor = Conductor(
            folder,
            options.seconds,
            options.period,
            seed=options.seed,
            num_engines=options.engines,
            num_blocks=options.blocks,
            plant=options.plant,
        )
        conductor.run(show_progress)
        figures = summary(conductor)
    print_summary(figures)
    if options.json is not None:
        write_json(figures, options.json)
    return 0 if figures["has_passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
