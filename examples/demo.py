"""Two engine processes, one server, one small pool: the whole life of a prefix cache in a few seconds.

``make demo DEMO=light``, or ``make demo TRACE=file.jsonl.gz`` to replay a recorded trace through a real server instead.

The engines (`engine.py`) run conversations (`workload.py`) that share a system prompt and few-shot examples. The pool
is too small for all of it, so blocks are evicted, requests are preempted and come back. At the end every block must be
accounted for, and all KV that an engine reads must be the right one (`kv_memory.py`); if not, the exit status is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from engine import Engine, Totals
from kv_memory import KVMemory
from server_process import running_server
from workload import conversations, run

from radix_cache.cli.show import count, make_console, make_table, percent, with_progress
from radix_cache.cli.stats import tables
from radix_cache.cli.tree import draw
from radix_cache_service import Client

NAMESPACE = ("demo-model", "weights-1")
NUM_ENGINES = 2
BLOCK_SIZE = 16
_MIN_BLOCKS = 60
_LIMIT_S = 100


def run_engine(number: int, address: str, memory: Path, settings: argparse.Namespace, report: Connection) -> None:
    """One engine process. Sends how many conversations have ended, and its totals, as it goes."""
    talks = conversations(settings.seed, number, settings.conversations)
    with Client(address, engine_id=f"engine-{number}") as client, client.session() as session:
        engine = Engine(session.batch, KVMemory(memory, BLOCK_SIZE), BLOCK_SIZE, NAMESPACE)
        for num_ended in run(engine, talks):
            if engine.totals.num_steps % 50 == 0:
                report.send((num_ended, engine.totals))
        report.send((len(talks), engine.totals))


def follow(reports: dict[Connection, int]) -> Iterator[dict[int, tuple[int, Totals]]]:
    """Yield the latest report of each engine, until all have ended."""
    latest = {number: (0, Totals()) for number in reports.values()}
    while reports:
        for report in wait(list(reports), timeout=0.5):
            try:
                latest[reports[report]] = report.recv()
            except EOFError:
                del reports[report]
        yield latest


def run_engines(address: str, memory: Path, settings: argparse.Namespace, console: Any) -> list[Totals]:
    """Start the engines, show how far they are, and return their totals."""
    context = multiprocessing.get_context("spawn")
    reports: dict[Any, int] = {}
    processes = []
    for number in range(NUM_ENGINES):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=run_engine, args=(number, address, memory, settings, sender)))
        processes[-1].start()
        sender.close()
        reports[receiver] = number
    try:
        latest = show_progress(reports, NUM_ENGINES * settings.conversations, console)
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    if any(process.exitcode for process in processes):
        sys.exit("an engine failed: see above")
    return [totals for _, totals in latest.values()]


def show_progress(reports: dict[Any, int], num_conversations: int, console: Any) -> dict[int, tuple[int, Totals]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    latest: dict[int, tuple[int, Totals]] = {}
    columns = TextColumn("conversations"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    started = said = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_conversations)
        for latest in follow(reports):
            now = time.monotonic()
            num_ended = sum(ended for ended, _ in latest.values())
            num_steps = sum(totals.num_steps for _, totals in latest.values())
            progress.update(task, completed=num_ended, description=f"{count(num_steps)} steps of the schedulers")
            if not console.is_terminal and now - said >= 1:
                console.print(f"{now - started:4.1f} s: {num_ended} of {num_conversations} conversations have ended")
                said = now
            if now - started > _LIMIT_S:
                sys.exit(f"the engines have not come to an end in {_LIMIT_S} s")
    return latest


def print_engines(console: Any, all_totals: list[Totals]) -> None:
    table = make_table("engines", *map(str, range(NUM_ENGINES)), "all")
    names = {
        "num_steps": "scheduler steps, one message each",
        "num_finished": "requests finished",
        "num_aborted": "requests aborted by their user",
        "num_refused": "refusals for lack of blocks",
        "num_preempted": "requests preempted and resumed",
        "num_computed_tokens": "tokens computed",
        "num_reused_tokens": "tokens found in the cache instead",
        "num_checked_tokens": "KV entries compared with the truth",
    }
    rows = [asdict(totals) for totals in all_totals]
    for field, name in names.items():
        numbers = [row[field] for row in rows]
        table.add_row(name, *map(count, [*numbers, sum(numbers)]))
    console.print(table)


def print_accounts(console: Any, stats: Any, num_usable: int) -> bool:
    """Say whether every block is accounted for."""
    accounts = {
        f"{stats.num_free_blocks} free + {stats.num_leased_blocks} leased + {stats.num_cached_blocks} cached "
        f"= {num_usable} blocks": stats.num_free_blocks + stats.num_leased_blocks + stats.num_cached_blocks
        == num_usable,
        "no lease is left, and no block is leased or protected": stats.num_leases
        == stats.num_leased_blocks
        == stats.num_protected_blocks
        == 0,
    }
    for sentence, holds in accounts.items():
        console.print(f"{'holds' if holds else 'BROKEN'}: {sentence}", style="green" if holds else "bold red")
    return all(accounts.values())


def demo(settings: argparse.Namespace) -> bool:
    console = make_console()
    console.print(
        f"{NUM_ENGINES} engine processes, one server, {settings.blocks} blocks of {BLOCK_SIZE} tokens, "
        f"{NUM_ENGINES * settings.conversations} conversations ...\n"
    )
    options = "--num-blocks", str(settings.blocks), "--block-size", str(BLOCK_SIZE), "--num-reserved-blocks", "1"
    with tempfile.TemporaryDirectory() as folder, running_server(*options) as address:
        memory = Path(folder) / "kv"
        KVMemory.create(memory, settings.blocks, BLOCK_SIZE)
        started = time.monotonic()
        all_totals = run_engines(address, memory, settings, console)
        seconds = time.monotonic() - started
        with Client(address) as client:
            stats, description = client.stats(), client.describe()
            rows = client.dump(NAMESPACE, max_nodes=16, max_span_tokens=3 * BLOCK_SIZE)
    print_engines(console, all_totals)
    console.print(tables(address, description, stats))
    console.print(draw(rows, f"what is cached in the end, the first {len(rows) - 1} of {stats.num_nodes} nodes"))
    num_calls = sum(stats.num_calls.values())
    num_saved = count(stats.counters["num_hit_tokens"])
    console.print(f"\n{percent(stats.hit_rate)} of all prompt tokens were cached: {num_saved} tokens of prefill saved.")
    console.print(f"{count(num_calls)} calls in {seconds:.1f} s: {count(num_calls / seconds)} a second.")
    return print_accounts(console, stats, description.num_blocks - description.num_reserved_blocks)


def replay_trace(path: Path, num_blocks: int | None) -> bool:
    """Replay in process and through a real server; both must find the same."""
    from radix_cache import PrefixCache
    from radix_cache.lab import Request, count_requests, read_trace, replay

    console = make_console()
    first = next(read_trace(path))
    block_size = 1 if first.tokens_per_id > 1 else BLOCK_SIZE

    def requests(what: str) -> Iterator[Request]:
        return with_progress(read_trace(path), lambda: count_requests(path), what)

    num_all = sum(-(-(request.num_ids + request.num_output_tokens) // block_size) for request in read_trace(path))
    boundless = PrefixCache(num_all, block_size)
    ideal = replay(requests("in a boundless pool"), boundless)
    num_unique = boundless.stats().num_cached_blocks
    num_blocks = num_blocks or max(num_unique // 20, 1)
    console.print(f"{path.name}: {count(num_unique)} different blocks, a pool of {count(num_blocks)}\n")
    in_process = replay(requests("in process"), PrefixCache(num_blocks, block_size))
    options = "--num-blocks", str(num_blocks), "--block-size", str(block_size)
    with running_server(*options) as address, Client(address) as client, client.session() as session:
        over_grpc = replay(requests("over gRPC"), client, batch=session.batch)

    table = make_table(path.name, "in process", "over gRPC", "boundless pool")
    results = in_process, over_grpc, ideal
    table.add_row("requests", *(count(result.whole.num_requests) for result in results))
    table.add_row("prompt tokens", *(count(result.whole.num_prompt_tokens) for result in results))
    table.add_row("prefill tokens saved", *(count(result.whole.num_hit_tokens) for result in results))
    table.add_row("  in the last half", *(count(result.last_half.num_hit_tokens) for result in results))
    table.add_row("token hit rate", *(percent(result.whole.token_hit_rate) for result in results))
    table.add_row("block hit rate", *(percent(result.whole.block_hit_rate) for result in results))
    table.add_row("blocks evicted", *(count(result.num_evicted_blocks) for result in results))
    table.add_row("requests/s", *(count(result.requests_per_s or 0) for result in results))
    console.print(table)
    is_same = (in_process.whole, in_process.last_half) == (over_grpc.whole, over_grpc.last_half)
    console.print("both found the same" if is_same else "BROKEN: the server found something else")
    return is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=150, help="of each engine (%(default)s)")
    parser.add_argument("--blocks", type=int, default=200, help="in the pool (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", default=os.environ.get("TRACE"), help="replay this instead")
    parser.add_argument("--trace-blocks", type=int, help="pool for that (5 %% of the trace's different blocks)")
    settings = parser.parse_args()
    if settings.blocks < _MIN_BLOCKS:
        parser.error(f"--blocks is at least {_MIN_BLOCKS}, or the longest request would wait for ever")
    if settings.trace:
        return 0 if replay_trace(Path(settings.trace), settings.trace_blocks) else 1
    return 0 if demo(settings) else 1


if __name__ == "__main__":
    sys.exit(main())
