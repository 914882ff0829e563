"""A directory that keeps a server's state: its files, which of them count, and that nobody else uses them.

    lock                  held by the server for as long as it lives
    lock.shared           held by the server and by what it starts
    state.json            the manifest: whose state this is, and which files make it up
    snapshot-00000007.db  all there was before the first record of segment 7
    journal-00000007.log  what happened since
    events.seq            a number above those of all events so far (`radix_cache_service.state.numbers`)

The manifest is replaced as a whole, by a rename, and it alone says what counts: a file that it does not need is left
over from something that did not end, and is removed. Only the server writes it. It is there before the first segment,
and names each segment, and how far the journal had come, once that is written: what it names and is not there is lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from radix_cache_service.state.journal import StateError

__all__ = ["Manifest", "StateDir"]

_FORMAT = 2
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a state directory holds.

    epoch: of the server. pool_epoch: which life of the GPU memory it is about. settings: what the cache was made with.
    layout_fingerprint: of the KV blocks. boot_id: the life of the machine; empty where it is not known.
    segment, number: the first segment that is not in the snapshot, and the number of its first record. snapshot,
    sha256: the file and its checksum, None where all there was is in the journal. last, last_number: the last segment
    that is known to be there, and the number after that of its last known record; 0 where nobody was served yet, and
    then is_closed says whether the pool is to be closed at first. has_tokens: whether engines are known
    under their tokens' names; None: some of those that have leases perhaps.
    """

    epoch: str
    pool_epoch: str
    settings: dict[str, Any]
    layout_fingerprint: str
    boot_id: str
    segment: int = 1
    number: int = 1
    snapshot: str | None = None
    sha256: str | None = None
    last: int = 0
    last_number: int = 0
    is_closed: bool = False
    has_tokens: bool | None = None


class StateDir:
    """One state directory, locked: for good by a server, and shared with what it starts.

    is_child: this process was started by the server that has the locks. shared: the file descriptor of the lock that
    such a process inherits, and holds as long as it lives. Raises `StateError` where another server has the directory,
    or it cannot be used.
    """

    def __init__(self, path: str | Path, *, is_child: bool = False) -> None:
        self.path = Path(path)
        self._own = self.shared = -1
        if not is_child:
            self._take()

    def _take(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._own = _locked(self.path / "lock", 0.0)
            self.shared = _locked(self.path / "lock.shared", _PATIENCE_S)  # a killed server's child ends very soon
        except BlockingIOError as error:
            self.close()
            raise StateError(f"state directory {self.path} is in use by another server") from error
        except OSError as error:
            self.close()
            raise StateError(f"state directory {self.path} cannot be used: {error.strerror}") from error

    def close(self) -> None:
        """Let go of the locks."""
        for file in (self._own, self.shared):
            if file >= 0:
                os.close(file)
        self._own = self.shared = -1

    # The manifest.

    def read(self) -> Manifest | None:
        """Return the manifest; None where the directory is new. Raises `StateError`."""
        path = self.path / "state.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            found, checked = kept.pop("format"), kept.pop("check")
            if found != _FORMAT:
                raise StateError(f"{path} has format {found}, this version of radix-cache reads {_FORMAT}")
            if checked != _check(kept):
                raise StateError(f"{path} is damaged: its checksum is not that of its contents")
            settings = kept.pop("settings")
            lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
            return Manifest(**kept, settings={**settings, **lists})
        except FileNotFoundError:
            if self.segments() or any(self.path.glob("snapshot-*")):
                raise StateError(f"{path} is missing, though there are files that it should name") from None
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateError(f"{path} is damaged: {error}") from error
        except OSError as error:
            raise error if isinstance(error, StateError) else StateError(f"{path}: {error.strerror}") from error

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest, and remove the files that are not needed any more. Raises `StateError`."""
        path, said = self.path / "state.json", asdict(manifest)
        try:
            replace_file(path, json.dumps({"format": _FORMAT, **said, "check": _check(said)}, indent=1))
            self._remove_others(manifest)
        except OSError as error:
            raise StateError(f"{path} cannot be written: {error.strerror}") from error

    def _remove_others(self, manifest: Manifest) -> None:
        for path in self.path.glob("snapshot-*"):
            if path.name != manifest.snapshot:
                path.unlink()
        for number in self.segments():
            if number < manifest.segment:
                self.segment(number).unlink()

    # Its files.

    def segment(self, number: int) -> Path:
        """Return where a segment of the journal is."""
        return self.path / f"journal-{number:08}.log"

    def segments(self) -> list[int]:
        """Return the numbers of the segments that are there, in order."""
        names = (path.name[len("journal-") : -len(".log")] for path in self.path.glob("journal-*.log"))
        return sorted(int(name) for name in names if name.isdecimal())

    def snapshot(self, segment: int) -> Path:
        """Return where the snapshot belongs that holds all before ``segment``."""
        return self.path / f"snapshot-{segment:08}.db"

    def checked_snapshot(self, manifest: Manifest) -> Path | None:
        """Return the snapshot's file, having compared its checksum. Raises `StateError`."""
        if manifest.snapshot is None:
            return None
        path = self.path / manifest.snapshot
        try:
            found = checksum(path)
        except OSError as error:
            raise StateError(f"{path}: {error.strerror}") from error
        if found != manifest.sha256:
            raise StateError(f"{path} is damaged: its checksum is not the one in state.json")
        return path


def _locked(path: Path, patience_s: float) -> int:
    """Return a new file descriptor that holds the lock on ``path``. Raises `BlockingIOError`."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(file)
                raise
            time.sleep(0.05)


def replace_file(path: Path, text: str) -> None:
    """Write a file, such that there is either the old one or the new one. Raises `OSError`."""
    draft = path.with_name(f"{path.name}.tmp")
    with open(draft, "w", encoding="utf-8", opener=_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _check(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
