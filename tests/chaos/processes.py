"""The server and the engines as processes: started, killed, paused, replaced. Their output goes into files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from .memory import Fence
from .request import Violation
from .settings import Settings

_TESTS = Path(__file__).parent.parent
_START_S = 60.0
_JOURNAL_BYTES = 4 * 2**20  # little, so that it is compacted under load
_NUM_EVENTS = 256  # queued and kept: few, so that slow readers are turned away, and late ones get it all anew


def _start(module: str, arguments: Iterable[str], log: Path, **extra: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"chaos.{module}", *arguments],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra},
        )


class ServerProcess:
    """The server: one process after the other, at the same addresses, with the same state.

    life: how many there were. memory_life: how many pools of memory.
    """

    def __init__(self, settings: Settings, metrics_port: int) -> None:
        self._settings = settings
        self._metrics_port = metrics_port
        self.life = 0
        self.memory_life = 1
        self.process: subprocess.Popen[bytes] | None = None
        self.log = settings.folder.logs / "server.log"

    def start(self, *flags: str) -> None:
        """Start it, and wait until it serves."""
        settings, folder = self._settings, self._settings.folder
        options = {
            "num-blocks": settings.num_blocks,
            "num-reserved-blocks": settings.num_reserved_blocks,
            "block-size": settings.block_size,
            "lease-ttl-s": settings.lease_ttl_s,
            "test-clock": folder.clock,
            "state-dir": folder.state,
            "pool-epoch": f"memory-{self.memory_life}",
            "max-journal-bytes": _JOURNAL_BYTES,
            "max-queued-events": _NUM_EVENTS,
            "max-kept-events": _NUM_EVENTS,
            "metrics-listen": f"127.0.0.1:{self._metrics_port}",
        }
        listen = ["--listen", f"127.0.0.1:{settings.port}", "--listen", f"unix:{folder.socket}"]
        self.life += 1
        before = self.log.stat().st_size if self.log.exists() else 0
        self.process = _start(
            "server",
            [
                *listen,
                "--events",
                *(part for name, value in options.items() for part in (f"--{name}", str(value))),
                *flags,
            ],
            self.log,
            CHAOS_WALK=str(folder.walk),
            CHAOS_PLANT=settings.plant,
        )
        self._wait_until_ready(before)

    def _wait_until_ready(self, start: int) -> None:
        assert self.process is not None
        for _ in range(int(_START_S / 0.02)):
            if self.log.read_bytes()[start:].count(b"listening on ") == 2:
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        text = self.log.read_bytes()[start:].decode(errors="replace")
        raise Violation("the server did not start", status=self.process.poll(), log=text[-2000:])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def lose_state(self) -> None:
        """Delete what it keeps; not while it runs, but a compaction of its may still be at it."""
        state = self._settings.folder.state
        lost = state.rename(state.with_name(f"state-{self.life}"))
        shutil.rmtree(lost, ignore_errors=True)

    def errors(self) -> list[str]:
        """Return the lines of its log that no server may write. What gRPC says of clients that are gone is not ours."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if re.search(r" (ERROR|CRITICAL) radix_cache|^Traceback", line)]

    @property
    def has_ended(self) -> bool:
        """Tell whether it is gone without having been told."""
        return self.process is not None and self.process.poll() is not None

    def kill(self) -> None:
        """Kill it (-9)."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it in order; return its exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, name: signal.Signals) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(name)
        try:
            return process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class EngineProcess:
    """One engine: one process after the other, each with a name of its own. life: how many there were."""

    def __init__(self, settings: Settings, number: int, fence: Fence) -> None:
        self.number = number
        self.life = 0
        self.is_paused = False
        self._settings = settings
        self._fence = fence
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What this life has written."""
        return self._settings.folder.logs / f"engine-{self.number}.{self.life}.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Begin another life."""
        self.life += 1
        arguments = [str(self._settings.folder.settings), str(self.number), str(self.life)]
        self._process = _start("engine", arguments, self.log)

    def status(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> int:
        """Kill it (-9), wherever it is: a dead engine writes nothing. Return its exit status, perhaps of before."""
        return self._end(signal.SIGKILL)

    def leave(self) -> int:
        """Tell it to give everything back and end; return its exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, name: signal.Signals) -> int:
        if self._process is None:
            return 0
        self.resume()
        if self._process.poll() is None:
            self._process.send_signal(name)
        try:
            status = self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._process = None
        return status

    def stacks(self) -> str:
        """Return what its threads are doing."""
        before = self.log.stat().st_size
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.log.read_bytes()[before:].decode(errors="replace")

    def pause(self) -> None:
        """Stop it, but not at the memory: no kernel outlives the look at the clock by more than the fence allows."""
        if self._process is None or self._process.poll() is not None:
            return
        with self._fence.exclusive():
            self._process.send_signal(signal.SIGSTOP)
            self.is_paused = True
            while _state_of(self.pid) not in "TtZX":
                time.sleep(0.001)

    def resume(self) -> None:
        """Let it go on."""
        if self.is_paused and self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self.is_paused = False


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"
