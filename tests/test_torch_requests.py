"""A request that fails, or a message to the cache, takes no other request along, and no lease."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from helpers import counters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import tiny_model  # noqa: E402

from radix_cache import NamespaceLimit, PrefixCache  # noqa: E402
from radix_cache.errors import InvalidArgument, InvalidTokens, PoolExhausted, ServiceUnavailable  # noqa: E402
from radix_cache.integrations.paged import longest_request  # noqa: E402
from radix_cache.integrations.transformers import Generator, Request, greedy, layout_of  # noqa: E402
from radix_cache.torch_pool import KVPool  # noqa: E402

NUM_NEW = 4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(seed: int, num_tokens: int = 20) -> list[int]:
    return random.Random(seed).choices(range(100), k=num_tokens)


def make(num_blocks: int = 64, cache: PrefixCache | None = None, **options: Any) -> Generator:
    model = tiny_model("gqa")
    return Generator(model, KVPool(layout_of(model, 4), num_blocks), cache or PrefixCache(num_blocks, 4), **options)


def texts(seeds: Iterable[int]) -> list[list[int]]:
    """What the model says to each prompt when nothing fails."""
    generator = make()
    requests = [generator.submit(prompt(seed), NUM_NEW) for seed in seeds]
    generator.run()
    return [request.new_tokens for request in requests]


def assert_all_returned(generator: Generator) -> None:
    stats = generator._cache.stats()
    assert (stats.num_leases, counters(stats).leased, counters(stats).protected) == (0, 0, 0)
    generator._cache.check_integrity()


class Failing:
    """A ``sample`` that raises at one call of many."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, logits: torch.Tensor) -> int:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return greedy(logits)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_request_whose_sample_raises_is_given_up_alone(at: int) -> None:
    error = ZeroDivisionError("in sample")
    generator = make(sample=Failing(error, at))
    requests = [generator.submit(prompt(seed), NUM_NEW) for seed in range(3)]
    with pytest.raises(ZeroDivisionError):
        generator.run()
    generator.run()
    failed = [request for request in requests if request.error is error]
    assert len(failed) == 1
    assert [request.new_tokens for request in requests if request not in failed] == [
        said for request, said in zip(requests, texts(range(3)), strict=True) if request not in failed
    ]
    assert_all_returned(generator)


def test_an_interrupt_in_a_sample_loses_nothing() -> None:
    generator = make(sample=Failing(KeyboardInterrupt(), 3))
    requests = [generator.submit(prompt(seed), NUM_NEW) for seed in range(2)]
    with pytest.raises(KeyboardInterrupt):
        generator.run()
    generator.run()
    assert [request.new_tokens for request in requests] == texts(range(2))
    assert_all_returned(generator)


def test_what_ended_in_a_step_that_raised_is_returned_by_the_next() -> None:
    generator = make(sample=Failing(ZeroDivisionError(), 2))
    first, _ = generator.submit(prompt(0), 1), generator.submit(prompt(1), 1)
    with pytest.raises(ZeroDivisionError):
        generator.step()
    assert generator.step() == [first]
    assert not generator.is_busy


class Unreliable(PrefixCache):
    """Batches fail at some messages as a whole, before or after they were done."""

    failing: dict[int, bool]  # message: whether it is done
    num_messages = 0

    def batch(self, *arguments: Any, **options: Any) -> Any:
        self.num_messages += 1
        inner = super().batch(*arguments, **options)
        if self.num_messages not in self.failing:
            return inner
        return _Lost(inner, self.failing[self.num_messages])


class _Lost:
    def __init__(self, batch: Any, is_done: bool) -> None:
        self.batch, self.is_done = batch, is_done

    def __enter__(self) -> Any:
        return self.batch.__enter__()

    def __exit__(self, *ended: Any) -> None:
        if self.is_done:
            self.batch.__exit__(*ended)
        raise ServiceUnavailable("no answer")


@pytest.mark.parametrize(
    ("message", "is_done"),
    # Of the first one it has to be known whether it was done: who hears of no lease can't give it back, its client can.
    [*((message, False) for message in range(1, 8)), *((message, True) for message in range(2, 8))],
)
def test_a_message_that_fails_loses_no_request_and_no_lease(message: int, is_done: bool) -> None:
    cache = Unreliable(64, 4)
    cache.failing = {message: is_done}
    generator = make(cache=cache, num_chunk_tokens=8)
    requests = [generator.submit(prompt(seed), NUM_NEW) for seed in (0, 0, 1)]
    with pytest.raises(ServiceUnavailable):
        generator.run()
    generator.run()
    assert [request.new_tokens for request in requests] == texts((0, 0, 1))
    assert_all_returned(generator)


def test_what_the_cache_says_of_one_request_concerns_that_one() -> None:
    generator = make()
    requests = [generator.submit(prompt(seed), NUM_NEW) for seed in range(3)]
    match = generator._match

    def refused(batch: Any, request: Request) -> Any:
        if request is requests[1]:
            return batch.match_prefix(request.tokens, lease_id="")
        return match(batch, request)

    generator._match = refused  # type: ignore[method-assign]
    with pytest.raises(InvalidArgument, match="lease_id"):
        generator.run()
    generator.run()
    assert [request.error is None for request in requests] == [True, False, True]
    assert [requests[0].new_tokens, requests[2].new_tokens] == texts((0, 2))
    assert_all_returned(generator)


def test_cancel_and_close() -> None:
    with make(max_running=2, num_chunk_tokens=8) as generator:
        requests = [generator.submit(prompt(seed), NUM_NEW) for seed in range(4)]
        for _ in range(2):
            generator.step()
        generator.cancel(requests[0])  # it runs
        generator.cancel(requests[3])  # it waits
        while not requests[1].is_over:
            generator.step()
        generator.cancel(requests[1])  # it is over: nothing to do
        assert requests[1].new_tokens == texts([1])[0]
        assert requests[0].new_tokens == requests[3].new_tokens == []
        assert generator.is_busy
    assert not generator.is_busy
    assert_all_returned(generator)
    assert generator._cache.probe(prompt(0)) == 16


def test_a_limit_that_cannot_hold_a_request_ends_it() -> None:
    cache = PrefixCache(64, 4, limits={("small",): NamespaceLimit(max_blocks=2)})
    generator = make(cache=cache, namespace=("small",), patience_s=0.05)
    large, small = generator.submit(prompt(0), NUM_NEW), generator.submit(prompt(1, 4), 2)
    with pytest.raises(PoolExhausted) as refused:
        generator.run()
    assert (large.error, refused.value.is_own_limit) == (refused.value, True)
    generator.run()
    assert (large.new_tokens, len(small.new_tokens)) == ([], 2)
    assert_all_returned(generator)


def test_nothing_is_copied_past_the_end_of_the_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(PrefixCache):
        valid_until: float | None = None

    cache = Late(64, 4)
    generator = make(cache=cache)
    generator.submit(prompt(0), 1)
    generator.run()
    copied = []
    copy = generator._pool.copy_blocks
    monkeypatch.setattr(generator._pool, "copy_blocks", lambda *blocks: (copied.append(blocks), copy(*blocks)))
    cache.valid_until = -1.0
    request = generator.submit([*prompt(0)[:18], 1, 2, 3], NUM_NEW)
    generator.step()
    assert copied == []
    cache.valid_until = None
    generator.run()
    assert len(copied) == 1
    assert request.num_reused_tokens == 18


def test_what_can_be_submitted() -> None:
    generator = make(4)
    assert generator.submit(prompt(0, 16), 1).stop_at == 17  # the last token needs no slot
    with pytest.raises(InvalidArgument, match="17 tokens take 5 blocks, the pool has 4"):
        generator.submit(prompt(0, 16), 2)
    with pytest.raises(InvalidTokens, match="token 1000 at 1: the model has 100 embeddings"):
        generator.submit([1, 1000, 2], 1)
    for stops in ({3}, [3], torch.tensor([3])):
        assert generator.submit([1], 1, stops).stop_ids == {3}
    for stops in (3, "ab", None):
        with pytest.raises(InvalidTokens):
            generator.submit([1], 1, stops)
    generator.run()
    assert_all_returned(generator)
    with pytest.raises(InvalidArgument, match="prompt and answer have 257 tokens, the model is for 256"):
        make(128).submit(prompt(0, 250), 7)
    with pytest.raises(InvalidArgument, match="prompt and answer have 25 tokens, the model is for 24"):
        make(128, max_tokens=24).submit(prompt(0), 5)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (transformers.LlamaConfig(max_position_embeddings=64), 64),
        (transformers.BloomConfig(), None),
        (
            transformers.LlamaConfig(
                max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            16,
        ),
    ],
)
def test_how_long_a_request_may_be(config: Any, most: int | None) -> None:
    assert longest_request(config) == most
    assert longest_request(config, 8) == 8
    if getattr(config, "rope_parameters", None) and config.rope_parameters["rope_type"] == "dynamic":
        with pytest.raises(InvalidArgument, match="max_tokens is at most 16 with rope_type dynamic, not 17"):
            longest_request(config, 17)


def test_long_and_short_keys_are_not_mixed() -> None:
    """LongRoPE rotates with other factors behind the original length, so a short prefix is no part of a long prompt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 24}
        config = transformers.Phi3Config(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=64,
            original_max_position_embeddings=24,
            pad_token_id=None,
            rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = Generator(model, KVPool(layout_of(model, 4), 64), PrefixCache(64, 4))
    with pytest.raises(InvalidArgument, match="prompt and answer have 25 tokens, the model is for 24"):
        generator.submit(prompt(0), 5)


def test_models_and_pools_that_do_not_fit() -> None:
    t5 = transformers.T5Config(vocab_size=100, d_model=16, d_ff=16, num_layers=1, num_heads=1, d_kv=16)
    with pytest.raises(InvalidArgument, match="T5ForConditionalGeneration does not run on a standard cache"):
        layout_of(transformers.T5ForConditionalGeneration(t5), 4)
    model = tiny_model("gqa")
    for order in ("MLA", "foo"):
        with pytest.raises(InvalidArgument, match="order is 'NHD' or 'HND'"):
            layout_of(model, 4, order=order)
    with pytest.raises(InvalidArgument, match="order is NHD in the pool, and the model needs MLA"):
        Generator(tiny_model("mla"), KVPool(layout_of(model, 4), 64), PrefixCache(64, 4))
    with pytest.raises(InvalidArgument, match="num_reserved_blocks is 1 in the pool and 0 in the cache"):
        Generator(model, KVPool(layout_of(model, 4), 64, num_reserved_blocks=1), PrefixCache(64, 4))
