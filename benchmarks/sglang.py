"""SGLang 0.5.23, called as its scheduler calls it: its default cache, the Rust core of that alone, its Python tree.

Its wheel comes without its dependencies, which are an inference engine's: kernels, models, GPUs. Its cache needs none
of them, but modules on the way import them. Those modules are replaced by `_Hollow` ones, whose names import and do
nothing; everything that runs in a measurement is SGLang's own (``mem_cache``, but for the tensors behind the slots).
"""

from __future__ import annotations

import importlib.util
import sys
from array import array
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks.caches import Cache

__all__ = ["PEERS", "is_installed"]

_HOLLOW = (
    "triton",
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.constrained",
    "sglang.srt.distributed",
    "sglang.srt.layers",
    "sglang.srt.managers",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.model_executor",
)


class _Base:
    """What a class derives from whose base is hollow."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class _Nothing:
    """Stands for whatever is imported from a hollow module; as a decorator it leaves things as they are."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_Base,)

    def __getitem__(self, item: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class _Hollow(ModuleType):
    """A module with everything in it, and nothing in that."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _HollowFinder(MetaPathFinder, Loader):
    """Finds the modules of `_HOLLOW`, and whatever would lie in them."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in _HOLLOW):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def is_installed() -> bool:
    """Whether the wheel and a torch are there. Imports neither."""
    return all(importlib.util.find_spec(name) is not None for name in ("sglang", "torch", "msgspec"))


def _load() -> SimpleNamespace:
    """Import what is measured; the package's own ``__init__``, which patches model libraries, is passed over."""
    if "sglang" not in sys.modules:
        import torch.utils.flop_counter  # looks for triton when it is imported: before there is a hollow one

        spec = importlib.util.find_spec("sglang")
        assert spec is not None
        package = ModuleType("sglang")
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
        sys.modules["sglang"] = package
        sys.meta_path.insert(0, _HollowFinder())
    import torch
    from sglang.srt.mem_cache import base_prefix_cache, radix_cache, unified_radix_cache
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    return SimpleNamespace(
        torch=torch,
        base=base_prefix_cache,
        RadixKey=radix_cache.RadixKey,
        RadixCache=radix_cache.RadixCache,
        UnifiedRadixCache=unified_radix_cache.UnifiedRadixCache,
        Allocator=TokenToKVPoolAllocator,
        Params=CacheInitParams,
        full=ComponentType.FULL,
    )


class SGLang:
    """`UnifiedRadixCache` with its Rust tree core: what SGLang runs by default."""

    name = "SGLang"

    def __init__(self, num_blocks: int) -> None:
        self._lib = lib = _load()
        self._match_params = lib.base.MatchPrefixParams
        self._insert_params = lib.base.InsertParams
        self._evict_params = lib.base.EvictParams
        self.allocator = lib.Allocator(num_blocks, lib.torch.int64, "cpu", None, False)
        self.cache = self._make(
            lib.Params(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(lib.full,),
            )
        )

    def _make(self, params: Any) -> Any:
        cache = self._lib.UnifiedRadixCache(params)
        core = type(cache.tree_core).__name__
        if core != "RustUnifiedTreeCore":
            raise RuntimeError(f"SGLang fell back to {core}; its Rust core does not load here")
        return cache

    def key(self, tokens: bytes) -> Any:
        return self._lib.RadixKey(array("q", memoryview(tokens).cast("I").tolist()))

    def add(self, key: Any) -> None:
        self.cycle(key)

    def use(self, key: Any) -> None:
        cache = self.cache
        matched = cache.match_prefix(self._match_params(key=key))
        cache.unlock(cache.lock(matched.last_device_node))

    def open(self, key: Any) -> Any:
        matched = self.cache.match_prefix(self._match_params(key=key))
        lock = self.cache.lock(matched.last_device_node)
        num_matched = matched.device_prefix_len
        return key, self._slots(matched.last_device_node, num_matched, len(key)), num_matched, lock

    def publish(self, opened: Any) -> None:
        key, slots, num_matched, _ = opened
        self.cache.insert(self._insert_params(key=key, value=slots, prev_prefix_len=num_matched))

    def close(self, opened: Any) -> None:
        self.cache.unlock(opened[3])

    def evict(self, num_blocks: int) -> None:
        self.cache.evict(self._evict_params(num_tokens=num_blocks))

    def clear(self, num_blocks: int) -> None:
        self.allocator.free_group_begin()
        self.evict(num_blocks)
        self.allocator.free_group_end()

    def cycle(self, key: Any) -> None:
        opened = self.open(key)
        self.publish(opened)
        self.close(opened)

    def _slots(self, node: Any, num_matched: int, num_tokens: int) -> Any:
        """The slots of a prompt: those on the path to ``node``, then fresh ones, for which others are evicted."""
        num_missing = num_tokens - num_matched
        if self.allocator.available_size() < num_missing:
            self.evict(num_missing - self.allocator.available_size())
        fresh = self.allocator.alloc(num_missing)
        return self._lib.torch.cat([self.cache.path_device_indices(node), fresh]) if num_matched else fresh


class SGLangCore(SGLang):
    """The Rust core of `SGLang` through its binding, without the Python around it."""

    name = "SGLang's Rust core"

    def _make(self, params: Any) -> Any:
        cache = super()._make(params)
        self._core = cache.tree_core._binding
        self._bindings = cache.tree_core._bindings
        return cache

    def use(self, key: Any) -> None:
        self._unlock(self._lock(self._match(key)))

    def _match(self, key: Any) -> Any:
        return self._core.match_prefix(
            self._bindings.MatchParamsBinding(key=key.token_ids, extra_key=None, cache_salt=None)
        )

    def _lock(self, matched: Any) -> Any:
        return self._core.inc_lock_ref(matched.last_device_node_id, [])

    def _unlock(self, lock: Any) -> None:
        receipt = self._bindings.DecLockRefParamsBinding(
            node_id=lock.node_id,
            skipped_lock_components=[],
            component_lock_uuids=lock.component_lock_uuids,
            component_host_lock_uuids=lock.component_host_lock_uuids,
        )
        self._core.dec_lock_ref(lock.node_id, receipt, False)

    def open(self, key: Any) -> Any:
        matched = self._match(key)
        lock = self._lock(matched)
        num_matched = matched.device_prefix_len
        return key, self._slots(matched.last_device_node_id, num_matched, len(key)), num_matched, lock

    def publish(self, opened: Any) -> None:
        key, slots, num_matched, _ = opened
        step = self._core.begin_insert(
            self._bindings.InsertParamsBinding(
                key=key.token_ids,
                value=slots,
                extra_key=None,
                cache_salt=None,
                session_id=None,
                mamba_value=None,
                prev_prefix_len=num_matched,
                swa_evicted_seqlen=0,
                swa_branching_seqlen=None,
                inserted_len=0,
                priority=0,
                track_adopted_ranges=False,
                rotation_base=None,
            )
        )
        while step.result is None:
            step = self._core.resume_insert()
        self._core.end_insert()

    def close(self, opened: Any) -> None:
        self._unlock(opened[3])

    def evict(self, num_blocks: int) -> None:
        core, component = self._core, int(self._lib.full)
        tracker = {component: 0}
        core.evict_device_start(component, num_blocks)
        while tracker[component] < num_blocks:
            step = core.evict_device_next_node(component, tracker)
            self._count(step, tracker)
            if step.node_id is not None:
                self._count(core.evict_device_leaf(step.node_id), tracker)
            elif not step.made_progress:
                break
        core.evict_device_end(component)

    def _count(self, step: Any, tracker: dict[int, int]) -> None:
        for component, number in step.tracker.items():
            tracker[component] += number
        for tensors in step.new_device_frees.values():
            for tensor in tensors:
                self.allocator.free(tensor)


class SGLangPython(SGLang):
    """`RadixCache` of the same wheel, the tree in Python."""

    name = "SGLang's Python tree"

    def _make(self, params: Any) -> Any:
        return self._lib.RadixCache(params)

    def use(self, key: Any) -> None:
        cache = self.cache
        node = cache.match_prefix(self._match_params(key=key)).last_device_node
        cache.inc_lock_ref(node)
        cache.dec_lock_ref(node)

    def open(self, key: Any) -> Any:
        matched = self.cache.match_prefix(self._match_params(key=key))
        node = matched.last_device_node
        self.cache.inc_lock_ref(node)
        num_matched = matched.device_prefix_len
        return key, self._slots(node, num_matched, len(key)), num_matched, node

    def close(self, opened: Any) -> None:
        self.cache.dec_lock_ref(opened[3])


PEERS: tuple[type[Cache], ...] = (SGLang, SGLangCore, SGLangPython)
