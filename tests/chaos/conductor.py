"""The conductor: starts everything, lets the faults strike, watches, and at the end sees whether all was given back."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from radix_cache.errors import RadixCacheError
from radix_cache_service import Client

from .board import Board
from .census import Census
from .clock import LeaseClock
from .engine import VIOLATED
from .faults import Faults
from .gate import Gate
from .growth import Growths
from .memory import Fence, Memory
from .mirror import Mirror
from .network import Proxy
from .processes import EngineProcess, ServerProcess
from .request import Violation
from .settings import Folder, Settings
from .watchers import Scraper

_STUCK_S = 60.0
_LAST_KILL_SHARE = 0.6  # of the run; in the rest one server lives long enough for its memory to be measured
_SETTLED_S = 60.0


class Conductor:
    """One run. violations: what was broken, in the order in which it was found."""

    def __init__(self, folder: Folder, seconds: float, period_s: float, **settings: Any) -> None:
        folder.create()
        self.seconds = seconds
        self.started_at = time.monotonic()
        self.violations: list[dict[str, Any]] = []
        self._period_s = period_s
        port, metrics_port = _free_ports(2)
        self.proxy = Proxy(port)
        self.proxy.start()
        self.settings = Settings(root=str(folder.root), port=port, proxy_port=self.proxy.port, **settings)
        self.settings.write()
        Board.create(folder.board, self.settings.num_engines)
        Memory.create(folder.memory, self.settings.num_blocks)
        self.board = Board(folder.board, self.settings.num_engines)
        self.memory = Memory(folder.memory, self.settings.num_blocks)
        self.fence = Fence(folder.fence)
        self.clock = LeaseClock(folder.clock, self.fence)
        self.server = ServerProcess(self.settings, metrics_port)
        self.engines = [EngineProcess(self.settings, n, self.fence) for n in range(self.settings.num_engines)]
        self.client = Client(f"unix:{folder.socket}", timeout_s=10.0)
        self.mirror = Mirror(f"127.0.0.1:{port}", self.settings.block_size, self._say)
        self.census = Census(self.settings, self.client, self.server, self.memory, self.board, self.mirror)
        url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.scraper = Scraper(f"127.0.0.1:{port}", url, self.census.num_usable_blocks, self._say)
        self.growths = Growths()
        self.gate = Gate(folder, self.board, self.fence, self.engines, self._do_what_is_due)
        self.faults = Faults(self, self.settings.seed)
        self.num_censuses = 0
        self.last_census: dict[str, Any] = {}
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._progress = (0, time.monotonic())

    # For the faults.

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def may_kill_server(self) -> bool:
        return self.elapsed_s < _LAST_KILL_SHARE * self.seconds or self.faults.is_first_round

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """Do it when so much time has passed."""
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._numbers), do))

    def restart_server(self, *, is_cold: bool = False) -> None:
        """Kill it and start it again. Without its state, it is told that the pool is in use."""
        self.server.kill()
        if is_cold:
            self.server.lose_state()
        self.server.start(*["--pool-in-use"] * is_cold)
        self._meet_server()

    def _meet_server(self) -> None:
        """Wait until the server that was started answers."""
        self.growths.server_began()
        deadline = time.monotonic() + _STUCK_S
        while time.monotonic() < deadline:
            with suppress(RadixCacheError):
                self.client.describe()
                return
            time.sleep(0.02)
        raise Violation("the server does not answer after its start", log=self._tail(self.server.log))

    def restart_at_rest(self) -> None:
        """Kill it while nothing goes on: what it kept must be what it had, to the last block and in the same order."""
        with self.gate.closed():
            before = self.census.picture()
            self.restart_server()
            self.census.compare(before)

    def renew_memory(self) -> None:
        """All go down together, and the memory comes back empty: so must the cache, by itself."""
        self.server.kill()
        for engine in self.engines:
            self._check_status(engine.number, engine.kill())
        self.memory.clear()
        self.server.memory_life += 1
        self.server.start()
        self._meet_server()
        stats = self.client.stats()
        if stats.num_free_blocks != self.census.num_usable_blocks:
            raise Violation("the cache is not empty after its memory was renewed", stats=str(stats))
        self.growths.engine_began()
        for engine in self.engines:
            engine.start()

    def replace(self, number: int, *, is_killed: bool) -> None:
        """Kill an engine, or let it leave in order, and start another in its place."""
        engine = self.engines[number]
        self._check_status(number, engine.kill() if is_killed else engine.leave())
        engine.start()

    def take_census(self) -> None:
        """Let everybody wait between two steps, and check everything."""
        with self.gate.closed():
            self.last_census = self.census.take()
        self.growths.count(self.last_census["num_python_blocks"])
        self.num_censuses += 1

    # The run.

    def run(self, show: Callable[[Conductor], None]) -> None:
        """Run to the end, or to the first violation. show: called once in a while, for the progress."""
        try:
            self._begin()
            next_strike = time.monotonic()
            while self.elapsed_s < self.seconds and not self.violations:
                self._do_what_is_due()
                if time.monotonic() >= next_strike:
                    next_strike += self._period_s
                    self.faults.strike()
                self._watch()
                show(self)
                time.sleep(0.02)
            if not self.violations:
                self._end()
        except Violation as violation:
            self._say(violation)
        except RadixCacheError as error:
            self._say(Violation("the server does not answer", error=f"{type(error).__name__}: {error}"))
        finally:
            self._clean_up()

    def _begin(self) -> None:
        self.clock.start()
        self.server.start()
        for engine in self.engines:
            engine.start()
        self.scraper.start()
        self.mirror.start()
        self.started_at = time.monotonic()

    def _do_what_is_due(self) -> None:
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            heapq.heappop(self._agenda)[2]()

    def _watch(self) -> None:
        for engine in self.engines:
            status = engine.status()
            if status is not None:
                self._check_status(engine.number, status)
                raise Violation(f"engine {engine.number} has ended by itself", status=status)
        if self.server.has_ended:
            raise Violation("the server has ended by itself", log=self._tail(self.server.log))
        self.growths.look(self.server.pid, self.engines[0].pid)
        num_steps = self.board.total("num_steps")
        if num_steps != self._progress[0]:
            self._progress = num_steps, time.monotonic()
        elif time.monotonic() - self._progress[1] > _STUCK_S:
            raise Violation(f"no engine has made a step in {_STUCK_S} s")

    def _check_status(self, number: int, status: int) -> None:
        if status == VIOLATED:
            path = self.settings.folder.reports / f"engine-{number}.{self.engines[number].life}.json"
            facts = json.loads(path.read_text(encoding="utf-8"))
            raise Violation(facts.pop("what"), **facts)
        if status not in {0, -signal.SIGKILL, -signal.SIGTERM}:  # the last: told to leave before it had begun
            raise Violation(f"engine {number} crashed", status=status, log=self._tail(self.engines[number].log))

    def _tail(self, path: Any) -> str:
        return path.read_bytes()[-3000:].decode(errors="replace")

    def _say(self, violation: Violation) -> None:
        self.violations.append(violation.facts)

    # The end.

    def _end(self) -> None:
        """One engine dies, the others leave; then all must be as if nobody had been there."""
        for engine in self.engines:
            self._check_status(engine.number, engine.kill() if engine is self.engines[-1] else engine.leave())
        self.faults.join()
        self._wait_until_settled()
        self.last_census = self.census.take(is_last=True)
        self.num_censuses += 1
        self.client.reset()
        stats = self.client.stats()
        if stats.num_free_blocks != self.census.num_usable_blocks:
            raise Violation("blocks are missing after a reset", stats=str(stats))
        self.scraper.stop()
        self.mirror.stop()
        status = self.server.stop()
        if status:
            raise Violation("the server did not end well", status=status, log=self._tail(self.server.log))
        if wrong := self.server.errors():
            raise Violation("the server logged errors", log=wrong)

    def _wait_until_settled(self) -> None:
        """Wait until the promises to those who are gone have run out."""
        deadline = time.monotonic() + _SETTLED_S
        while (stats := self.client.stats()).num_leases:
            if time.monotonic() > deadline:
                raise Violation("leases are left after all have ended and their time has passed", stats=str(stats))
            self.clock.jump(self.settings.lease_ttl_s)
            time.sleep(0.1)

    def _clean_up(self) -> None:
        for engine in self.engines:
            engine.kill()
        self.scraper.stop()
        self.mirror.stop()
        self.client.close()
        self.server.kill()
        self.clock.stop()
        self.proxy.stop()


def _free_ports(number: int) -> list[int]:
    """Return ports that nobody gets who does not ask for them by number: a server that is killed has its back."""
    ports: set[int] = set()
    while len(ports) < number:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)
