"""``python -m benchmarks.install_peers``: make ``.venv-peers``, of Python 3.11.

In it are SGLang, with what its cache imports, and libCacheSim.

SGLang comes without its dependencies, an inference engine's: `benchmarks.sglang` says how its cache runs without them.
The peers are measured, and compared with in tests, never shipped, and nothing of radix-cache needs them.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VENV = Path(__file__).parent.parent / ".venv-peers"

OURS = ("sortedcontainers>=2.4", "rich>=13", "matplotlib>=3.9")
TORCH = "torch==2.13.0"
IMPORTED = (
    "dill",
    "msgspec",
    "numpy",
    "orjson",
    "psutil",
    "pybase64",
    "pydantic",
    "pyzmq",
    "requests",
    "starlette",
    "tqdm",
)
PEERS = ("sglang==0.5.23", "libcachesim==0.3.5")


def main() -> None:
    """Make the venv, or bring it up to date."""
    if sys.version_info[:2] != (3, 11):
        sys.exit("SGLang's wheel with the Rust core is taken for Python 3.11; run this with that")
    venv.create(VENV, with_pip=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *OURS, TORCH, *IMPORTED], check=True)
    subprocess.run([*pip, "--no-deps", *PEERS], check=True)


if __name__ == "__main__":
    main()
