"""Latency against tokens, depth and leaves, as pictures: ``results/latency.png``. Needs matplotlib.

Against nodes: `benchmarks.nodes` has the figures. Here they become the fourth picture.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

from benchmarks import nodes
from benchmarks.caches import OURS, OurTree, Tree
from benchmarks.match import add_cut
from benchmarks.options import Options
from benchmarks.prompts import TOKEN_BYTES, Prompts
from benchmarks.report import RESULTS, Row
from benchmarks.timing import Prepare, Spread, Work, each, measure, repeated, spread

TITLE = "latency against tokens, depth, leaves, nodes"

Curve = Callable[[type[Tree], int], Prepare]


def run(options: Options) -> list[Row]:
    """One row for each point of each picture."""
    num_rounds = options.pick(9, 5, 1)
    makes = (*OURS, *options.peers)
    pictures = [
        ("tokens matched in one node", options.pick((64, 512, 4096, 32_768, 131_072), (64, 4096), (8, 16)), _tokens),
        ("nodes on the path, 512 tokens each", options.pick((1, 4, 16, 64, 256), (1, 16), (1, 2)), _depth),
        ("leaves, evicting one", options.pick((100, 1000, 10_000, 100_000), (100, 1000), (10, 20)), _leaves),
    ]
    rows = [
        Row(f"{what}: {at:,}", figures)
        for what, points, curve in pictures
        for at in points
        for figures in [_point(makes, curve, at, num_rounds)]
    ]
    rows += [Row(f"nodes in the tree: {at:,}", figures) for at, figures in _nodes(options, num_rounds)]
    if options.size != "tiny" and importlib.util.find_spec("matplotlib") is not None:
        _draw(rows)
    return rows


def _point(makes: Sequence[type[Tree]], curve: Curve, at: int, num_rounds: int) -> dict[str, Spread]:
    series = measure({make.name: curve(make, at) for make in makes}, num_rounds)
    return {name: spread(values) for name, values in series.items()}


def _tokens(make: type[Tree], num_tokens: int) -> Prepare:
    cache, tokens = make(num_tokens), Prompts().one(num_tokens)
    cache.add(cache.key(tokens))
    return repeated(cache.use, cache.key(tokens))


def _depth(make: type[Tree], num_nodes: int) -> Prepare:
    tokens = Prompts().one(num_nodes * 512)
    cache = make(len(tokens) // TOKEN_BYTES)
    add_cut(cache, tokens, num_nodes)
    return repeated(cache.use, cache.key(tokens))


def _leaves(make: type[Tree], num_leaves: int) -> Prepare:
    cache, prompts = make(num_leaves + 1), Prompts()
    num_calls = 3
    for tokens in prompts.many(num_leaves - num_calls, 1):
        cache.add(cache.key(tokens))

    def prepare() -> Work:
        for tokens in prompts.many(num_calls, 1):
            cache.add(cache.key(tokens))
        return each(cache.evict, [1] * num_calls)

    return prepare


def _nodes(options: Options, num_rounds: int) -> Iterator[tuple[int, dict[str, Spread]]]:
    points = nodes.sizes(options)
    loaded = {f"{at}": nodes.load(at) for at in points}
    series = measure({name: nodes.uses(*tree) for name, tree in loaded.items()}, num_rounds)
    for at in points:
        yield at, {OurTree.name: spread(series[f"{at}"])}


def _draw(rows: Sequence[Row]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    titles = list(dict.fromkeys(row.label.partition(":")[0] for row in rows))
    for title, plot in zip(titles, axes.flat, strict=True):
        points = [row for row in rows if row.label.startswith(f"{title}:")]
        xs = [int(row.label.rpartition(":")[2].replace(",", "")) for row in points]
        for name in points[0].figures:
            plot.plot(xs, [row.figures[name].median for row in points], marker="o", label=name)
            lows, highs = zip(*[row.figures[name][1:] for row in points], strict=True)
            plot.fill_between(xs, lows, highs, alpha=0.2)
        plot.set(xscale="log", yscale="log", xlabel=title, ylabel="us a call")
        plot.set_ylim(bottom=1)
        plot.grid(alpha=0.3)
        plot.legend(fontsize=8)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "latency.png", dpi=110)
    plt.close(figure)
