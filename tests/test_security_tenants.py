"""What a tenant can learn of another: nothing of what is cached, and how much of the pool is used.

docs/security.md says the same in words.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from security_help import ALICE, BOB, ENTRIES, MINE, THEIRS, Tenant, tenant_of, write_tokens
from service_process import ServerProcess, pack, reason_of, unpack

from radix_cache import PrefixCache
from radix_cache_service.pb import prefix_cache_pb2 as pb

SECRETS = (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7, 8)  # alike for two blocks
PLACES = (*MINE, "secret-0"), (*MINE, "secret-1")


def serve_both(stack: ExitStack, tmp_path: Path, **settings: Any) -> list[tuple[Tenant, Tenant]]:
    """Start two servers; return alice and bob of each."""
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    found = []
    for _ in range(2):
        server = stack.enter_context(ServerProcess(num_blocks=64, tokens_file=path, lease_ttl_s=1000, **settings))
        found.append(tuple(stack.enter_context(tenant_of(server.address, token)) for token in (ALICE, BOB)))
    return found  # type: ignore[return-value]


def lives(alice: Tenant, secret: Sequence[int], place: tuple[str, ...]) -> None:
    """Let alice have her prompt cached, one lease on it open, and a batch of hers remembered."""
    name = place[-1]
    steps = [
        pb.Operation(
            match_prefix=pb.MatchPrefixRequest(tokens=pack(*secret), lease_id=name, namespace=place, num_tokens=8)
        ),
        pb.Operation(insert=pb.InsertRequest(lease_id=name, tokens=pack(*secret))),
    ]
    results = alice.Batch(pb.BatchRequest(operations=steps, engine_id=name, seq=1)).results
    assert results[1].insert.num_cached_tokens == 0
    alice.MatchPrefix(pb.MatchPrefixRequest(tokens=pack(*secret), lease_id="open", namespace=place, num_tokens=8))


def requests() -> Iterator[tuple[str, Any]]:
    """Yield whatever bob could ask to find out about either of the secrets."""
    yield "Describe", pb.DescribeRequest()
    yield "GetStats", pb.GetStatsRequest()
    yield "WatchEvents", pb.WatchEventsRequest()
    yield "ListLeases", pb.ListLeasesRequest()
    for name in ("secret-0", "secret-1", "open"):
        yield "Renew", pb.RenewRequest(engine_id=name)
        for engine_id in (name, f"alice/{name}"):
            yield "ListLeases", pb.ListLeasesRequest(engine_id=engine_id)
            yield "ReleaseEngine", pb.ReleaseEngineRequest(engine_id=engine_id)
        yield "Batch", pb.BatchRequest(engine_id=name, seq=1)
        for request in (pb.ReleaseRequest, pb.RenewRequest, pb.InsertRequest, pb.FreeRequest):
            yield request.__name__.removesuffix("Request"), request(lease_id=name, engine_id="e")
        yield "Allocate", pb.AllocateRequest(lease_id=name, num_blocks=1)
        yield "MatchPrefix", pb.MatchPrefixRequest(lease_id=f"fork of {name}", parent_lease_id=name)
    for number, (secret, place) in enumerate(itertools.product(SECRETS, (THEIRS, *PLACES, MINE, ("m",), ()))):
        for length in (2, 4, 6):
            yield "Probe", pb.ProbeRequest(tokens=pack(*secret[:length]), namespace=place)
        yield "Reset", pb.ResetRequest(namespace=place, tokens=pack(*secret[:2]))
        yield (
            "MatchPrefix",
            pb.MatchPrefixRequest(tokens=pack(*secret), namespace=place, lease_id=f"{number}", num_tokens=8),
        )
        yield "Insert", pb.InsertRequest(lease_id=f"{number}", tokens=pack(*secret))
    for max_nodes, prefix in itertools.product((0, 1, 5), ((), ("m",), THEIRS, *PLACES)):
        yield "DumpTree", pb.DumpTreeRequest(namespace=prefix, max_nodes=max_nodes, max_span_tokens=8)
    yield "Evict", pb.EvictRequest(num_blocks=1)
    yield "MatchPrefix", pb.MatchPrefixRequest(lease_id="too large", namespace=THEIRS, num_blocks=64)


def transcript(bob: Tenant) -> list[tuple[str, Any]]:
    """Ask all of it; return each answer, byte for byte, and each refusal in full. Epochs differ by themselves."""
    found: list[tuple[str, Any]] = []
    epoch = bob.Describe(pb.DescribeRequest()).state.epoch.encode()
    for method, request in requests():
        try:
            answer = getattr(bob, method)(request)
            messages = answer if isinstance(answer, list) else [answer]
            said: Any = [message.SerializeToString().replace(epoch, b"epoch") for message in messages]
        except grpc.RpcError as error:
            said = error.details(), reason_of(error), sorted(key for key, _ in error.trailing_metadata() or ())
        found.append((f"{method} {request}", said))
    return found


def test_all_that_a_tenant_is_told_is_the_same_whatever_another_has_cached(tmp_path: Path) -> None:
    """Two servers, on which alice has other prompts in other namespaces under other names, of the same size."""
    with ExitStack() as stack:
        transcripts = []
        for (alice, bob), secret, place in zip(serve_both(stack, tmp_path), SECRETS, PLACES, strict=True):
            lives(alice, secret, place)
            transcripts.append(transcript(bob))
        for one, other in zip(*transcripts, strict=True):
            assert one == other
        answered = [said for _, said in transcripts[0] if isinstance(said, list) and said]
        assert len(answered) > 20, "nearly all was refused, which tells little"


# What is not hidden.


def test_how_many_blocks_others_use_is_not_hidden(tmp_path: Path) -> None:
    """By the hint in every answer, by what can be allocated, and by which ids are handed out next."""
    with ExitStack() as stack:
        seen = []
        for num_tokens, (alice, bob) in zip((8, 20), serve_both(stack, tmp_path), strict=True):
            alice.MatchPrefix(pb.MatchPrefixRequest(lease_id="a", namespace=MINE, num_tokens=num_tokens))
            answer = bob.MatchPrefix(pb.MatchPrefixRequest(lease_id="b", namespace=THEIRS, num_blocks=1))
            seen.append((answer.state.num_available_blocks, unpack(answer.block_table)))
        assert seen == [(64 - 4 - 1, [4]), (64 - 10 - 1, [10])]


def caches(tenant: Tenant, namespace: tuple[str, ...], tokens: Sequence[int]) -> None:
    tenant.MatchPrefix(pb.MatchPrefixRequest(lease_id="x", namespace=namespace, num_tokens=len(tokens)))
    tenant.Insert(pb.InsertRequest(lease_id="x", tokens=pack(*tokens)))
    tenant.Release(pb.ReleaseRequest(lease_id="x"))


def left_of_bob(alice: Tenant, bob: Tenant) -> int:
    """Let bob cache something, and alice fill the pool; return how much of his is left."""
    caches(bob, THEIRS, range(8))
    caches(alice, MINE, range(2 * 63))
    return int(bob.Probe(pb.ProbeRequest(tokens=pack(*range(8)), namespace=THEIRS)).num_cached_tokens)


def test_others_push_a_tenant_out_unless_its_share_is_kept(tmp_path: Path) -> None:
    with ExitStack() as stack:
        (alice, bob), _ = serve_both(stack, tmp_path)
        assert left_of_bob(alice, bob) < 8
        kept = {"namespace_limits": "namespace=m namespace=bob min_blocks=4"}
        (alice, bob), _ = serve_both(stack, tmp_path, **kept)
        caches(bob, THEIRS, range(8))
        assert bob.Probe(pb.ProbeRequest(tokens=pack(*range(8)), namespace=THEIRS)).num_cached_tokens == 8
        for start in range(1000, 1000 + 20 * 2 * 50, 2 * 50):
            caches(alice, MINE, range(start, start + 2 * 50))
        assert bob.Probe(pb.ProbeRequest(tokens=pack(*range(8)), namespace=THEIRS)).num_cached_tokens == 8


# Users of one tenant, and what a salt in the namespace does.

VOCABULARY = 12
PROMPT = (3, 7, 11, 0, 5, 5, 2, 9)


def found_out(cached_tokens: Callable[[list[int]], int]) -> list[int]:
    """Find out as much of a cached prompt as an answer betrays: block by block, each of its values tried."""
    known: list[int] = []
    while True:
        for block in itertools.product(range(VOCABULARY), repeat=2):
            if cached_tokens([*known, *block]) > len(known):
                known += block
                break
        else:
            return known


def test_who_shares_a_namespace_can_find_out_a_prompt_and_who_does_not_cannot() -> None:
    """What is measured here is how much need not be computed: an engine's user sees it as the time to the first token.

    No clock is needed to see that it tells a hit from a miss, and that a salt in the namespace makes a miss of each.
    """
    cache = PrefixCache(num_blocks=64, block_size=2)
    for namespace in (("m", "shared"), ("m", "shared", "salt of victim")):
        lease = cache.match_prefix(PROMPT, namespace, num_tokens=len(PROMPT))
        cache.insert(lease, PROMPT)
        cache.release(lease)

    def matched_in(namespace: tuple[str, ...]) -> Callable[[list[int]], int]:
        return lambda tokens: cache.probe(tokens, namespace)

    assert found_out(matched_in(("m", "shared"))) == list(PROMPT)
    assert found_out(matched_in(("m", "shared", "salt of attacker"))) == []


def work_of(call: Callable[[], object]) -> int:
    """Count the calls that a call makes, Python's and C's: its work, without a clock."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_a_match_does_the_same_work_whatever_others_have_cached() -> None:
    """To the call; in a shared namespace it does not."""
    work: dict[tuple[str, ...], list[int]] = {}
    for is_cached in (False, True):
        cache = PrefixCache(num_blocks=64, block_size=2)
        for namespace in (("m", "shared"), ("m", "victim")):
            tokens = PROMPT if is_cached else [token + VOCABULARY for token in PROMPT]
            lease = cache.match_prefix(tokens, namespace, num_tokens=len(tokens))
            cache.insert(lease, tokens)
            cache.release(lease)
        for namespace in (("m", "shared"), ("m", "attacker")):
            done = work_of(lambda c=cache, n=namespace: (c.probe(PROMPT, n), c.match_prefix(PROMPT, n)))
            work.setdefault(namespace, []).append(done)
    assert work["m", "attacker"][0] == work["m", "attacker"][1]
    assert work["m", "shared"][0] != work["m", "shared"][1]
