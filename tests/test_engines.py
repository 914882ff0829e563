"""The example scheduler against a real server: what it generates is right, whatever happens, and each step is one call.

Right means: token by token what the model says, and every KV entry that is read is the one that belongs there. The
pretended GPU computes as late as it can, so a block that changes hands under a kernel is found out.
"""

from __future__ import annotations

import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from client_help import Proxy, new_engine
from helpers import counters
from kv_memory import KVMemory, next_token
from scheduler import Request, Scheduler
from service_process import ServerProcess, own_address, stub_to

from radix_cache_service import Client
from radix_cache_service.pb import prefix_cache_pb2 as pb

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MODEL = ("model", "w7")


@pytest.fixture
def kv(tmp_path: Path) -> Any:
    KVMemory.create(tmp_path / "kv", NUM_BLOCKS, BLOCK_SIZE)
    return KVMemory(tmp_path / "kv", BLOCK_SIZE)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock") / "now")


@pytest.fixture(scope="module")
def one_server(clock: Clock) -> Iterator[ServerProcess]:
    with ServerProcess(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, test_clock=clock.path) as process:
        yield process


@pytest.fixture
def server(one_server: ServerProcess) -> ServerProcess:
    """The server, with nothing cached."""
    with Client(one_server.address) as client:
        client.reset()
    return one_server


@pytest.fixture
def open_scheduler(server: ServerProcess, kv: Any) -> Iterator[Callable[..., Any]]:
    """A function that makes a scheduler with a client of its own. They must leave nothing leased."""
    closed_at_end: list[Any] = []

    def open_one(address: str = server.address, **options: Any) -> Any:
        client = Client(address, engine_id=new_engine())
        session = client.session()
        closed_at_end.extend([client, session])
        return Scheduler(client, session, kv, **options)

    yield open_one
    with Client(server.address) as client:
        stats = client.stats()
    free, leased, cached, _, protected = counters(stats)
    assert (stats.num_leases, leased, protected) == (0, 0, 0)
    assert free + cached == NUM_BLOCKS
    for each in reversed(closed_at_end):
        each.close()


class Clock:
    """What the server's leases go by."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.advance(0)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.path.write_text(str(self.now))


def prompts(number: int, seed: int = 1) -> list[list[int]]:
    """Prompts that share beginnings of several lengths."""
    draw = random.Random(seed)
    system = [draw.randrange(1000) for _ in range(18)]
    return [
        system[: draw.randint(6, 18)] + [draw.randrange(1000) for _ in range(draw.randint(1, 14))]
        for _ in range(number)
    ]


def drive(*schedulers: Any, each_step: Callable[[int], object] = lambda _: None) -> list[Any]:
    """Run all to the end, a step of each in turn; return the requests that ended."""
    ended: list[Any] = []
    number = 0
    while any(scheduler.is_busy for scheduler in schedulers):
        for scheduler in schedulers:
            ended += scheduler.step()
        number += 1
        each_step(number)
        assert number < 3000, "this goes nowhere"
    return ended


def assert_right(request: Any, prompt: list[int], num_new: int) -> None:
    """It has its prompt, then what the model says, up to where it was to stop."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_new:
        tokens.append(next_token(tokens, request.seed))
    assert request.tokens == tokens


def num_calls(server: ServerProcess) -> Counter[str]:
    """How many calls of each method the server has answered, whatever it answered; not the ones that ask for this."""
    with stub_to(server.address) as stub:
        said = stub.GetStats(pb.GetStatsRequest(), timeout=60).num_calls
    found: Counter[str] = Counter()
    for key, number in said.items():
        found[key.partition("/")[0]] += number
    del found["GetStats"]
    return found


def ask(scheduler: Any, prompts: list[list[int]], num_new: int = 12, **more: Any) -> list[Request]:
    """Queue a request for each prompt; return them."""
    asked = [
        Request(list(prompt), len(prompt) + num_new, owner=prompt, **{"namespace": MODEL, **more}) for prompt in prompts
    ]
    scheduler.waiting.extend(asked)
    return asked


def test_a_step_is_one_message_and_nothing_else(server: ServerProcess, open_scheduler: Callable[..., Any]) -> None:
    before = num_calls(server)
    scheduler = open_scheduler()
    asked = ask(scheduler, prompts(12))
    assert set(drive(scheduler)) == set(asked)
    for request in asked:
        assert_right(request, request.owner, 12)
    calls = num_calls(server) - before
    assert calls == {"Session": scheduler.totals.num_steps, "Describe": 1}
    assert scheduler.totals.num_reused_tokens > 0


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_drafts_change_the_number_of_steps_and_nothing_else(
    server: ServerProcess, open_scheduler: Callable[..., Any], num_drafts: int
) -> None:
    scheduler = open_scheduler(num_drafts=num_drafts)
    asked = ask(scheduler, prompts(3), 20)
    drive(scheduler)
    for request in asked:
        assert_right(request, request.owner, 20)
    totals = scheduler.totals
    assert (0 < totals.num_accepted_drafts < totals.num_drafts) if num_drafts else not totals.num_drafts
    assert (totals.num_steps < 20) == (num_drafts > 0)


def test_two_engines_in_a_pool_that_is_too_small(server: ServerProcess, open_scheduler: Callable[..., Any]) -> None:
    before = num_calls(server)
    schedulers = [open_scheduler(), open_scheduler()]
    asked = [request for scheduler in schedulers for request in ask(scheduler, prompts(15), 24)]
    drive(*schedulers)
    for request in asked:
        assert_right(request, request.owner, 24)
    for scheduler in schedulers:
        assert scheduler.totals.num_preempted > 0
        assert scheduler.totals.num_lost_leases == 0
    assert (num_calls(server) - before)["Session"] == sum(scheduler.totals.num_steps for scheduler in schedulers)


@pytest.mark.parametrize("num_prompt_tokens", [3, 4, 17, 20])
def test_several_answers_to_one_prompt(
    server: ServerProcess, open_scheduler: Callable[..., Any], num_prompt_tokens: int
) -> None:
    """They share the prompt's whole blocks, and differ."""
    before = num_calls(server)
    scheduler = open_scheduler()
    prompt = list(range(num_prompt_tokens))
    ask(scheduler, [prompt], 15, num_samples=4)
    ended = drive(scheduler)
    assert sorted(request.seed for request in ended) == [0, 1, 2, 3]
    for request in ended:
        assert_right(request, prompt, 15)
    assert scheduler.totals.num_forks == 3
    assert scheduler.totals.num_reused_tokens == 3 * (num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE)
    assert (num_calls(server) - before)["Session"] == scheduler.totals.num_steps


def test_answers_that_find_no_room_come_later(server: ServerProcess, open_scheduler: Callable[..., Any]) -> None:
    scheduler = open_scheduler()
    prompt = list(range(4 * NUM_BLOCKS // 2))
    ask(scheduler, [prompt], 4 * NUM_BLOCKS // 4, num_samples=4)
    ended = drive(scheduler)
    assert sorted(request.seed for request in ended) == [0, 1, 2, 3]
    for request in ended:
        assert_right(request, prompt, 4 * NUM_BLOCKS // 4)
    assert scheduler.totals.num_refused > 0


def test_a_user_leaves(server: ServerProcess, open_scheduler: Callable[..., Any]) -> None:
    scheduler = open_scheduler(max_running=2)
    first, second, third = ask(scheduler, prompts(3), 30)

    def leave(number: int) -> None:
        if number == 4:
            scheduler.abort(first)  # under way
            scheduler.abort(third)  # not begun

    ended = drive(scheduler, each_step=leave)
    assert ended == [first, second]
    assert len(first.tokens) < first.stop_at
    assert_right(second, second.owner, 30)


def test_adapters_share_nothing(server: ServerProcess, open_scheduler: Callable[..., Any]) -> None:
    scheduler = open_scheduler(max_running=1)
    prompt = list(range(16))
    for lora in ("a", "b", "a"):
        ask(scheduler, [prompt], namespace=(*MODEL, lora))
    for request in drive(scheduler):
        assert_right(request, prompt, 12)
    assert scheduler.totals.num_reused_tokens == 12  # of the third request: all but the block with the last token


def test_new_weights(server: ServerProcess, open_scheduler: Callable[..., Any]) -> None:
    """What runs goes on with the old ones, publishing nothing; what comes has the new ones. Nothing old is left."""
    scheduler = open_scheduler()
    old = ask(scheduler, prompts(4))

    def swap(number: int) -> None:
        if number == 3:
            with Client(server.address) as client:
                client.reset(MODEL)
            ask(scheduler, [old[0].owner], namespace=("model", "w8"))

    ended = drive(scheduler, each_step=swap)
    assert len(ended) == 5
    for request in ended:
        assert_right(request, request.owner, 12)
    assert scheduler.totals.num_lost_leases == 0
    with Client(server.address) as client:
        assert {row.namespace for row in client.dump()} == {("model", "w8")}


def test_leases_run_out_under_an_engine(
    server: ServerProcess, open_scheduler: Callable[..., Any], clock: Clock
) -> None:
    scheduler = open_scheduler()
    asked = ask(scheduler, prompts(8))
    drive(scheduler, each_step=lambda number: clock.advance(1000 * (number % 5 == 0)))
    for request in asked:
        assert_right(request, request.owner, 12)
    assert scheduler.totals.num_lost_leases > 0


def test_after_a_long_silence_every_lease_is_asked_after_first(
    server: ServerProcess, open_scheduler: Callable[..., Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped, then its heartbeat came first: `valid_until` alone would say that all is well."""
    import scheduler as module

    scheduler = open_scheduler(max_running=3)
    asked = ask(scheduler, prompts(3), 30)
    for _ in range(6):
        scheduler.step()
    num_computed = scheduler.totals.num_computed_tokens

    class Later:
        monotonic = staticmethod(lambda: scheduler._client.valid_until + 1)
        sleep = staticmethod(lambda seconds: None)

    clock.advance(1000)
    with Client(server.address) as other:
        other.stats()  # and they are gone
    with monkeypatch.context() as patched:
        patched.setattr(module, "time", Later)
        scheduler.step()
    num_late = scheduler.totals.num_computed_tokens - num_computed
    scheduler.step()
    assert scheduler.totals.num_computed_tokens == num_computed + num_late, "launched in spite of the silence"
    assert scheduler.totals.num_lost_leases == 3
    drive(scheduler)
    for request in asked:
        assert_right(request, request.owner, 30)


def test_lost_answers_are_asked_for_again(server: ServerProcess, open_scheduler: Callable[..., Any]) -> None:
    with Proxy(server.address) as proxy:
        scheduler = open_scheduler(proxy.address)
        asked = ask(scheduler, prompts(10))

        def lose(number: int) -> None:
            proxy.is_deaf.clear()
            if number % 3 == 0:
                proxy.cut()
            if number % 5 == 0:
                proxy.is_deaf.set()  # the next message arrives, its answer does not
                Timer(0.05, proxy.cut).start()
                Timer(0.06, proxy.is_deaf.clear).start()

        drive(scheduler, each_step=lose)
        for request in asked:
            assert_right(request, request.owner, 12)
        assert scheduler._mailbox.num_sent > scheduler.totals.num_steps
        assert scheduler.totals.num_lost_leases == 0


def test_a_server_that_begins_anew(kv: Any, open_scheduler: Callable[..., Any]) -> None:
    """All leases are gone, whatever was under way begins again."""
    first = ServerProcess(own_address(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    scheduler = open_scheduler(first.address)
    asked = ask(scheduler, prompts(6))
    for _ in range(4):
        scheduler.step()
    epoch = scheduler._client.epoch
    first.stop(signal.SIGKILL)
    with ServerProcess(first.address, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) as second:
        drive(scheduler)
        for request in asked:
            assert_right(request, request.owner, 12)
        assert scheduler._client.epoch != epoch
        assert scheduler.totals.num_lost_leases > 0
        with Client(second.address) as client:
            assert client.stats().num_leases == 0
