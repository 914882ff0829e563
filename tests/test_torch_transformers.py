"""Models whose KV lies in our blocks say what they say without a cache, to the token, whatever becomes of blocks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from service_process import ServerProcess, own_address

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import MODELS, tiny_model  # noqa: E402

from radix_cache import PrefixCache  # noqa: E402
from radix_cache.errors import InvalidArgument, InvalidTokens  # noqa: E402
from radix_cache.integrations.transformers import Generator, Request, layout_of  # noqa: E402
from radix_cache.torch_pool import KVPool, PoolGone, SharedKVPool, share_pool  # noqa: E402
from radix_cache_service import Client  # noqa: E402

NUM_NEW = 6


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(100), k=num_tokens)


@cache
def reference(name: str, tokens: tuple[int, ...], num_new: int = NUM_NEW) -> tuple[list[int], torch.Tensor]:
    """What the model generates without any cache, and the logits that each token was sampled from."""
    said, logits = list(tokens), []
    with torch.inference_mode():
        for _ in range(num_new):
            logits.append(tiny_model(name)(torch.tensor([said]), use_cache=False).logits[0, -1])
            said.append(int(logits[-1].argmax()))
    return said[len(tokens) :], torch.stack(logits)


class Checked(Generator):
    """Keeps the logits, and spoils each slot that no pass has written for this request before it computes."""

    def __init__(self, model: Any, pool: KVPool, prefix_cache: Any, **options: Any) -> None:
        super().__init__(model, pool, prefix_cache, ("tiny",), sample=self._keep, **options)
        self.logits: list[torch.Tensor] = []
        self.poisons = isinstance(prefix_cache, PrefixCache)
        self._cache = prefix_cache

    def _keep(self, logits: torch.Tensor) -> int:
        self.logits.append(logits)
        return int(logits.argmax())

    def step(self) -> list[Request]:
        if self.poisons:
            self._pool.poison(sorted(self._cache._executor.pool.check_integrity()))
        return super().step()

    def _compute(self, request: Request) -> None:
        table = request.lease.block_table
        first = -(-request.num_computed // self._pool.block_size)
        self._pool.poison(table[first:])
        if request.num_computed % self._pool.block_size:
            for plane in self._pool.kv.unbind(1):
                tail = plane[:, table[first - 1]]
                tail = tail.transpose(1, 2) if self._pool.layout.order == "HND" else tail
                tail[:, request.num_computed % self._pool.block_size :] = float("nan")
        super()._compute(request)


def make(name: str, num_blocks: int, block_size: int, order: str = "NHD", **options: Any) -> Checked:
    model = tiny_model(name)
    pool = KVPool(layout_of(model, block_size, order=order), num_blocks)
    return Checked(model, pool, PrefixCache(num_blocks, block_size), **options)


def assert_as_without(name: str, request: Request) -> None:
    assert request.new_tokens == reference(name, tuple(request.tokens[: request.num_prompt_tokens]))[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("copies_partial", [True, False])
def test_logits_and_texts_are_those_without_a_cache(name: str, block_size: int, copies_partial: bool) -> None:
    generator = make(name, 256, block_size, num_chunk_tokens=7, copies_partial=copies_partial)
    first, more = prompt(1, 37), prompt(2, 9)
    num_published = (37 + NUM_NEW - 1) // block_size * block_size
    for tokens, num_alike in ((first, 0), (first, 36), (first + more, 37), (first[:20] + more, 20)):
        generator.logits.clear()
        request = generator.submit(tokens, NUM_NEW)
        generator.run()
        texts, logits = reference(name, tuple(tokens))
        assert request.new_tokens == texts
        assert (torch.stack(generator.logits) - logits).abs().max() < 1e-4
        num_reused = min(num_alike, num_published)
        assert request.num_reused_tokens == (num_reused if copies_partial else num_reused // block_size * block_size)
        assert request.num_prefill_tokens == len(tokens) - request.num_reused_tokens


def test_other_layouts_and_types() -> None:
    tokens = prompt(1, 37)
    for order, dtype, most in (("HND", None, 1e-4), ("NHD", torch.bfloat16, 0.05), ("NHD", torch.float8_e4m3fn, 0.5)):
        model = tiny_model("gqa")
        pool = KVPool(layout_of(model, 4, dtype, order), 64)
        generator = Checked(model, pool, PrefixCache(64, 4), num_chunk_tokens=8)
        heard = []
        for _ in range(2):
            generator.logits.clear()
            generator.submit(tokens, 1)
            generator.run()
            heard.append(generator.logits[0])
        assert (heard[0] - reference("gqa", tuple(tokens))[1][0]).abs().max() < most
        assert torch.allclose(*heard, atol=1e-5)  # what is read back is rounded alike, computed just now or long ago


def test_the_layout_is_read_off_the_model() -> None:
    assert (layout_of(tiny_model("llama"), 4).num_kv_heads, layout_of(tiny_model("gqa"), 4).num_kv_heads) == (4, 2)
    latent = layout_of(tiny_model("mla"), 4)
    assert (latent.order, latent.num_kv_heads, latent.head_dim) == ("MLA", 1, 24 + 8)
    with pytest.raises(InvalidArgument, match="which is not keys and values for each token"):
        layout_of(tiny_model("state space"), 4)


def test_requests_take_turns() -> None:
    generator = make("gqa", 64, 4, num_chunk_tokens=8)
    requests = [generator.submit(prompt(seed, 20), NUM_NEW) for seed in range(3)]
    generator.step()
    assert [request.num_computed for request in requests] == [8, 8, 8]
    generator.step()
    late = generator.submit(prompt(9, 3), NUM_NEW)
    generator.step()
    assert [len(request.new_tokens) for request in (*requests, late)] == [1, 1, 1, 1]
    generator.run()
    for request in (*requests, late):
        assert_as_without("gqa", request)


def test_a_prompt_is_published_as_it_goes() -> None:
    generator = make("gqa", 64, 4, num_chunk_tokens=8)
    tokens = prompt(1, 30)
    generator.submit(tokens, NUM_NEW)
    for num_published in (0, 8, 16, 24):
        generator.step()
        assert generator._cache.probe(tokens, ("tiny",)) == num_published


def test_two_that_compute_the_same_end_with_the_same_blocks() -> None:
    generator = make("gqa", 64, 4, num_chunk_tokens=8)
    requests = [generator.submit(prompt(1, 30), NUM_NEW) for _ in range(2)]
    generator.run()
    for request in requests:
        assert_as_without("gqa", request)
    stats = generator._cache.stats()
    assert stats.counters["num_redundant_blocks"] >= 6
    assert (stats.num_leases, stats.num_leased_blocks) == (0, 0)
    generator._cache.check_integrity()


def test_an_answer_is_found_in_the_next_turn() -> None:
    generator = make("gqa", 64, 4)
    first = generator.submit(prompt(1, 18), NUM_NEW)
    generator.run()
    following = generator.submit([*first.tokens, 5, 6, 7], NUM_NEW)
    generator.run()
    assert following.num_reused_tokens == (len(first.tokens) - 1) // 4 * 4  # the last token sampled was not computed
    assert_as_without("gqa", following)


@pytest.mark.parametrize("loss", ["released by another", "reset"])
def test_a_request_whose_lease_is_lost_begins_again(loss: str) -> None:
    generator = make("gqa", 64, 4, num_chunk_tokens=8)
    requests = [generator.submit(prompt(seed, 30), NUM_NEW) for seed in range(2)]
    for _ in range(3):
        generator.step()
    if loss == "reset":
        generator._cache.reset(("tiny",))
    else:
        generator._cache.release(requests[0].lease.lease_id)
    generator.run()
    for request in requests:
        assert_as_without("gqa", request)
    stats = generator._cache.stats()
    assert (stats.num_leases, stats.num_leased_blocks) == (0, 0)


def test_nothing_is_computed_past_the_end_of_the_leases() -> None:
    class Late(PrefixCache):
        valid_until = -1.0

    model = tiny_model("gqa")
    generator = Checked(model, KVPool(layout_of(model, 4), 64), Late(64, 4))
    request = generator.submit(prompt(1, 30), NUM_NEW)
    generator.step()
    assert (request.num_computed, request.new_tokens) == (0, [])
    generator._cache.valid_until = None
    generator.run()
    assert_as_without("gqa", request)


def test_a_stop_token_ends_it() -> None:
    texts = reference("gqa", tuple(prompt(1, 18)))[0]
    generator = make("gqa", 64, 4)
    request = generator.submit(prompt(1, 18), NUM_NEW, stop_ids={texts[2]})
    generator.run()
    assert request.new_tokens == texts[: texts.index(texts[2]) + 1]


@pytest.mark.parametrize("name", MODELS)
def test_after_eviction_and_after_preemption(name: str) -> None:
    generator = make(name, 20, 4, num_chunk_tokens=8, max_running=4)
    again = generator.submit(prompt(0, 30), NUM_NEW)
    requests = [again, *(generator.submit(prompt(seed, 30), NUM_NEW) for seed in range(1, 5))]
    generator.run()
    requests.append(generator.submit(prompt(0, 30), NUM_NEW))
    generator.run()
    for request in requests:
        assert_as_without(name, request)
    assert sum(request.num_preemptions for request in requests) > 0
    assert generator._cache.stats().counters["num_evicted_blocks"] > 0
    assert requests[-1].num_reused_tokens < 28  # it was computed again


@pytest.mark.parametrize(
    ("name", "block_size", "num_requests"), [("gqa", 1, 60), ("llama", 4, 200), ("sliding", 4, 60), ("mla", 16, 60)]
)
def test_a_random_schedule(name: str, block_size: int, num_requests: int) -> None:
    """Requests that share beginnings, at random times, in a pool that is too small for those that run at once."""
    random_ = random.Random(block_size)
    generator = make(name, 112 // block_size, block_size, num_chunk_tokens=9, max_running=5)
    stems = [prompt(seed, 40) for seed in range(3)]
    left = [
        random_.choice(stems)[: random_.randint(1, 40)] + prompt(random_.randrange(9), 6) for _ in range(num_requests)
    ]
    requests: list[Request] = []
    while left or generator.is_busy:
        num_new = min(len(left), random_.choice((0, 0, 1, 3)))
        requests += [generator.submit(left.pop(), random_.randint(1, NUM_NEW)) for _ in range(num_new)]
        generator.step()
    for request in requests:
        prompt_tokens = tuple(request.tokens[: request.num_prompt_tokens])
        assert request.new_tokens == reference(name, prompt_tokens)[0][: len(request.new_tokens)]
        assert len(request.tokens) == request.stop_at
    assert sum(request.num_reused_tokens for request in requests) > num_requests
    assert any(request.num_preemptions for request in requests)
    stats = generator._cache.stats()
    assert stats.counters["num_evicted_blocks"] > 20
    assert block_size == 1 or stats.counters["num_partial_tokens"] > 50
    assert (stats.num_leases, stats.num_leased_blocks) == (0, 0)
    generator._cache.check_integrity()


ENGINE = """
import sys, torch
from radix_cache.integrations.transformers import Generator
from radix_cache.torch_pool import attach_pool
from radix_cache_service import Client
from tiny_models import tiny_model
torch.set_num_threads(1)
with Client(sys.argv[1], engine_id="other") as client:
    pool = attach_pool(client.describe().pool_descriptor)
    generator = Generator(tiny_model("gqa").to(pool.device), pool, client, ("tiny",))
    request = generator.submit(map(int, sys.argv[2].split()), 6)
    generator.run()
    print(request.num_reused_tokens, *request.new_tokens)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedKVPool]:
    with share_pool(layout_of(tiny_model("gqa"), 4), 64, path=tmp_path / "pool") as pool:
        yield pool


def run_engine(address: str, tokens: list[int]) -> list[str]:
    command = [sys.executable, "-c", ENGINE, address, " ".join(map(str, tokens))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=100, env=environment
    ).stdout.split()


def test_across_processes(shared: SharedKVPool) -> None:
    """What another engine computed is found here, and what it says is the same."""
    tokens = prompt(1, 37)
    with ServerProcess(num_blocks=64, block_size=4, pool_descriptor=shared.descriptor.to_json()) as server:
        heard = run_engine(server.address, tokens)
        with Client(server.address, engine_id="this") as client, client.session() as session:
            generator = Checked(tiny_model("gqa"), shared, client, batch=session.batch)
            request = generator.submit(tokens, NUM_NEW)
            generator.run()
    assert heard == ["0", *map(str, reference("gqa", tuple(tokens))[0])]
    assert request.num_reused_tokens == 36
    assert_as_without("gqa", request)


def test_a_pool_that_is_not_the_server_s(shared: SharedKVPool, tmp_path: Path) -> None:
    model = tiny_model("gqa")
    with (
        ServerProcess(num_blocks=64, block_size=4, pool_descriptor=shared.descriptor.to_json()) as server,
        Client(server.address) as client,
        share_pool(layout_of(model, 4), 64, path=tmp_path / "other") as other,
    ):
        with pytest.raises(InvalidArgument, match="the server's blocks lie in a shared pool"):
            Generator(model, KVPool(layout_of(model, 4), 64), client)
        with pytest.raises(PoolGone, match=f"the server's blocks lie in pool {shared.descriptor.pool_id}, not in"):
            Generator(model, other, client)


def test_a_server_that_comes_back_with_another_pool(shared: SharedKVPool, tmp_path: Path) -> None:
    """The old pool's owner lives on, so nothing but the server tells that the blocks are others now."""
    settings = {"num_blocks": 64, "block_size": 4}
    with share_pool(shared.layout, 64, path=tmp_path / "next") as following:
        with ServerProcess(own_address(), pool_descriptor=shared.descriptor.to_json(), **settings) as server:
            client = Client(server.address, engine_id="this")
            generator = Checked(tiny_model("gqa"), shared, client)
            request = generator.submit(prompt(1, 37), NUM_NEW)
            generator.step()
        with client, ServerProcess(server.address, pool_descriptor=following.descriptor.to_json(), **settings):
            with pytest.raises(PoolGone, match=f"the server's blocks lie in pool {following.descriptor.pool_id}"):
                generator.run()
            with pytest.raises(PoolGone):  # again and again, not once
                generator.step()
            assert len(request.new_tokens) == 1
            assert client.probe(prompt(1, 37), ("tiny",)) == 0


def test_an_engine_stops_when_the_pool_s_owner_ends(shared: SharedKVPool) -> None:
    generator = Checked(tiny_model("gqa"), shared, PrefixCache(64, 4))
    request = generator.submit(prompt(1, 37), NUM_NEW)
    generator.step()
    shared.close()
    with pytest.raises(PoolGone):
        generator.step()
    assert len(request.new_tokens) == 1


def test_bad_arguments() -> None:
    model = tiny_model("gqa")
    layout = layout_of(model, 4)
    for wrong, blocks, message in (
        (replace(layout, num_layers=3), 64, "num_layers is 3 in the pool and 2 in the model"),
        (replace(layout, num_kv_heads=4), 64, "num_kv_heads is 4 in the pool"),
        (replace(layout, block_size=8), 64, "block_size is 8 in the pool and 4 in the cache"),
        (layout, 32, "num_blocks is 32 in the pool and 64 in the cache"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Generator(model, KVPool(wrong, blocks), PrefixCache(64, 4))
    generator = Generator(model, KVPool(layout, 4), PrefixCache(4, 4))
    with pytest.raises(InvalidArgument, match="17 tokens take 5 blocks, the pool has 4"):
        generator.submit(range(10), 8)
    with pytest.raises(InvalidArgument, match="number of prompt tokens is at least 1"):
        generator.submit([], 8)
    with pytest.raises(InvalidArgument, match="max_new_tokens is at least 1"):
        generator.submit([1], 0)
    with pytest.raises(InvalidTokens):
        generator.submit([-1], 1)
    assert not generator.is_busy
    generator.submit(range(10), 6)
    generator.run()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name: str) -> None:
    """More requests than the pool holds, with beginnings in common: partial copies, preemption and eviction."""
    model = tiny_model(name).to("cuda")
    stem = prompt(0, 22)
    try:
        generator = Checked(
            model, KVPool(layout_of(model, 4), 20, "cuda"), PrefixCache(20, 4), num_chunk_tokens=8, max_running=4
        )
        requests = [generator.submit(stem + prompt(seed, 9), NUM_NEW) for seed in range(1, 9)]
        generator.run()
    finally:
        model.to("cpu")
    for request in requests:
        assert_as_without(name, request)
    counted = generator._cache.stats().counters
    assert sum(request.num_preemptions for request in requests) > 0
    assert min(counted["num_evicted_blocks"], counted["num_partial_tokens"]) > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_across_processes_on_a_gpu() -> None:
    tokens = prompt(1, 37)
    model = tiny_model("gqa").to("cuda")
    try:
        with share_pool(layout_of(model, 4), 64, "cuda") as pool:
            descriptor = pool.descriptor.to_json()
            with ServerProcess(num_blocks=64, block_size=4, pool_descriptor=descriptor) as server:
                heard = run_engine(server.address, tokens)
                with Client(server.address, engine_id="this") as client:
                    generator = Checked(model, pool, client)
                    request = generator.submit(tokens, NUM_NEW)
                    generator.run()
    finally:
        model.to("cpu")
    assert heard == ["0", *map(str, reference("gqa", tuple(tokens))[0])]
    assert request.num_reused_tokens == 36
    assert_as_without("gqa", request)
