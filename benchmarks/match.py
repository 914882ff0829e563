"""Match, lock and release: a prompt with a shared beginning, a long one in one node, a long one over 64 nodes.

Two floors stand beside it. For one node: ``bytes.startswith`` over the same bytes, the memcmp that has to be. For many:
a bare walk, that is a slice, a dict look-up and a startswith for each node, over nothing but tuples.
"""

from __future__ import annotations

from benchmarks.caches import OURS, OurCache, OurTree, Tree
from benchmarks.options import Options
from benchmarks.prompts import TOKEN_BYTES, Prompts
from benchmarks.report import Goal, Row, compared
from benchmarks.timing import Prepare, measure, ratio, repeated

TITLE = "match + lock + release"

BareNode = tuple[bytes, dict[bytes, "BareNode"]]


def run(options: Options) -> list[Row]:
    """Three rows, each with all contestants."""
    prompts = Prompts()
    num_long = options.pick(32_768, 32_768, 512)
    shared, tail, long, deep = prompts.one(2048), prompts.one(100), prompts.one(num_long), prompts.one(num_long)
    num_rounds = options.pick(31, 9, 1)
    caches = [make(4 * num_long + 8192) for make in (*OURS, *options.peers)]
    for cache in caches:
        cache.add(cache.key(shared))
        cache.add(cache.key(long))
        add_cut(cache, deep, 64)

    row_shared = _row("2,148 tokens, 2,048 of them cached", _uses(caches, shared + tail), num_rounds)
    one = _uses(caches, long)
    span = bytes(bytearray(long))
    one["startswith"] = repeated(long.startswith, span)
    row_one = _row(f"{num_long:,} tokens in one node", one, num_rounds, add_us=2.0, bound=1.5)
    many = _uses(caches, deep)
    many["bare walk"] = repeated(bare_walk, bare_tree(deep, 64), deep)
    row_many = _row(f"{num_long:,} tokens over 64 nodes", many, num_rounds, bound=2.5)
    return [row_shared, row_one, row_many]


def add_cut(cache: Tree, tokens: bytes, num_nodes: int) -> None:
    """Cache ``tokens`` in ``num_nodes`` nodes of one length: at every cut another prompt goes its own way."""
    cache.add(cache.key(tokens))
    step = len(tokens) // num_nodes
    for end in range(len(tokens) - step, 0, -step):
        other = bytes(byte ^ 255 for byte in tokens[end : end + TOKEN_BYTES])
        cache.add(cache.key(tokens[:end] + other))


def bare_tree(tokens: bytes, num_nodes: int) -> BareNode:
    """The same chain as `add_cut`, in tuples."""
    step = len(tokens) // num_nodes
    node: BareNode = (tokens[-step:], {})
    for start in range(len(tokens) - 2 * step, -1, -step):
        node = (tokens[start : start + step], {node[0][:TOKEN_BYTES]: node})
    return (b"", {node[0][:TOKEN_BYTES]: node})


def bare_walk(root: BareNode, tokens: bytes) -> int:
    """The least that a walk has to do."""
    at, children = 0, root[1]
    while (child := children.get(tokens[at : at + TOKEN_BYTES])) is not None:
        span, children = child
        if not tokens.startswith(span, at):
            break
        at += len(span)
    return at


def _uses(caches: list[Tree], tokens: bytes) -> dict[str, Prepare]:
    return {cache.name: repeated(cache.use, cache.key(tokens)) for cache in caches}


def _row(label: str, contestants: dict[str, Prepare], num_rounds: int, add_us: float = 0, bound: float = 0) -> Row:
    series = measure(contestants, num_rounds)
    ours = [OurTree.name, OurCache.name]
    goals = []
    if bound:
        floor = list(series)[-1]
        text = f"{ours[0]} / ({floor}{f' + {add_us:g} us' if add_us else ''})"
        goals.append(Goal(text, ratio(series[ours[0]], [us + add_us for us in series[floor]]).median, bound))
    return compared(f"match + lock + release: {label}", series, ours, goals=goals)
