"""A client that is not ours: Node's gRPC library, which is given the .proto and nothing else.

Its packages are installed at the first run, in the versions of tests/node/package-lock.json. Where there is no node, or
the packages can't be had, the tests are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google.rpc
import pytest
from helpers import counters
from service_process import ServerProcess

from radix_cache_service import Client

ROOT = Path(__file__).parent.parent
NODE = Path(__file__).parent / "node"
GUIDE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
LOCK = (NODE / "package-lock.json").read_bytes()
INSTALL_S = 90
INCLUDE_DIRS = [str(ROOT / "proto"), str(Path(next(iter(google.rpc.__path__))).parent.parent)]


@pytest.fixture(scope="session")
def modules() -> Path:
    """The folder with the packages."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not installed")
    home = ROOT / "build" / f"node-{hashlib.sha256(LOCK).hexdigest()[:16]}"
    if not home.exists():
        install(home)
    return home / "node_modules"


def install(home: Path) -> None:
    """Fetch the packages and check them against the lock file; ``home`` is there only when all of it is."""
    home.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(NODE / name, folder)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
        try:
            ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm did not bring the packages in {INSTALL_S} s")
        assert not re.search("EUSAGE|EINTEGRITY", ended.stderr), ended.stderr
        if ended.returncode:
            pytest.skip("npm cannot bring the packages")
        Path(folder).rename(home)
        Path(folder).mkdir()  # for its context manager to remove


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(num_blocks=64, block_size=4) as process:
        yield process
        with Client(process.address) as client:
            stats = client.stats()
        assert (stats.num_leases, counters(stats).leased, counters(stats).protected) == (0, 0, 0)


def run(script: Path, modules: Path, *arguments: str) -> str:
    command = ["node", str(script), *arguments]
    environ = {**os.environ, "NODE_PATH": str(modules)}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environ)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def said(server: ServerProcess, modules: Path) -> Any:
    return json.loads(run(NODE / "drive.js", modules, server.address, *INCLUDE_DIRS))


def test_a_request_from_its_match_to_its_release(said: Any) -> None:
    """With ids as lists, and then the same prompt with packed ids: what the first has published is found."""
    listed = {"cached": 0, "table": [0, 1, 2], "added": [3], "published": [0, 1]}
    assert said["listed"] == listed
    assert said["packed"] == {**listed, "cached": 8, "table": [0, 1, 4], "added": [5]}


def test_a_session(said: Any) -> None:
    assert said["session"] == [["match_prefix", "allocate"], ["error", "release"]]


def test_errors_say_their_reason(said: Any) -> None:
    common = {"domain": "radixcache.v1"}
    unknown = {"code": "NOT_FOUND", "reason": "UNKNOWN_LEASE", "numbers": {"lease_id": "nobody"}}
    exhausted = {
        "code": "RESOURCE_EXHAUSTED",
        "reason": "POOL_EXHAUSTED",
        "numbers": {"needed": "250", "available": "64"},
    }
    assert said["unknown"] == {**unknown, **common}
    assert said["exhausted"] == {**exhausted, **common}
    assert said["invalid"] == {"code": "INVALID_ARGUMENT", "reason": "INVALID_TOKENS", "numbers": {}, **common}


def test_the_guides_client(modules: Path, tmp_path: Path) -> None:
    ((code, output),) = re.findall(r"^```js\n(.*?)^```$\n+^```text\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    script = tmp_path / "client.js"
    script.write_text(code, encoding="utf-8")
    with ServerProcess(num_blocks=64, block_size=4) as server:
        assert run(script, modules, server.address, *INCLUDE_DIRS) == output
