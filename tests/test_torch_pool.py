"""KV storage: what is written under a block table is what is read, in every layout and type."""

from __future__ import annotations

import doctest
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from radix_cache import BlockPool, PrefixCache  # noqa: E402
from radix_cache.errors import InvalidArgument, InvalidBlocks  # noqa: E402
from radix_cache.torch_pool import KVLayout, KVPool, free_bytes, memory, size_pool, slot_mapping, slots, storage  # noqa: E402

ORDERS = ("NHD", "HND", "MLA")
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def make_pool(order: str = "NHD", dtype: str = "float32", num_blocks: int = 12, **options: object) -> KVPool:
    heads = 1 if order == "MLA" else 2
    layout = KVLayout(num_layers=2, num_kv_heads=heads, head_dim=4, block_size=4, dtype=dtype, order=order)
    return KVPool(layout, num_blocks, **options)


def states(pool: KVPool, num_tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inner = (4,) if pool.layout.order == "MLA" else (2, 4)
    return [torch.randn(num_tokens, *inner, generator=generator) for _ in range(pool.layout.num_planes)]


def same(found: tuple[torch.Tensor, ...], wanted: list[torch.Tensor], pool: KVPool) -> bool:
    return all(torch.equal(one.float(), other.to(pool.dtype).float()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read(order: str, dtype: str) -> None:
    pool = make_pool(order, dtype)
    table = [7, 0, 11]
    wanted = [states(pool, 10, seed=layer) for layer in range(2)]
    for start, end in ((0, 3), (3, 9), (9, 10)):
        mapping = pool.slot_mapping(table, start, end)
        for layer in range(2):
            pool.write(layer, mapping, *(state[start:end] for state in wanted[layer]))
    for layer in range(2):
        assert same(pool.gather(layer, table, 10), wanted[layer], pool)
        assert same(pool.gather(layer, pool.block_ids(table), 9, start=5), [s[5:9] for s in wanted[layer]], pool)
        assert pool.gather(layer, table, 0)[0].shape[0] == 0
    assert pool.gather(0, table, 10)[0].dtype == pool.dtype
    assert pool.gather(0, table, 10, dtype=torch.float64)[0].dtype == torch.float64


@pytest.mark.parametrize("order", ORDERS)
def test_each_token_is_where_the_contract_says(order: str) -> None:
    """Token position t lives in block table[t // block_size], at offset t % block_size: position by position."""
    pool = make_pool(order)
    table = [5, 2, 9]
    wanted = states(pool, 11)
    pool.write(1, pool.slot_mapping(table, 0, 11), *wanted)
    for plane, state in zip(pool.layer(1), wanted, strict=True):
        for position in range(11):
            block, offset = table[position // 4], position % 4
            there = plane[block, :, offset] if order == "HND" else plane[block, offset]
            assert torch.equal(there, state[position])
        assert plane.is_contiguous()
        assert plane.shape == pool.layout.plane_shape(12)
        assert plane.data_ptr() in range(pool.kv.data_ptr(), pool.kv.data_ptr() + pool.num_bytes)
        untouched = sorted(set(range(12)) - set(table))
        assert not plane[untouched].any()


def test_slots() -> None:
    assert slot_mapping([7, 3], 0, 8, 4).tolist() == [28, 29, 30, 31, 12, 13, 14, 15]
    assert slot_mapping([7, 3], 3, 3, 4).tolist() == []
    assert slot_mapping([], 0, 0, 4).tolist() == []
    assert slot_mapping([7, 3], 3, 5, 4, pad_to=4).tolist() == [31, 12, 0, 0]
    assert slot_mapping([7, 3], 0, 2, 1).tolist() == [7, 3]
    with pytest.raises(InvalidArgument, match="end is 9, and a table of 2 blocks of 4 covers 8"):
        slot_mapping([7, 3], 0, 9, 4)
    with pytest.raises(InvalidArgument, match="start is at least 0 and at most 2"):
        slot_mapping([7, 3], 3, 2, 4)
    with pytest.raises(InvalidArgument, match="pad_to is at least 2"):
        slot_mapping([7, 3], 0, 2, 4, pad_to=1)


def test_a_lease_s_table_is_taken_as_it_is() -> None:
    cache = PrefixCache(num_blocks=12, block_size=4, num_reserved_blocks=1)
    pool = make_pool(num_reserved_blocks=1)
    lease = cache.match_prefix(range(10), num_tokens=10)
    wanted = states(pool, 10)
    pool.write(0, pool.slot_mapping(lease.block_table, 0, 10), *wanted)
    for table in (lease.block_table, torch.tensor(list(lease.block_table)), tuple(lease.block_table)):
        assert same(pool.gather(0, table, 10), wanted, pool)


def test_padding_goes_to_block_0() -> None:
    pool = make_pool(num_reserved_blocks=1)
    mapping = pool.slot_mapping([3], 0, 2, pad_to=5)
    pool.write(0, mapping, *states(pool, 5))
    assert not pool.layer(0)[0][[1, 2, *range(4, 12)]].any()
    assert pool.layer(0)[0][0, 0].any()
    with pytest.raises(InvalidArgument, match="num_reserved_blocks"):
        make_pool().slot_mapping([3], 0, 2, pad_to=5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_blocks_are_copied_as_they_were(order: str, dtype: str) -> None:
    pool = make_pool(order, dtype)
    for layer in range(2):
        pool.write(layer, pool.slot_mapping(range(12), 0, 48), *states(pool, 48, layer))
    before = pool.kv.clone().float()
    pool.copy_blocks([3, 4, 3], [4, 5, 9])  # a chain and a fan: what was there before the call is copied
    source = list(range(12))
    source[4], source[5], source[9] = 3, 4, 3
    assert torch.equal(pool.kv.float(), before[:, :, source])
    pool.copy_blocks([], [])
    assert torch.equal(pool.kv.float(), before[:, :, source])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_poisoned_block_is_all_nan_and_no_other(dtype: str) -> None:
    pool = make_pool(dtype=dtype)
    pool.poison([2, 5])
    is_nan = pool.kv.float().isnan()
    assert is_nan[:, :, [2, 5]].all()
    assert not is_nan[:, :, [0, 1, 3, 4, *range(6, 12)]].any()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_saturates(dtype: str) -> None:
    pool = make_pool(dtype=dtype)
    huge = torch.full((1, 2, 4), 1e6)
    pool.write(0, pool.slot_mapping([1], 0, 1), huge, -huge)
    largest = torch.finfo(pool.dtype).max
    assert [plane.float().unique().tolist() for plane in pool.gather(0, [1], 1)] == [[largest], [-largest]]


@pytest.mark.parametrize("order", ORDERS)
def test_inference_mode_and_gradients(order: str) -> None:
    with torch.inference_mode():
        pool = make_pool(order)  # made inside, used outside, and the other way round
        pool.write(0, pool.slot_mapping([1], 0, 2), *states(pool, 2))
    wanted = [state.requires_grad_() for state in states(pool, 4, seed=1)]
    mapping = pool.slot_mapping([1], 0, 4)
    pool.write(0, mapping, *wanted)
    with torch.inference_mode():
        inside = states(pool, 4, seed=1)
        assert same(pool.gather(0, [1], 4), inside, pool)
        pool.copy_blocks([1], [2])
        pool.write(1, mapping, *inside)
    pool.write(1, mapping, *inside)
    pool.copy_blocks([2], [3])
    found = pool.gather(0, [3], 4)
    assert same(found, inside, pool)
    assert not any(plane.requires_grad for plane in (*found, pool.kv))


def test_random_tables_against_a_dict() -> None:
    random_ = random.Random(5)
    for order in ORDERS:
        pool, blocks = make_pool(order, num_blocks=20), BlockPool(20)
        model: dict[tuple[int, int], torch.Tensor] = {}
        for _ in range(30):
            num_tokens = random_.randint(1, 20)
            table = blocks.allocate(-(-num_tokens // 4))
            start = random_.randrange(num_tokens)
            written = states(pool, num_tokens - start, random_.randrange(10**6))
            pool.write(0, pool.slot_mapping(table, start, num_tokens), *written)
            for position in range(start, num_tokens):
                model[table[position // 4], position % 4] = written[0][position - start]
            found = pool.gather(0, table, num_tokens)[0]
            nothing = torch.zeros_like(found[0])
            wanted = [model.get((table[p // 4], p % 4), nothing) for p in range(num_tokens)]
            assert torch.equal(found, torch.stack(wanted))
            blocks.free(table)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pool: pool.gather(0, [12], 4), InvalidBlocks, "block 12 is not of this pool, which has 12 blocks"),
        (lambda pool: pool.gather(0, [-1], 4), InvalidBlocks, "-1"),
        (lambda pool: pool.gather(0, [1], 5), InvalidArgument, "num_tokens is at least 0 and at most 4, not 5"),
        (lambda pool: pool.gather(0, [1], 3, start=4), InvalidArgument, "start is at least 0 and at most 3"),
        (lambda pool: pool.slot_mapping([99], 0, 1), InvalidBlocks, "block 99"),
        (lambda pool: pool.copy_blocks([1, 2], [3]), InvalidArgument, "src has 2 blocks and dst 1"),
        (lambda pool: pool.copy_blocks([1, 2], [3, 3]), InvalidBlocks, "block 3 is named twice in dst"),
        (lambda pool: pool.copy_blocks([1], [12]), InvalidBlocks, "block 12"),
        (lambda pool: pool.poison([12]), InvalidBlocks, "block 12"),
        (lambda pool: pool.write(0, torch.tensor([1]), *states(pool, 2)), InvalidArgument, r"of shape \(1, 2, 4\)"),
        (lambda pool: pool.write(0, torch.tensor([1]), states(pool, 1)[0]), InvalidArgument, "NHD takes 2"),
        (lambda pool: pool.copy_blocks(torch.tensor([1, 2]), torch.tensor([3, 3])), InvalidBlocks, "block 3 is named"),
        (
            lambda pool: pool.write(2, torch.tensor([1]), *states(pool, 1)),
            InvalidArgument,
            "layer is at least 0 and at",
        ),
        (lambda pool: pool.write(-1, torch.tensor([1]), *states(pool, 1)), InvalidArgument, "layer is at least 0"),
        (lambda pool: pool.gather(2, [1], 1), InvalidArgument, "layer is at least 0 and at most 1, not 2"),
        (lambda pool: pool.write(0, [1], *states(pool, 1)), InvalidArgument, "type int64, not list"),
        (
            lambda pool: pool.write(0, torch.tensor([1.0]), *states(pool, 1)),
            InvalidArgument,
            r"not \(1,\) torch.float32",
        ),
        (
            lambda pool: KVPool(pool.layout, 3, memory=torch.zeros(1537, dtype=torch.uint8)[1:]),
            InvalidArgument,
            "begins",
        ),
        (
            lambda pool: KVPool(pool.layout, 3, memory=torch.zeros(3072, dtype=torch.uint8)[::2]),
            InvalidArgument,
            "conti",
        ),
        (lambda pool: KVPool(pool.layout, 0), InvalidArgument, "num_blocks is at least 1"),
        (lambda pool: KVPool(pool.layout, 3, num_reserved_blocks=3), InvalidArgument, "num_reserved_blocks"),
        (lambda pool: KVPool(pool.layout, 3, memory=torch.zeros(5)), InvalidArgument, "memory is 1536 bytes of uint8"),
    ],
)
def test_bad_arguments_change_nothing(call: object, error: type[Exception], message: str) -> None:
    pool = make_pool()
    with pytest.raises(error, match=message):
        call(pool)
    assert not pool.kv.any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [-1, 48])
def test_a_slot_that_is_none_is_refused_before_anything_is_written(order: str, bad: int) -> None:
    pool = make_pool(order)
    with pytest.raises(InvalidArgument, match=f"slots are 0 to 47 in this pool, not {bad}"):
        pool.write(0, torch.tensor([1, bad]), *states(pool, 2))
    assert not pool.kv.any()


def test_a_share_of_free_memory() -> None:
    layout = make_pool().layout
    free = free_bytes()
    size = size_pool(layout, 0.5, free)
    assert size.num_blocks == free // 2 // layout.bytes_per_block


def test_a_container_s_limit(tmp_path: Path) -> None:
    assert memory._bytes_left_to_container(tmp_path) == sys.maxsize
    for most, left in (("max\n", sys.maxsize), ("1000\n", 400), ("500\n", 0)):
        (tmp_path / "memory.max").write_text(most)
        (tmp_path / "memory.current").write_text("600\n")
        assert memory._bytes_left_to_container(tmp_path) == left
    assert 0 < free_bytes() <= memory._available_bytes() * 1.5


def test_docs() -> None:
    assert doctest.testmod(storage).attempted
    assert doctest.testmod(storage).failed == doctest.testmod(slots).failed == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(order: str, dtype: str) -> None:
    """The same bytes as on the CPU, from kernels on a stream of their own that the host waits for by an event."""
    gpu, cpu = make_pool(order, dtype, device="cuda"), make_pool(order, dtype)
    table = [7, 0, 11]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for pool in (gpu, cpu):
            for layer in range(2):
                pool.write(layer, pool.slot_mapping(table, 0, 10), *states(pool, 10, layer))
            pool.copy_blocks([7, 11], [1, 2])
        found = gpu.gather(1, torch.tensor([1]), 4)  # a table on the host
        done = stream.record_event()
    done.synchronize()
    assert torch.equal(gpu.kv.cpu().float(), cpu.kv.float())
    assert same(tuple(plane.cpu() for plane in found), [s.float() for s in cpu.gather(1, [1], 4)], cpu)
    assert size_pool(gpu.layout, 0.9, free_bytes("cuda")).num_blocks > 0
