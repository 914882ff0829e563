"""Every way to reach a cache, behind one small face, so that scenarios and contract are written once.

A `Route` is one cache, new and empty, and whatever is needed to reach it. A `Caller` is one party that calls it: an
engine with an id, or somebody without one. Its verbs are those of `radix_cache.PrefixCache`, less ``engine_id``, and
are called as plain functions, whether the client behind them is or not.

To add a route:

- Subclass `Caller`. Its ``target`` is a client that has the verbs. If they are coroutines, override `Caller.finish` to
  run one on the route's loop. Override `Caller.batch` if the client's batch has another form; it must yield an object
  with the verbs whose answers have ``result()``, raise on leaving what concerns the batch as a whole, and pass ``seq``
  on as given.
- Subclass `Route`. ``__init__`` takes the keywords of `PrefixCache` (less ``clock``) and starts a cache with them;
  ``caller`` returns the party of that engine, the same one each time, which sends no heartbeat unless it is told to;
  ``cut`` breaks that party's connection without a good-bye; ``advance`` lets time pass, by a clock that the test moves
  or by waiting; ``check`` runs the cache's own integrity check; ``close`` ends it all and leaves no thread, process or
  warning behind. Say in ``shares_leases`` whether a lease object knows at once what others have done to the lease.
- Append it to `ROUTES`. Everything that uses the ``open_route`` fixture then runs over it as well.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from helpers import Clock, counters
from service_process import ServerProcess

from radix_cache import NamespaceLimit, PrefixCache
from radix_cache_service import AsyncClient, Client

WITH_ENGINE = ("match_prefix", "allocate", "insert", "free", "release", "renew", "pin")
WITHOUT_ENGINE = ("unpin", "probe", "evict", "reset", "stats", "namespace_stats", "describe")


class Caller:
    """One party; see the module's text. ``caller.verb(...)`` returns the answer or raises the error."""

    def __init__(self, target: Any, engine_id: str | None) -> None:
        self.target = target
        self.engine_id = engine_id

    def finish(self, answer: Any) -> Any:
        """Return the value of what a verb of the target returned."""
        return answer

    def call(self, verb: str, *args: Any, **options: Any) -> Any:
        """Call any verb by its name."""
        return self.finish(getattr(self.target, verb)(*args, **options))

    def __getattr__(self, verb: str) -> Any:
        if verb not in WITH_ENGINE + WITHOUT_ENGINE:
            raise AttributeError(verb)
        return lambda *args, **options: self.call(verb, *args, **options)

    def heartbeat(self) -> None:
        """Say that this engine lives."""
        raise NotImplementedError

    @contextmanager
    def batch(self, seq: int | None = None, strict: bool = False) -> Iterator[Any]:
        """Yield the recorder of one batch, which runs when the block ends."""
        with self.target.batch(seq=seq, strict=strict) as recorder:
            yield recorder


class InProcessCaller(Caller):
    """Calls a `PrefixCache` and says each time who it is."""

    def call(self, verb: str, *args: Any, **options: Any) -> Any:
        """Add the engine id where the verb takes one."""
        if verb in WITH_ENGINE:
            options["engine_id"] = self.engine_id
        return super().call(verb, *args, **options)

    def heartbeat(self) -> None:
        """Say that this engine lives."""
        self.target.heartbeat(self.engine_id)

    @contextmanager
    def batch(self, seq: int | None = None, strict: bool = False) -> Iterator[Any]:
        """Yield the recorder of one batch, which runs when the block ends."""
        with self.target.batch(engine_id=self.engine_id, seq=seq, strict=strict) as recorder:
            yield recorder


class Route:
    """One new cache and the way to it; see the module's text."""

    name: ClassVar[str]
    shares_leases: ClassVar[bool] = False

    def caller(self, engine_id: str | None = None) -> Caller:
        """Return the party of that engine, or one that gives no engine id."""
        raise NotImplementedError

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        raise NotImplementedError

    def cut(self, engine_id: str) -> None:
        """Break the connection of that engine's party, as a crash would. It can call again afterwards."""
        raise NotImplementedError

    def check(self) -> None:
        """Run the cache's own integrity check."""
        raise NotImplementedError

    def close(self) -> None:
        """End whatever was started."""
        raise NotImplementedError


class InProcess(Route):
    """`PrefixCache`, called directly, with a clock that stands still."""

    name = "in-process"
    shares_leases = True

    def __init__(self, **config: Any) -> None:
        self.clock = Clock()
        self.cache = PrefixCache(clock=self.clock, **config)

    def caller(self, engine_id: str | None = None) -> Caller:
        """Return a party; they all call the one object."""
        return InProcessCaller(self.cache, engine_id)

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        self.clock.advance(seconds)

    def cut(self, engine_id: str) -> None:
        """Do nothing: there is no connection."""

    def check(self) -> None:
        """Run the integrity check."""
        self.cache.check_integrity()

    def close(self) -> None:
        """Look once more."""
        self.cache.check_integrity()


class FileClock(Clock):
    """A clock that another process reads from a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.advance(0)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass; a reader sees the old time or the new one, never half a file."""
        super().advance(seconds)
        new = self.path.with_suffix(".new")
        new.write_text(repr(self.now))
        new.replace(self.path)


class ClientCaller(Caller):
    """Calls through a `Client`, which has a heart but keeps it still."""

    def __init__(self, address: str, engine_id: str | None) -> None:
        super().__init__(self.connect(address, engine_id, heartbeat_interval_s=1e6), engine_id)

    connect: ClassVar[Any] = Client

    def heartbeat(self) -> None:
        """Say that this engine lives."""
        self.finish(self.target.heartbeat())

    def cut(self) -> None:
        """Drop the connection without a word; the next call makes a new one."""
        self.finish(self.target._channel.close())
        self.target._channel = self.target._stub = None

    def close(self) -> None:
        """End it in order."""
        self.finish(self.target.close())


def limit_text(namespace: tuple[str, ...], limit: NamespaceLimit) -> str:
    """Return a limit as the server's setting has it."""
    values = {name: value for name, value in limit._asdict().items() if value is not None}
    return " ".join([f"namespace={part}" for part in namespace] + [f"{name}={value}" for name, value in values.items()])


class OverGrpc(Route):
    """A server process of its own, started as a user would, with a clock that the test moves."""

    caller_class: ClassVar[type[ClientCaller]] = ClientCaller

    def __init__(
        self, lease_ttl_s: float | None = None, growth_share: float = 0.0, limits: Any = None, **config: Any
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="radix-cache-"))
        self.clock = FileClock(self.folder / "clock")
        self.num_usable = config["num_blocks"] - config.get("num_reserved_blocks", 0)
        ttl = 1e9 if lease_ttl_s is None else lease_ttl_s
        self.server = ServerProcess(
            self.listen(),
            namespace_limits=[limit_text(*each) for each in (limits or {}).items()],
            lease_ttl_s=ttl,
            growth_share=growth_share,
            test_clock=self.clock.path,
            **config,
        )
        self.callers: dict[str | None, ClientCaller] = {}

    def listen(self) -> str:
        """Return where the server is to listen."""
        return f"unix:{self.folder}/s.sock"

    def caller(self, engine_id: str | None = None) -> ClientCaller:
        """Return a party with a client of its own."""
        if engine_id not in self.callers:
            self.callers[engine_id] = self.caller_class(self.server.address, engine_id)
        return self.callers[engine_id]

    def advance(self, seconds: float) -> None:
        """Move the server's clock."""
        self.clock.advance(seconds)

    def cut(self, engine_id: str) -> None:
        """Drop the connection."""
        self.caller(engine_id).cut()

    def check(self) -> None:
        """See that no block is lost; the server itself checks its sums at every call."""
        found = counters(self.caller().stats())
        assert found.free + found.leased + found.cached == self.num_usable

    def close(self) -> None:
        """End clients and server."""
        self.check()
        for caller in self.callers.values():
            caller.close()
        status, errors = self.server.stop()
        shutil.rmtree(self.folder)
        assert status == 0, errors


class OverUnixSocket(OverGrpc):
    """`Client` on a unix socket."""

    name = "client-unix"


class OverTcp(OverGrpc):
    """`Client` on a TCP port."""

    name = "client-tcp"

    def listen(self) -> str:
        """Return any free port."""
        return "127.0.0.1:0"


class AsyncCaller(ClientCaller):
    """Calls through an `AsyncClient`, on an event loop in a thread of its own."""

    connect = AsyncClient

    def __init__(self, address: str, engine_id: str | None) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        super().__init__(address, engine_id)

    def finish(self, answer: Any) -> Any:
        """Wait for a coroutine of the client."""

        async def wait() -> Any:
            return await answer

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result()

    @contextmanager
    def batch(self, seq: int | None = None, strict: bool = False) -> Iterator[Any]:
        """Yield the recorder of one batch; what comes after it is done on the loop."""
        batch = self.target.batch(seq=seq, strict=strict)
        yield self.finish(batch.__aenter__())
        self.finish(batch.__aexit__(None, None, None))

    def close(self) -> None:
        """End the client, then its loop."""
        super().close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class OverAsyncio(OverGrpc):
    """`AsyncClient`."""

    name = "async-client"
    caller_class = AsyncCaller


class SessionCaller(ClientCaller):
    """Calls through a session of a `Client` whatever can be: one message on a stream each."""

    def __init__(self, address: str, engine_id: str | None) -> None:
        super().__init__(address, engine_id)
        self.session = self.target.session()

    def call(self, verb: str, *args: Any, **options: Any) -> Any:
        """Call the session, or the client for what a session has not."""
        return getattr(self.session if hasattr(self.session, verb) else self.target, verb)(*args, **options)

    @contextmanager
    def batch(self, seq: int | None = None, strict: bool = False) -> Iterator[Any]:
        """Yield the recorder of one batch of the session."""
        with self.session.batch(seq=seq, strict=strict) as recorder:
            yield recorder

    def close(self) -> None:
        """End the session, then the client."""
        self.session.close()
        super().close()


class OverSession(OverGrpc):
    """`Session`."""

    name = "session"
    caller_class = SessionCaller


ROUTES: list[type[Route]] = [InProcess, OverUnixSocket, OverTcp, OverAsyncio, OverSession]
