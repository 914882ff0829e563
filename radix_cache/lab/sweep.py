"""Many replays: traces x seeds x policies x capacities, on all cores, taken up again where they were cut off.

A job is one replay; its row has whatever does not depend on the machine, so a sweep gives the same bytes whenever and
however it is run. (How long replays take is what `radix_cache.lab.replay` says.) Rows that are done are kept in
``OUT.partial``, one line each as they come; when all are there, ``OUT`` is written in the order of the jobs and the
partial file goes. A sweep that was killed finds its partial file and plays what is missing. A job is known again by all
that decides its row: the trace file's name, size and time (the content of a profile, where a knob may change and the
size may not), how it is read, the policy (with the content of its file, if it is a user's), and the sizes.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

from radix_cache.errors import InvalidArgument
from radix_cache.lab.blocks import BlockTrace
from radix_cache.lab.hits import ReplayResult
from radix_cache.lab.optimal import Plan, block_optimal, plan_ahead
from radix_cache.lab.playing import OPTIMAL, load_policy, replay_policy, usual_block_size
from radix_cache.lab.requests import Request
from radix_cache.lab.sources import TraceSource
from radix_cache.lab.tables import Row, check_suffix, write_atomically, write_rows
from radix_cache.operations import check_count

__all__ = ["Job", "Runner", "plan_sweep", "play", "run_in_processes", "sweep"]


@dataclass(frozen=True, slots=True)
class Job:
    """One replay. block_size: of traces of token ids; None: the usual one."""

    trace: TraceSource
    policy: str
    num_blocks: int
    block_size: int | None = None

    @property
    def key(self) -> str:
        """All that decides the row, as text."""
        own = [self.policy, _content(self.policy), self.num_blocks, self.block_size]
        return json.dumps([*asdict(self.trace).values(), _version(self.trace), *own])


Runner: TypeAlias = Callable[[Sequence[Job]], Iterable[tuple[Job, Row]]]


def plan_sweep(
    traces: Iterable[TraceSource],
    policies: Sequence[str],
    capacities: Sequence[str | int],
    seeds: Sequence[int] = (0,),
    block_size: int | None = None,
) -> list[Job]:
    """Return a job for each trace, seed, capacity and policy; recorded traces are played once, not for each seed.

    capacities: blocks, or ``"5%"`` of a trace's different blocks (with its first seed), for which the trace is read.
    Raises `InvalidArgument` for a policy or capacity that is none, before anything is played.
    """
    for policy in policies:
        if policy != OPTIMAL:
            load_policy(policy)
    jobs = []
    for trace in traces:
        if trace.path == "-":
            raise InvalidArgument("a sweep reads its traces several times: stdin cannot be one of them")
        sources = [replace(trace, seed=seed) for seed in seeds] if trace.is_generated else [trace]
        sizes = [_capacity(sources[0], capacity, block_size) for capacity in capacities]
        jobs += [Job(source, policy, size, block_size) for source in sources for size in sizes for policy in policies]
    return list(dict.fromkeys(jobs))


def sweep(
    jobs: Sequence[Job],
    out: Path | None = None,
    run: Runner | None = None,
    on_done: Callable[[int], None] = lambda num_done: None,
) -> list[Row]:
    """Play what is not in the partial file yet; return all rows, and write them to ``out``, in the order of ``jobs``.

    out: a ``.jsonl``, ``.csv`` or ``.parquet`` file; None: none is written and nothing is kept of a sweep cut off.
    run: who plays, `run_in_processes` unless given. on_done: called with the number of rows there are.
    Raises what playing raises, and `InvalidArgument` for a trace without requests; what was done until then is kept.
    """
    if out is not None:
        check_suffix(out)
    journal = _Journal(None if out is None else partial_of(out))
    rows = journal.rows(jobs)
    on_done(len(rows))
    played = (run or run_in_processes)([job for job in jobs if job.key not in rows])
    try:
        for job, row in played:
            rows[job.key] = row
            journal.add(job.key, row)
            on_done(len(rows))
    finally:
        if isinstance(played, Generator):
            played.close()  # an error would keep it, and its processes, for as long as it is looked at
    ordered = [rows[job.key] for job in jobs]
    if out is not None:
        write_rows(out, ordered)
        journal.remove()
    return ordered


def partial_of(out: Path) -> Path:
    """Return the file that keeps what is done of the sweep to ``out``."""
    return out.with_name(out.name + ".partial")


def run_in_processes(jobs: Sequence[Job], num_processes: int | None = None) -> Iterator[tuple[Job, Row]]:
    """Play ``jobs`` in processes of their own, as many as there are cores; yield each row when it is there.

    Jobs of one trace follow each other, since each process keeps the latest trace in memory. With one process, or one
    job, they are played in this one. The processes end at once with the first error here, Ctrl-C included, and with
    this process.
    """
    num_processes = check_count(num_processes or os.cpu_count() or 1, "num_processes", 1)
    if min(num_processes, len(jobs)) <= 1:
        yield from ((job, play(job)) for job in jobs)
        return
    context = get_context("spawn")
    end, life = context.Pipe(duplex=False)
    with end, life, ProcessPoolExecutor(min(num_processes, len(jobs)), context, _end_with, (end,)) as pool:
        try:
            with _interrupts_wait():
                futures = {pool.submit(play, job): job for job in jobs}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            life.close()
            raise


def play(job: Job) -> Row:
    """Play one job and return its row. Keeps the latest trace in memory."""
    loaded = _load(job.trace, job.block_size)
    if job.policy == OPTIMAL:
        result = block_optimal(loaded.blocks, loaded.plan(), job.num_blocks)
    else:
        result = replay_policy(loaded.requests, job.policy, job.num_blocks, loaded.blocks.block_size)
    return _row(job, loaded.blocks, result)


class _Loaded:
    """A trace in memory, and what is found out about it once."""

    def __init__(self, source: TraceSource, block_size: int | None) -> None:
        self.requests: list[Request] = list(source.read())
        if not self.requests:
            raise InvalidArgument(f"{source.path}: there is no request in it")
        size = block_size or usual_block_size(next(iter(self.requests), None))
        self.blocks = BlockTrace.of(self.requests, size)
        self._plan: Plan | None = None

    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = plan_ahead(self.blocks)
        return self._plan


@lru_cache(1)
def _load(source: TraceSource, block_size: int | None) -> _Loaded:
    return _Loaded(source, block_size)


def _capacity(source: TraceSource, capacity: str | int, block_size: int | None) -> int:
    if isinstance(capacity, int):
        return check_count(capacity, "capacity", 1)
    return (_load(source, block_size).blocks if capacity.endswith("%") else BlockTrace()).capacity(capacity)


def _row(job: Job, trace: BlockTrace, result: ReplayResult) -> Row:
    parts = (("", result.whole), ("last_half_", result.last_half))
    return {
        "trace": job.trace.path,
        "seed": job.trace.seed,
        "policy": job.policy,
        "num_blocks": job.num_blocks,
        "block_size": trace.block_size,
        "num_trace_blocks": trace.num_blocks,
        **{prefix + name: value for prefix, hits in parts for name, value in hits.as_dict().items()},
        "num_evicted_blocks": result.num_evicted_blocks,
    }


def _version(trace: TraceSource) -> list[int] | None:
    """Return what is another number when the file is another; None where there is none."""
    path = Path(trace.path)
    if not path.is_file():
        return None
    if trace.is_generated:
        return [crc32(path.read_bytes())]
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _content(policy: str) -> int | None:
    """Return a checksum of the file that a user's policy is in."""
    path, is_file, _ = policy.partition(".py:")
    return crc32(Path(f"{path}.py").read_bytes()) if is_file else None


class _Journal:
    """The rows that are done, as lines in a file; without a path, nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def rows(self, jobs: Sequence[Job]) -> dict[str, Row]:
        """Return the rows of ``jobs`` that are there, and drop the line that a kill tore, if there is one."""
        if self._path is None or not self._path.exists():
            return {}
        wanted = {job.key for job in jobs}
        found: dict[str, Row] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                key, row = json.loads(line)
            except ValueError:
                continue
            if key in wanted:
                found[key] = row
        write_atomically(self._path, "".join(map(_line, found.items())).encode())
        return found

    def add(self, key: str, row: Row) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line((key, row)))

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _line(entry: tuple[str, Row]) -> str:
    return json.dumps(entry) + "\n"


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let processes start that Ctrl-C does not reach: a terminal sends it to all, and one is enough."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(life: Connection) -> None:
    """Let this process end when the other end of ``life`` is closed, be it that its holder is gone."""

    def watch() -> None:
        with suppress(EOFError):
            life.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
