"""What goes wrong, and in which order: a deck of faults, shuffled by the seed, dealt to its end and shuffled again.

So each fault happens within the first round, and none much more often than another. Those after which everybody begins
anew are in the deck once, the others twice.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .readers import Reader, read_tree_slowly, run_reader, send_without_reading, watch_events_slowly

if TYPE_CHECKING:
    from .conductor import Conductor

_SURVIVOR = 0  # this engine is never killed, so that its memory can be measured


class Faults:
    """Deals faults to a run. counts: how many of each took place."""

    def __init__(self, conductor: Conductor, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._conductor = conductor
        self._dice = random.Random(f"{seed}/faults")
        self._seed = seed
        self._deck: list[Callable[[], bool]] = []
        self._num_rounds = 0
        self._kinds: list[Callable[[], bool]] = [
            self.engine_killed,
            self.engine_left,
            self.engine_paused,
            self.clock_jumped,
            self.server_killed,
            self.server_killed_at_rest,
            self.network_cut,
            self.network_deaf,
            self.tree_read_slowly,
            self.answers_not_read,
            self.events_read_slowly,
            self.census_taken,
        ]
        self._rare: list[Callable[[], bool]] = [self.server_lost_its_state, self.memory_renewed]
        self._readers: list[threading.Thread] = []

    def names(self) -> list[str]:
        """Return all kinds."""
        return [kind.__name__ for kind in (*self._kinds, *self._rare)]

    @property
    def is_first_round(self) -> bool:
        """Tell whether some have not had their turn."""
        return self._num_rounds <= 1

    def strike(self) -> None:
        """Do the next one that is possible now."""
        while True:
            if not self._deck:
                self._deck = [*self._kinds, *self._kinds, *self._rare]
                self._dice.shuffle(self._deck)
                self._num_rounds += 1
            kind = self._deck.pop()
            if kind():
                self.counts[kind.__name__] += 1
                return

    def join(self) -> None:
        """Wait for the slow readers."""
        for reader in self._readers:
            reader.join(30)

    # Engines.

    def engine_killed(self) -> bool:
        self._conductor.replace(self._some_engine(), is_killed=True)
        return True

    def engine_left(self) -> bool:
        self._conductor.replace(self._some_engine(), is_killed=False)
        return True

    def _some_engine(self) -> int:
        return self._dice.choice([n for n in range(len(self._conductor.engines)) if n != _SURVIVOR])

    def engine_paused(self) -> bool:
        """For longer than its leases live, so that others get its blocks."""
        engine = self._dice.choice(self._conductor.engines)
        if engine.is_paused:
            return False
        engine.pause()
        self._conductor.later(self._conductor.settings.lease_ttl_s * self._dice.uniform(1.1, 1.6), engine.resume)
        return True

    # The server and the clock.

    def clock_jumped(self) -> bool:
        self._conductor.clock.jump(self._conductor.settings.lease_ttl_s * self._dice.uniform(0.3, 2.0))
        return True

    def server_killed(self) -> bool:
        """Under load. With its state, so that nothing is lost."""
        return self._restart(self._conductor.restart_server)

    def server_killed_at_rest(self) -> bool:
        return self._restart(self._conductor.restart_at_rest)

    def server_lost_its_state(self) -> bool:
        return self._restart(partial(self._conductor.restart_server, is_cold=True))

    def memory_renewed(self) -> bool:
        return self._restart(self._conductor.renew_memory)

    def _restart(self, restart: Callable[[], None]) -> bool:
        if not self._conductor.may_kill_server:
            return False
        restart()
        return True

    def census_taken(self) -> bool:
        self._conductor.take_census()
        return True

    # The network.

    def network_cut(self) -> bool:
        self._conductor.proxy.cut()
        return True

    def network_deaf(self) -> bool:
        """Replies are held back for a while; then they arrive, or are lost with their connections."""
        proxy = self._conductor.proxy
        proxy.deafen()
        is_lost = self._dice.random() < 0.5

        def end() -> None:
            if is_lost:
                proxy.cut()
            proxy.hear()

        self._conductor.later(self._dice.uniform(0.1, 1.5), end)
        return True

    # Slow readers.

    def tree_read_slowly(self) -> bool:
        return self._read(read_tree_slowly)

    def answers_not_read(self) -> bool:
        return self._read(send_without_reading)

    def events_read_slowly(self) -> bool:
        return self._read(watch_events_slowly)

    def _read(self, reader: Reader) -> bool:
        address = f"127.0.0.1:{self._conductor.settings.port}"
        run = partial(run_reader, reader, address, f"{self._seed}/{self._dice.random()}")
        self._readers = [thread for thread in self._readers if thread.is_alive()]
        self._readers.append(threading.Thread(target=run, daemon=True, name=reader.__name__))
        self._readers[-1].start()
        return True
