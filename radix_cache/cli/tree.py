"""``radix-cache tree``: what a running server has cached, drawn."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from radix_cache.cli.remote import Address, connected, connecting
from radix_cache.cli.show import count, make_console, plural, print_json
from radix_cache.stats import TreeNode
from radix_cache.tokens import unpack_tokens

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

__all__ = ["draw", "tree"]

_NUM_SHOWN_TOKENS = 5
_NUM_SHOWN_BLOCKS = 3


@click.command()
@click.argument("address", type=Address())
@click.option("-n", "--namespace", multiple=True, metavar="PART", help="Only namespaces that begin so; once a part.")
@click.option("--max-nodes", type=click.IntRange(1), default=200, show_default=True, help="Draw no more than these.")
@click.option("--json", "as_json", is_flag=True, help="Print the nodes as JSON, parents first.")
@connecting
def tree(address: str, namespace: tuple[str, ...], max_nodes: int, as_json: bool) -> None:
    """Draw the tree of the server at ADDRESS.

    One line a node: the first token ids of its span, tokens, blocks, locks (leases that end there and children with
    locks), and its age in matches and inserts since it was last touched.
    """
    with connected(address) as client:
        block_size = client.describe().block_size
        rows = client.dump(namespace, max_nodes, max(_NUM_SHOWN_TOKENS, _NUM_SHOWN_BLOCKS * block_size))
        stats = client.stats()
    if as_json:
        print_json([_as_json(row) for row in rows])
        return
    console = make_console()
    blocks = f"{plural(stats.num_cached_blocks, 'block')} of {plural(block_size, 'token')}"
    console.print(draw(rows, f"{address}: {plural(stats.num_nodes, 'node')}, {blocks}"))
    num_drawn = sum(1 for row in rows if row.depth)
    if not namespace and num_drawn < stats.num_nodes:
        console.print(f"drawn: {count(num_drawn)} of {count(stats.num_nodes)} nodes; --max-nodes shows more")


def draw(rows: Sequence[TreeNode], title: str) -> Tree:
    """Return rows, each parent before its children, as a tree; what was cut off is counted where it is missing."""
    from rich.tree import Tree

    top = Tree(title)
    path = [top]  # the branches from the top to the latest row
    drawn: list[tuple[TreeNode, Tree]] = []
    for row in rows:
        del path[row.depth + 1 :]
        path.append(path[-1].add(_label(row)))
        drawn.append((row, path[-1]))
    for row, branch in drawn:
        num_missing = row.num_children - len(branch.children)
        if num_missing > 0:
            branch.add(f"… {count(num_missing)} more", style="dim")
    return top


def _label(row: TreeNode) -> Text:
    from rich.text import Text

    if not row.depth:
        return Text(_namespace(row), style="bold")
    label = Text.assemble(
        (_abbreviate(unpack_tokens(row.tokens), _NUM_SHOWN_TOKENS, row.num_tokens), "cyan"),
        f"  {plural(row.num_tokens, 'token')} in {plural(row.num_blocks, 'block')}: ",
        _abbreviate(array("i", row.block_ids), _NUM_SHOWN_BLOCKS, row.num_blocks),
    )
    if row.num_locks:
        label.append(f", {plural(row.num_locks, 'lock')}", "yellow")
    return label.append(f", age {count(row.age)}", "dim")


def _abbreviate(ids: Sequence[int], num_shown: int, num_all: int) -> str:
    shown = ids[:num_shown]
    return " ".join(map(str, shown)) + (" …" if len(shown) < num_all else "")


def _namespace(row: TreeNode) -> str:
    return repr(row.namespace) if row.namespace else "() the default namespace"


def _as_json(row: TreeNode) -> dict[str, Any]:
    return {
        "namespace": row.namespace,
        "depth": row.depth,
        "num_tokens": row.num_tokens,
        "num_blocks": row.num_blocks,
        "num_locks": row.num_locks,
        "num_children": row.num_children,
        "age": row.age,
        "first_tokens": unpack_tokens(row.tokens).tolist(),
        "first_block_ids": array("i", row.block_ids).tolist(),
    }
