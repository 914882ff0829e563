"""Where a server's ledger comes from: nowhere, or its state directory.

A state directory is about one pool with one content. So it is only taken up with the settings that it was kept with,
and never for another life of the GPU memory, nor after the machine went down: what it wrote last is not sure to be
there. Then the cache starts cold, under a new epoch, which tells clients that the leases of before are gone. Unless the
pool is known to be new, engines of before may still write to it, and it stays closed for one ttl. The manifest has that
until it is in the journal: a start that is killed before it served anybody is made again by the next one.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from radix_cache_service.config import ServerConfig
from radix_cache_service.state.directory import Manifest, StateDir
from radix_cache_service.state.journal import StateError
from radix_cache_service.state.keeper import Keeper
from radix_cache_service.state.ledger import Ledger
from radix_cache_service.state.recovery import recover

__all__ = ["new_epoch", "open_ledger"]

_log = logging.getLogger(__name__)

_ADVICE = "to begin anew, move the directory away and start with --pool-in-use"


def new_epoch() -> str:
    """Return 64 random bits."""
    return os.urandom(8).hex()


def open_ledger(config: ServerConfig) -> tuple[Ledger, Keeper | None]:
    """Return the ledger to serve from, and what keeps it, if anything does. Raises `StateError`."""
    if config.state_dir is None:
        ledger = _new(config)
        ledger.start(_closed_as(config))
        return ledger, None
    state = StateDir(config.state_dir)
    try:
        return _open_kept(state, config)
    except BaseException:
        state.close()
        raise


def _new(config: ServerConfig) -> Ledger:
    clock = config.make_clock()
    return Ledger(config.make_cache(clock), clock)


def _closed_name() -> str:
    """Return a name that nobody guesses, for the lease that holds the whole pool at first."""
    return f"in-use-before-the-start-{os.urandom(16).hex()}"


def _closed_as(config: ServerConfig) -> str:
    return _closed_name() if config.pool_in_use else ""


def _open_kept(state: StateDir, config: ServerConfig) -> tuple[Ledger, Keeper]:
    manifest = state.read()
    if manifest is None:
        return _begin(state, config, _closed_as(config))
    if manifest.pool_epoch and not config.pool_epoch:
        raise StateError(
            f"{state.path} is about pool_epoch {manifest.pool_epoch!r}, "
            f"and this start names none: name it, or {_ADVICE}"
        )
    if manifest.pool_epoch != config.pool_epoch:
        _log.warning("pool_epoch is not %r but %r: the cache starts cold", manifest.pool_epoch, config.pool_epoch)
        return _begin(state, config, _closed_as(config) if manifest.pool_epoch else _closed_name())
    if manifest.boot_id != _boot_id():
        _log.warning("the machine was started anew since: the cache starts cold")
        return _begin(state, config, _closed_name())
    if not manifest.last:
        _log.warning("the start before this one ended before it served: it is made again")
        return _begin(state, config, _closed_name() if manifest.is_closed else _closed_as(config))
    _check_settings(state, config, manifest)
    return _go_on(state, config, manifest)


def _boot_id() -> str:
    """Return the name that the kernel gave to this run of it; nothing where there is no such kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _begin(state: StateDir, config: ServerConfig, closed_as: str) -> tuple[Ledger, Keeper]:
    manifest = Manifest(
        new_epoch(),
        config.pool_epoch,
        config.cache_settings(),
        config.layout_fingerprint,
        _boot_id(),
        segment=max(state.segments(), default=0) + 1,
        is_closed=bool(closed_as),
        has_tokens=config.tokens_file is not None,
    )
    state.write(manifest)
    ledger = _new(config)
    return ledger, _keep(state, config, manifest, ledger, closed_as)


def _check_settings(state: StateDir, config: ServerConfig, manifest: Manifest) -> None:
    kept = {**manifest.settings, "layout_fingerprint": manifest.layout_fingerprint}
    asked = {**config.cache_settings(), "layout_fingerprint": config.layout_fingerprint}
    for name in {**kept, **asked}:
        if kept.get(name) != asked.get(name):
            raise StateError(
                f"{state.path} was kept with {name} {kept.get(name)!r}, and this start has {asked.get(name)!r}: "
                f"start as before, or {_ADVICE}"
            )


def _go_on(state: StateDir, config: ServerConfig, manifest: Manifest) -> tuple[Ledger, Keeper]:
    try:
        found = recover(state, manifest, config.make_clock())
    except StateError as error:
        raise StateError(f"{error}; {_ADVICE}") from error
    if found.num_torn_bytes:
        _log.warning("%s ended in %d bytes of a call that was never answered", state.path, found.num_torn_bytes)
    stats = found.ledger.cache.stats()
    _log.info("%s: %d leases and %d cached blocks are back", state.path, stats.num_leases, stats.num_cached_blocks)
    keeper = _keep(state, config, manifest, found.ledger, "", found.next_number, found.num_bytes)
    return found.ledger, keeper


def _keep(
    state: StateDir,
    config: ServerConfig,
    manifest: Manifest,
    ledger: Ledger,
    closed_as: str,
    next_number: int = 1,
    num_bytes: int = 0,
) -> Keeper:
    """Begin to write down what ``ledger`` is asked, and to serve from it."""
    has_tokens = config.tokens_file is not None
    is_mixed = manifest.has_tokens is not has_tokens and any(lease.engine_id for lease in ledger.cache.leases())
    keeper = Keeper(state, manifest, next_number, num_bytes, config.max_journal_bytes, None if is_mixed else has_tokens)
    ledger.journal = keeper
    ledger.start(closed_as)
    keeper.name_segment()
    return keeper
