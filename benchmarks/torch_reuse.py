"""A model's first token with and without a cached prefix, on one CPU thread: what reuse saves, and what it costs.

The model has the shape of SmolLM2-135M and random weights: 30 layers, 3 KV heads of 64, float32. A prompt is some
shared tokens and 16 of its own; with a hit, the shared ones are in the pool. Time is that of the thread, as everywhere
here. `results/ttft.png` draws it. Needs torch and transformers.
"""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.options import Options
from benchmarks.report import RESULTS, Goal, Row
from benchmarks.timing import spread

if TYPE_CHECKING:
    from radix_cache.integrations.transformers import Request

TITLE = "time to first token with a real model's shape"

BLOCK_SIZE = 16
NUM_OWN = 16
_GOAL_AT = 1024

_SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
_TINY = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


class Point(NamedTuple):
    """Seconds to the first token for one number of shared tokens, a figure a round; with a hit and without."""

    num_shared: int
    hits: list[float]
    misses: list[float]
    lookups: list[float]  # match and gather of the shared tokens, all layers
    num_off: int  # prefill tokens computed beyond what prompt minus reused says


def run(options: Options) -> list[Row]:
    """One row for each number of shared tokens, one for the tokens computed, one for the overhead."""
    import torch

    lengths = options.pick((128, 256, 512, 1024, 2048), (256, 1024), (32,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bench = _Bench(_TINY if options.size == "tiny" else _SHAPE, max(lengths))
        points = [bench.measure(length, options.pick(5, 3, 1)) for length in lengths]
    finally:
        torch.set_num_threads(threads)
    if options.size != "tiny" and importlib.util.find_spec("matplotlib") is not None:
        _draw(points)
    return [*map(_ttft_row, points), _tokens_row(points), _overhead_row(points)]


class _Bench:
    def __init__(self, shape: dict[str, int], longest: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from radix_cache import PrefixCache
        from radix_cache.integrations.transformers import Generator, layout_of
        from radix_cache.torch_pool import KVPool

        torch.manual_seed(0)
        config = LlamaConfig(**shape, max_position_embeddings=2 * longest + 64, eos_token_id=None, bos_token_id=None)
        model = LlamaForCausalLM(config).eval()
        num_blocks = 2 * (longest + 2 * NUM_OWN) // BLOCK_SIZE
        self.pool = KVPool(layout_of(model, BLOCK_SIZE), num_blocks)
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE)
        self._generator = Generator(model, self.pool, self.cache, clock=time.thread_time, num_chunk_tokens=512)
        self._num_words, self._next = config.vocab_size, 0

    def _tokens(self, number: int) -> list[int]:
        """Tokens that nobody has seen, as far as their order goes."""
        self._next += 1
        return [(self._next * 7919 + place * 104_729) % self._num_words for place in range(number)]

    def _first_token(self, prompt: list[int]) -> Request:
        request: Any = self._generator.submit(prompt, max_new_tokens=1)
        self._generator.run()
        return request

    def measure(self, num_shared: int, num_rounds: int) -> Point:
        """Take turns: a prompt that is new from its first token on, and one that shares all but its last tokens."""
        hits, misses, lookups, num_off = [], [], [], 0
        for _ in range(num_rounds + 1):
            shared = self._tokens(num_shared)
            for figures in (misses, hits):
                request = self._first_token(shared + self._tokens(NUM_OWN))
                num_off += abs(request.num_prompt_tokens - request.num_reused_tokens - request.num_prefill_tokens)
                num_off += abs(request.num_reused_tokens - (num_shared if figures is hits else 0))
                figures.append(request.ttft_s)
            lookups.append(self._look_up(shared))
        return Point(num_shared, hits[1:], misses[1:], lookups[1:], num_off)  # the first round warms up

    def _look_up(self, shared: list[int]) -> float:
        start = time.thread_time()
        lease = self.cache.match_prefix(shared)
        table = self.pool.block_ids(lease.block_table)
        for layer in range(self.pool.layout.num_layers):
            self.pool.gather(layer, table, lease.num_cached_tokens)
        elapsed = time.thread_time() - start
        self.cache.release(lease)
        return elapsed


def _ttft_row(point: Point) -> Row:
    figures = {"hit": spread([1e3 * s for s in point.hits]), "no hit": spread([1e3 * s for s in point.misses])}
    ratios = [miss / hit for miss, hit in zip(point.misses, point.hits, strict=True)]
    goal = Goal("no hit / hit", spread(ratios).median, 5, is_at_least=True)
    goals = (goal,) if point.num_shared >= 1000 else ()
    label = f"first token: {point.num_shared:,} shared tokens and {NUM_OWN} more"
    return Row(label, figures, unit="ms", ratios={"no hit": spread(ratios)}, goals=goals)


def _tokens_row(points: list[Point]) -> Row:
    num_off = sum(point.num_off for point in points)
    label = "prefill tokens computed, beyond prompt - reused"
    return Row(label, {"tokens": spread([num_off])}, unit="", goals=(Goal("tokens off", num_off, 0),))


def _overhead_row(points: list[Point]) -> Row:
    point = next((point for point in points if point.num_shared == _GOAL_AT), points[-1])
    saved = [miss - hit for miss, hit in zip(point.misses, point.hits, strict=True)]
    shares = [100 * took / won for took, won in zip(point.lookups, saved, strict=True)]
    figures = {"match + gather": spread([1e3 * took for took in point.lookups])}
    goal = Goal("% of the prefill saved", spread(shares).median, 3)
    return Row(f"match + gather of {point.num_shared:,} tokens, all layers", figures, unit="ms", goals=(goal,))


def _draw(points: list[Point]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, plot = plt.subplots(figsize=(7, 4.5), layout="constrained")
    xs = [point.num_shared + NUM_OWN for point in points]
    for name, series in (("no hit", [p.misses for p in points]), ("hit, all but 16 tokens", [p.hits for p in points])):
        spreads = [spread(values) for values in series]
        plot.plot(xs, [value.median for value in spreads], marker="o", label=name)
        plot.fill_between(xs, [value.low for value in spreads], [value.high for value in spreads], alpha=0.2)
    plot.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="s to the first token, one CPU thread")
    plot.set_xticks(xs, map(str, xs))
    plot.minorticks_off()
    plot.grid(alpha=0.3)
    plot.legend()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "ttft.png", dpi=110)
    plt.close(figure)
