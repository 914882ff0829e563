"""What a server records of its requests: each once, whatever ends it, and nothing that tells a prompt."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from client_help import wait_until
from routes import FileClock
from scraping import samples
from service_process import ServerProcess, StartFailed, pack, stub_to

from radix_cache import PrefixCache, salted
from radix_cache.cli.app import app
from radix_cache.errors import InvalidArgument, PoolExhausted
from radix_cache.lab import Anonymizer, Request, in_time_order, lru_curve, read_trace
from radix_cache.operations import Insert, MatchPrefix
from radix_cache.tokens import pack_tokens, unpack_tokens
from radix_cache_service import Client
from radix_cache_service.config import ServerConfig
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.recording import Recording

BLOCK_SIZE = 2
GUARDED = {"max_leases_per_client": 1000}  # a guard stands before each operation then


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recorded.jsonl"


def record(path: Path, **settings: Any) -> ServerProcess:
    return ServerProcess(record_file=path, num_blocks=64, **settings)


def read(path: Path) -> list[Request]:
    """What was recorded, in the order of the matches."""
    return in_time_order(read_trace(path))


def shown(requests: Iterable[Request]) -> list[tuple[list[int], int, int]]:
    """Blocks, length of the prompt, length of the answer; blocks are counted anew as they come."""
    known: dict[int, int] = {}
    return [
        (
            [known.setdefault(block, len(known)) for block in unpack_tokens(request.prompt)],
            request.num_prompt_tokens,
            request.num_output_tokens,
        )
        for request in requests
    ]


def match(lease_id: str, *tokens: int, **more: Any) -> pb.MatchPrefixRequest:
    return pb.MatchPrefixRequest(lease_id=lease_id, tokens=pack(*tokens), **more)


def insert(lease_id: str, *tokens: int, **more: Any) -> pb.InsertRequest:
    return pb.InsertRequest(lease_id=lease_id, tokens=pack(*tokens), **more)


def release(lease_id: str) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(lease_id=lease_id)


def batch(seq: int, *requests: Any) -> pb.BatchRequest:
    names = {pb.MatchPrefixRequest: "match_prefix", pb.InsertRequest: "insert", pb.ReleaseRequest: "release"}
    operations = [pb.Operation(**{names[type(request)]: request}) for request in requests]
    return pb.BatchRequest(operations=operations, engine_id="E", seq=seq)


@pytest.mark.parametrize("settings", [{}, GUARDED], ids=["open", "guarded"])
def test_each_request_once(path: Path, settings: dict[str, Any]) -> None:
    """Alone, in batches, in sessions; asked for again; ended with its engine; what failed, and what is no request."""
    with record(path, **settings) as server, stub_to(server.address) as stub:
        for _ in range(2):
            stub.MatchPrefix(match("alone", 1, 2, 3, num_tokens=6))
        stub.Insert(insert("alone", 1, 2, 3, 4, 5))
        stub.Release(release("alone"))
        for _ in range(2):
            stub.Batch(batch(1, match("b", 1, 2, 3, 4), match("much", 1, num_tokens=999), insert("b", 1, 2, 3, 4)))
        stub.Batch(batch(2, release("b"), release("nothing")))
        messages = [batch(3, match("s", 1, 2, 9, 9, 9)), batch(3, match("s", 1, 2, 9, 9, 9)), batch(4, release("s"))]
        list(stub.Session(pb.SessionRequest(batch=message) for message in messages))
        stub.MatchPrefix(match("engine's", 7, engine_id="F"))
        assert stub.ReleaseEngine(pb.ReleaseEngineRequest(engine_id="F")).num_released_leases == 1
        stub.MatchPrefix(match("pin", 1, 2, pin_s=60))
        stub.Release(release("pin"))
        stub.Probe(pb.ProbeRequest(tokens=pack(1, 2)))
        with Client(server.address) as client, pytest.raises(PoolExhausted):
            client.match_prefix([1, 2], num_tokens=999)
    assert shown(read(path)) == [([0, 1], 3, 2), ([0, 2], 4, 0), ([0, 3, 4], 5, 0), ([5], 1, 0)]


def test_lines_come_as_requests_end(path: Path) -> None:
    with record(path) as server, stub_to(server.address) as stub:
        stub.MatchPrefix(match("a", 1, 2))
        stub.MatchPrefix(match("b", 3, 4, 5, 6))
        stub.Release(release("b"))
        wait_until(lambda: path.read_bytes().endswith(b"\n"))
        assert [request.num_prompt_tokens for request in read_trace(path)] == [4]
        stub.Release(release("a"))
        stub.MatchPrefix(match("open when the server ends", 5))
    later, sooner, still_open = read_trace(path)
    assert 0 <= sooner.timestamp_ms < later.timestamp_ms < still_open.timestamp_ms
    assert [request.num_prompt_tokens for request in (sooner, later, still_open)] == [2, 4, 1]
    assert {request.tokens_per_id for request in (sooner, later, still_open)} == {BLOCK_SIZE}


def test_forks_begin_with_what_their_parent_has_published(path: Path) -> None:
    with record(path) as server, Client(server.address) as client:
        parent = client.match_prefix([1, 2, 3], ("n",), num_tokens=12)
        client.match_prefix([8, 8], parent=parent)  # nothing is published yet
        client.insert(parent, [1, 2, 3, 4, 5, 6, 7])
        client.insert(parent, [5, 6, 7, 8, 9], offset=4)
        child = client.match_prefix([9, 10, 11], parent=parent, num_tokens=12)
        client.insert(child, [9, 10, 11, 12], offset=8)
        client.match_prefix([20], parent=child)
        client.match_prefix(list(range(1, 13)), ("n",))
        client.match_prefix(list(range(1, 13)), ("m",))
    assert shown(read(path)) == [
        ([0, 1], 3, 6),
        ([2], 2, 0),
        ([0, 3, 4, 5, 6, 7], 11, 1),
        ([0, 3, 4, 5, 6, 8, 9], 13, 0),
        ([0, 3, 4, 5, 6, 8], 12, 0),
        ([10, 11, 12, 13, 14, 15], 12, 0),
    ]


def test_a_fork_begins_with_what_its_parent_has_published_and_not_with_what_it_asked_for(path: Path) -> None:
    with record(path) as server, Client(server.address) as client:
        parent = client.match_prefix([1, 1, 2, 2], num_tokens=10)
        client.insert(parent, [1, 1, 3, 3, 4])
        client.match_prefix([5, 5], parent=parent)
        client.insert(parent, [4, 4, 6, 6], offset=4)
        client.match_prefix([5, 5], parent=parent)
        client.match_prefix([1, 1, 3, 3, 5, 5])
        client.match_prefix([1, 1, 3, 3, 4, 4, 6, 6, 5, 5])
    assert shown(read(path)) == [
        ([0, 1], 4, 4),
        ([0, 2, 3], 6, 0),
        ([0, 2, 4, 5, 6], 10, 0),
        ([0, 2, 3], 6, 0),
        ([0, 2, 4, 5, 6], 10, 0),
    ]


def test_requests_that_run_out_end_and_their_names_are_free(path: Path, tmp_path: Path) -> None:
    clock = FileClock(tmp_path / "clock")
    with record(path, lease_ttl_s=10, test_clock=clock.path) as server, stub_to(server.address) as stub:
        stub.MatchPrefix(match("a", 1, 2))
        clock.advance(11)
        stub.MatchPrefix(match("a", 1, 2, 3, 4))
        wait_until(lambda: path.read_bytes().count(b"\n") == 1)
        clock.advance(11)
        wait_until(lambda: path.read_bytes().count(b"\n") == 2)
        assert not stub.GetStats(pb.GetStatsRequest()).num_leases
    assert shown(read(path)) == [([0], 2, 0), ([0, 1], 4, 0)]


def test_a_request_that_is_served_past_the_line(path: Path) -> None:
    """Calls that wait for blocks are recorded when they have them, those that need none at once."""
    with record(path) as server, stub_to(server.address) as stub:
        stub.MatchPrefix(match("all", 1, num_blocks=64))
        waiting = stub.MatchPrefix.future(match("waits", 2, num_blocks=1, wait=True), timeout=60)
        wait_until(lambda: stub.GetStats(pb.GetStatsRequest()).num_waiting_calls == 1)
        stub.MatchPrefix(match("passes", 3, 3, 3, wait=True), timeout=60)
        stub.Release(release("all"))
        assert waiting.result().lease_id == "waits"
    assert shown(read(path)) == [([0], 1, 0), ([1, 2], 3, 0), ([3], 1, 0)]


def conversations(seed: int, num_requests: int = 120) -> Iterator[list[int]]:
    """Prompts of whole blocks that share prefixes."""
    draw = random.Random(seed)
    base = [draw.randrange(10_000, 99_999) for _ in range(60)]
    for _ in range(num_requests):
        prompt = base[: draw.randrange(60)] + [draw.randrange(10_000, 99_999) for _ in range(draw.randrange(8))]
        yield prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]


def play(client: Client, prompts: Iterable[list[int]], seed: int) -> None:
    """Open a request for each, some of them at once, and end them in any order."""
    draw, running = random.Random(seed), []
    for prompt in prompts:
        running.append(client.match_prefix(prompt, ("acme-corp",), num_tokens=len(prompt)))
        client.insert(running[-1], prompt)
        while len(running) > draw.randrange(6):
            client.release(running.pop(draw.randrange(len(running))))


def test_the_curve_is_that_of_the_prompts_and_nothing_else_is(path: Path, tmp_path: Path) -> None:
    prompts = list(conversations(1))
    with ServerProcess(record_file=path, num_blocks=1000) as server, Client(server.address, engine_id="xy") as client:
        play(client, prompts, 1)
        client.match_prefix(prompts[0], ("acme-corp",), lease_id="zz-top")
    check_secrets(path, prompts)
    prompts.append(prompts[0])
    assert [request.timestamp_ms for request in read_trace(path)] != [request.timestamp_ms for request in read(path)]
    plain = [Request(0, len(prompt), 0, pack_tokens(prompt)) for prompt in prompts]
    assert lru_curve(read(path)) == lru_curve(plain, BLOCK_SIZE)
    theirs = tmp_path / "plain.jsonl"
    theirs.write_text("".join(json.dumps({"timestamp": n, "tokens": each}) + "\n" for n, each in enumerate(prompts)))
    assert curve(path) == curve(theirs)


def curve(path: Path) -> Any:
    arguments = ["curve", str(path), "--sort", "--block-size", str(BLOCK_SIZE), "--capacities", "1,5,20,50%", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)["capacities"]


def check_secrets(path: Path, prompts: list[list[int]]) -> None:
    """Nobody else may read the file, and there is nothing in it of a token or a name."""
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert {*records[0]} == {"timestamp", "input_length", "output_length", "block_size", "hash_ids"}
    written = {block for each in records for block in each["hash_ids"]}
    assert written == set(range(len(written)))
    assert min(token for prompt in prompts for token in prompt) > max(written)
    assert not any(name in text for name in ("acme", "corp", "xy", "zz-top"))


def test_what_the_lab_makes_of_it_is_the_same(path: Path) -> None:
    """Ragged prompts in two namespaces: the blocks are those of the lab's anonymizer, number for number."""
    draw, anonymizer = random.Random(3), Anonymizer(BLOCK_SIZE)
    prompts = [([1, 2, 3, 4, 5, 6][: draw.randrange(7)], (draw.choice("ab"),)) for _ in range(40)]
    with record(path) as server, Client(server.address) as client:
        for prompt, namespace in prompts:
            client.match_prefix(prompt, namespace)
    found = [unpack_tokens(request.prompt) for request in read(path)]
    assert found == [anonymizer.blocks(pack_tokens(prompt), namespace) for prompt, namespace in prompts]


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(path: Path) -> None:
    with record(path, metrics_listen="127.0.0.1:0") as server, Client(server.address) as client:
        client.release(client.match_prefix([1, 2]))
        wait_until(lambda: bool(path.read_bytes()))
        kept = path.read_bytes()
        assert recorded(server) == (1, 1)
        limit = (len(kept) + 20, resource.RLIM_INFINITY)  # in the middle of a line
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limit)
        client.release(client.match_prefix([1, 2]))
        wait_until(lambda: server.has_logged("recording"))
        assert recorded(server) == (0, 1)
        client.release(client.match_prefix([1, 2]))
        assert path.read_bytes() == kept
        assert server.has_logged(f"recording to {path} ended: File too large")
    assert path.read_bytes() == kept


def recorded(server: ServerProcess) -> tuple[float, float]:
    found = samples(server.metrics_address)
    return found["radix_cache_recording",], found["radix_cache_recorded_requests_total",]


def test_a_file_that_is_gone_ends_it_as_well(path: Path) -> None:
    with record(path) as server, Client(server.address) as client:
        path.unlink()
        wait_until(lambda: server.has_logged("ended: the file was removed"))
        client.release(client.match_prefix([1, 2]))
        assert client.probe([1, 2]) == 0
    assert not path.exists()


def test_so_many_different_blocks_and_no_more(path: Path) -> None:
    with record(path, max_recorded_blocks=3) as server, Client(server.address) as client:
        for prompt in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 5, 6], [1, 2]):
            client.match_prefix(prompt)
        wait_until(lambda: server.has_logged("has seen max_recorded_blocks"))
        wait_until(lambda: path.read_bytes().count(b"\n") == 3)
        assert shown(read(path)) == [([0, 1], 4, 0), ([0, 2], 3, 0), ([0, 3], 4, 0)]


def test_each_start_has_a_file_of_its_own(path: Path, tmp_path: Path) -> None:
    """Also with a state directory: what was open before is in the file of before."""
    settings = {"state_dir": tmp_path / "state", "metrics_listen": "127.0.0.1:0"}
    opening = match("old", 1, 2, num_tokens=8)
    with record(path, **settings) as server, stub_to(server.address) as stub:
        stub.MatchPrefix(opening)
    kept = path.read_bytes()
    assert shown(read(path)) == [([0], 2, 0)]
    with record(path, **settings) as server, stub_to(server.address) as stub:
        assert recorded(server) == (1, 0)
        stub.Insert(insert("old", 1, 2, 3, 4))
        stub.MatchPrefix(match("fork", 5, 6, parent_lease_id="old"))
        stub.MatchPrefix(opening)
        for lease_id in ("old", "fork"):
            stub.Release(release(lease_id))
        stub.MatchPrefix(match("old", 9, 9, 9, 9))
        stub.Release(release("old"))
    assert path.read_bytes() == kept
    assert shown(read(path.with_suffix(".jsonl.1"))) == [([0, 1], 4, 0)]


def test_a_file_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"cannot record to .*nowhere/f: No such file") as failed:
        record(tmp_path / "nowhere" / "f")
    assert failed.value.status == 1


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"record_file": ""}, "empty"),
        ({"record_file": "/"}, "no regular file"),
        ({"record_file": "/dev/full"}, "no regular file"),
        ({"max_recorded_blocks": 0}, "max_recorded_blocks"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        ServerConfig(**settings)


def test_a_bug_ends_it_too(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In process: what is no operation of this cache's."""
    cache = PrefixCache(8, BLOCK_SIZE)
    recording = Recording(str(path), cache, 100)
    operation = MatchPrefix(pack(1, 2, 3), "a")
    recording.done(operation, cache.do(operation))
    recording.done(Insert("a", tokens=None), None)  # type: ignore[arg-type]
    assert not recording.figures().is_recording
    assert "ended" in caplog.text
    recording.done(operation, None)
    recording.tick()
    recording.close()


def test_numbers_go_on_after_a_block() -> None:
    numbers = salted.BlockNumbers(BLOCK_SIZE)
    whole = numbers.blocks(pack(1, 2, 3, 4, 5), ("n",))
    assert numbers.blocks(pack(3, 4, 5), after=whole[0]) == whole[1:]
    assert numbers.blocks(pack(3, 4, 5)) != whole[1:]
    assert len(numbers) == 5
