"""The gate: where engines wait between two steps, so that somebody can look at everything at rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .board import Board
from .memory import Fence
from .processes import EngineProcess
from .request import Violation
from .settings import Folder

_PATIENCE_S = 60.0


class Gate:
    """meanwhile: called again and again while somebody is still on the way."""

    def __init__(
        self,
        folder: Folder,
        board: Board,
        fence: Fence,
        engines: Sequence[EngineProcess],
        meanwhile: Callable[[], object],
    ) -> None:
        self._folder = folder
        self._board = board
        self._fence = fence
        self._engines = engines
        self._meanwhile = meanwhile

    @contextmanager
    def closed(self) -> Iterator[None]:
        """No engine is within a step, each has laid open its books, and the clock stands still. Raises `Violation`."""
        for path in self._folder.books.iterdir():
            path.unlink()
        for engine in self._engines:
            engine.resume()
        self._board.close_gate(True)
        try:
            self._wait()
            with self._fence.exclusive():
                yield
        finally:
            self._board.close_gate(False)

    def _wait(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while late := [engine for engine in self._engines if self._is_under_way(engine)]:
            if time.monotonic() > deadline:
                stacks = {str(engine.number): engine.stacks() for engine in late}
                raise Violation(f"an engine has not come to the end of its step in {_PATIENCE_S} s", **stacks)
            self._meanwhile()
            time.sleep(0.005)

    def _is_under_way(self, engine: EngineProcess) -> bool:
        return engine.status() is None and not self._board.get(engine.number, "is_parked")
