"""Policies by name, on traces: those of the tree, the offline optimum, and a file of one's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from radix_cache.cache import PrefixCache
from radix_cache.errors import InvalidArgument
from radix_cache.lab.brought import telling
from radix_cache.lab.hits import ReplayResult
from radix_cache.lab.optimal import optimal
from radix_cache.lab.replay import TraceClock, replay
from radix_cache.lab.requests import Request
from radix_cache.policies import BUILT_IN, EvictionPolicy, make_policy

__all__ = ["OPTIMAL", "load", "load_policy", "new_cache", "replay_policy", "usual_block_size"]

OPTIMAL = "optimal"

# To these it is the same whether a block is one token or many, and one is faster.
_WITHOUT_POSITIONS = {
    BUILT_IN[name]
    for name in ("lru", "lfu", "slru", "fifo", "filo", "mru", "priority", "lfu-da", "two-hit", "steps-to-execution")
}


def replay_policy(
    requests: Iterable[Request], policy: str | EvictionPolicy, num_blocks: int, block_size: int | None = None
) -> ReplayResult:
    """Play ``requests`` to a new cache, in process, one after the other, and return what it found.

    policy: a name that `radix_cache.policies.make_policy` knows, ``"optimal"``, ``"./mine.py:Mine"``, or an object.
    block_size: of traces of token ids; None: 16. Policies see positions in tokens, of hash ids, too, and a clock that
    shows the trace's time.
    Raises `InvalidArgument` for a policy that is not found, and for sizes below 1; `BroughtCodeFailed` with whatever a
    policy of a file raises.
    """
    first, requests = peek(requests)
    if policy == OPTIMAL:
        return optimal(requests, num_blocks, usual_block_size(first) if block_size is None else block_size)
    clock = TraceClock(first)
    cache = new_cache(first, policy, num_blocks, block_size, clock)
    with telling_of(policy):
        return replay(requests, cache, trace_clock=clock)


def new_cache(
    first: Request | None, policy: str | EvictionPolicy, num_blocks: int, block_size: int | None, clock: TraceClock
) -> PrefixCache:
    """Return an empty cache for a trace that begins with ``first``."""
    made = load_policy(policy)
    if block_size is None or (first is not None and first.tokens_per_id > 1):
        block_size = usual_block_size(first)
        if first is not None and type(made) not in _WITHOUT_POSITIONS:
            block_size = max(first.tokens_per_id, block_size)
    return PrefixCache(num_blocks, block_size, made, clock=clock)


def usual_block_size(first: Request | None) -> int:
    """Return the block size for a trace that begins so: 1 for hash ids, whose tokens need no copies, else 16."""
    return 1 if first is not None and first.tokens_per_id > 1 else 16


def peek(requests: Iterable[Request]) -> tuple[Request | None, Iterable[Request]]:
    """Return the first request, or None, and all of them."""
    rest = iter(requests)
    first = next(rest, None)
    return first, rest if first is None else chain((first,), rest)


def load_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return the policy; ``"./mine.py:Mine"`` is the class ``Mine`` of that file, made without arguments or with those
    behind another colon: ``"./mine.py:Mine:alpha=2"``. The file is run once a process. Raises `InvalidArgument`.
    """
    if isinstance(policy, str) and policy.endswith(".py"):
        raise InvalidArgument(f"policy {policy!r}: say which class of the file, as in {policy}:Mine")
    if not isinstance(policy, str):
        return make_policy(policy)
    if ".py:" not in policy:
        return _of_the_tree(policy)
    path, _, rest = policy.partition(".py:")
    name = _module(f"{path}.py").__name__
    try:
        with telling_of(policy):
            return make_policy(f"{name}:{rest}")
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace(name, f"{path}.py")) from error


def telling_of(policy: str | EvictionPolicy) -> AbstractContextManager[None]:
    """Return a context in which what a policy of a file raises is told with its line."""
    if not isinstance(policy, str) or ".py:" not in policy:
        return nullcontext()
    return telling(f"policy {policy!r}", file_of(policy))


def file_of(text: str) -> str | None:
    """Return the file in ``"./file.py:name"`` as a traceback has it; None where there is none."""
    path, is_file, _ = text.partition(".py:")
    return str(Path(f"{path}.py").resolve()) if is_file else None


def _of_the_tree(policy: str) -> EvictionPolicy:
    try:
        return make_policy(policy)
    except InvalidArgument as error:
        name, colon, _ = policy.partition(":")
        if name == OPTIMAL:
            raise InvalidArgument(f"policy {policy!r}: optimal stands alone and has no parameters") from None
        near = get_close_matches(name.lower(), [*BUILT_IN, OPTIMAL], 1)
        raise InvalidArgument(f"{error}; {near[0]!r} is one" if near and not colon else str(error)) from None


def load(text: str) -> Callable[..., Any]:
    """Return what ``"./file.py:name"`` or ``"module:name"`` names: a reader, a tokenizer. Raises `InvalidArgument`."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise InvalidArgument(f"FILE.py:NAME or MODULE:NAME is needed, not {text!r}, which cannot be imported")
    try:
        module = _module(place) if place.endswith(".py") else importlib.import_module(place)
        found: Callable[..., Any] = getattr(module, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(f"{text!r} cannot be imported: {error}") from error
    if not callable(found):
        raise InvalidArgument(f"{text!r} is a {type(found).__name__}, which cannot be called")
    return found


def _module(path: str) -> ModuleType:
    """Return the module that the file at ``path`` makes; it can be imported by its name from then on."""
    return _run(Path(path).resolve(), path)


@lru_cache
def _run(file: Path, path: str) -> ModuleType:
    name = f"radix_cache_user_{crc32(str(file).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise InvalidArgument(f"{path} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InvalidArgument(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module
