"""Keeping Python's garbage collector from walking the tree."""

from __future__ import annotations

import gc

__all__ = ["settle_gc"]


def settle_gc() -> None:
    """Move every object that is alive now out of the collector's sight.

    A full collection walks every node of the tree: 100 ms and more at 200,000 leaves, in the middle of some call. Nodes
    are freed by reference count alone, so nothing is lost by hiding them. Call it after start-up and then every few
    thousand requests, from where a pause of a millisecond does no harm; the server does so by itself. It affects the
    whole process: cyclic garbage that other code has left by then is never collected, so young garbage is collected
    first. A whole cache is such garbage once it is dropped, for its nodes hold each other: `reset` it before.
    """
    gc.collect(1)
    gc.freeze()
