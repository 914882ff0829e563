"""Where engines leave each other leases to take over, as a prefill engine does for a decode engine: one file each."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import NamedTuple


class Parcel(NamedTuple):
    """A lease that was promised a time of its own, and what it was for."""

    lease_id: str
    tokens: list[int]
    namespace: tuple[str, ...]


class Mailbox:
    """A folder. Nobody gets what somebody else has taken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = uuid.uuid4().hex

    def put(self, parcel: Parcel) -> None:
        """Leave a parcel."""
        unfinished = self._folder / f"{self._name}.part"
        unfinished.write_text(json.dumps(parcel), encoding="utf-8")
        unfinished.rename(self._folder / f"{parcel.lease_id}.json")

    def take(self) -> Parcel | None:
        """Take any one, or None."""
        mine = self._folder / f"{self._name}.mine"
        for path in self._folder.glob("*.json"):
            try:
                path.rename(mine)
            except FileNotFoundError:
                continue
            lease_id, tokens, namespace = json.loads(mine.read_text(encoding="utf-8"))
            return Parcel(lease_id, tokens, tuple(namespace))
        return None
