"""What a run is made of, as all its processes read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


class Folder:
    """Where a run keeps its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = root / "settings.json"
        self.board = root / "board"
        self.memory = root / "memory"
        self.fence = root / "fence"
        self.clock = root / "clock"
        self.socket = root / "server.sock"
        self.walk = root / "walk.json"
        self.mailbox = root / "mailbox"
        self.books = root / "books"
        self.reports = root / "reports"
        self.logs = root / "logs"
        self.state = root / "state"

    def create(self) -> None:
        """Make the folders in it."""
        for folder in (self.mailbox, self.books, self.reports, self.logs):
            folder.mkdir()


@dataclass(frozen=True)
class Settings:
    """See the module.

    root: the run's folder. port: of the server; proxy_port: of the proxy in front of it, which every second engine
    uses. call_fault_share: how many of an engine's unary calls go wrong. plant: a fault of the harness's own, to see it
    caught, or "".
    """

    root: str
    seed: int
    num_engines: int
    port: int
    proxy_port: int
    num_blocks: int = 192
    num_reserved_blocks: int = 1
    block_size: int = 4
    lease_ttl_s: float = 2.0
    timeout_s: float = 1.0
    max_running: int = 8
    call_fault_share: float = 0.03
    plant: str = ""

    @property
    def folder(self) -> Folder:
        """The run's folder."""
        return Folder(Path(self.root))

    def address_of(self, engine: int) -> str:
        """Return how an engine reaches the server: over the proxy or over the unix socket."""
        return f"127.0.0.1:{self.proxy_port}" if engine % 2 else f"unix:{self.folder.socket}"

    def write(self) -> None:
        """Leave them in the folder."""
        self.folder.settings.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Settings:
        """Return what `write` left."""
        return Settings(**json.loads(path.read_text(encoding="utf-8")))
