"""Layouts, memory budgets and pool descriptors: arithmetic and data, no torch."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import radix_cache.kv_layout
from radix_cache.errors import InvalidArgument
from radix_cache.kv_layout import KVLayout, size_pool
from radix_cache.pool_descriptor import CudaHandle, PoolDescriptor, PoolGone

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
DESCRIPTOR = PoolDescriptor("a" * 32, "/nowhere/pool", LAYOUT, num_blocks=8, num_reserved_blocks=1)
HANDLE = CudaHandle("GPU-1", "00ff", 4096, 512, "ab", 3, "cd", True)


def test_bytes_are_those_of_the_planes() -> None:
    assert LAYOUT.bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert LAYOUT.bytes_per_block == 16 * LAYOUT.bytes_per_token
    latent = KVLayout(num_layers=61, head_dim=576, block_size=64, dtype="float8_e4m3fn", order="MLA")
    assert latent.bytes_per_token == 61 * 576
    assert latent.plane_shape(7) == (7, 64, 576)
    assert LAYOUT.plane_shape(7) == (7, 16, 3, 64)
    assert replace(LAYOUT, order="HND").plane_shape(7) == (7, 3, 16, 64)


def test_a_fingerprint_tells_every_field() -> None:
    others = [
        replace(LAYOUT, num_layers=31),
        replace(LAYOUT, num_kv_heads=4),
        replace(LAYOUT, head_dim=65),
        replace(LAYOUT, block_size=17),
        replace(LAYOUT, dtype="float16"),
        replace(LAYOUT, order="HND"),
    ]
    assert len({LAYOUT.fingerprint, *(other.fingerprint for other in others)}) == 7


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_layers": 0}, "num_layers is at least 1"),
        ({"head_dim": 2**21}, "head_dim is at least 1 and at most 1048576"),
        ({"block_size": "16"}, "block_size is an integer"),
        ({"dtype": "int8"}, "dtype is one of float32, .*not 'int8'"),
        ({"order": "nhd"}, "order is one of NHD, HND, MLA, not 'nhd'"),
        ({"order": "MLA"}, "num_kv_heads is 1 with MLA"),
    ],
)
def test_bad_layouts(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        replace(LAYOUT, **wrong)


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [
        ("8 GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("1000000", 1_000_000),
        (123_456_789, 123_456_789),
        ("0.9", 9 * 10**9),
        (0.9, 9 * 10**9),
        ("90 %", 9 * 10**9),
        ("1", 10**10),
    ],
)
def test_budgets(budget: object, num_bytes: int) -> None:
    size = size_pool(LAYOUT, budget, free_bytes=10**10)
    assert size.budget_bytes == num_bytes
    assert size.num_blocks == num_bytes // (16 * 23_040)


def test_the_arithmetic_is_shown() -> None:
    assert str(size_pool(LAYOUT, "90%", free_bytes=10**10)) == (
        "2 (key, value) x 30 layers x 3 heads x 64 x 2 bytes (bfloat16) = 23,040 bytes a token; x 16 tokens = "
        "368,640 bytes a block; 0.9 of 10,000,000,000 bytes free = 9,000,000,000 bytes: 24,414 blocks (390,624 tokens)"
    )


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("8 parsecs", "'8 parsecs' is neither a size such as '8 GiB' nor a share"),
        ("", "'' is neither"),
        (None, "None is neither"),
        (True, "True is neither"),
        (-1, "-1 is neither"),
        (1.5, "a share of the free memory is above 0 and at most 1, not 1.5"),
        ("0.0", "above 0"),
        (float("nan"), "above 0"),
        ("100 KiB", "is 102,400 bytes, one block has 368,640"),
        (f"{'9' * 400} GiB", r"is beyond 2\*\*63 bytes"),
    ],
)
def test_bad_budgets(budget: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        size_pool(LAYOUT, budget, free_bytes=10**10)


def test_a_share_of_what_is_not_known() -> None:
    with pytest.raises(InvalidArgument, match="free_bytes is not said"):
        size_pool(LAYOUT, 0.9)
    for free_bytes in (-5, "10", 1.5):
        with pytest.raises(InvalidArgument, match="free_bytes is"):
            size_pool(LAYOUT, 0.9, free_bytes)


def test_docs() -> None:
    assert doctest.testmod(radix_cache.kv_layout).failed == 0


@pytest.mark.parametrize("descriptor", [DESCRIPTOR, replace(DESCRIPTOR, cuda=HANDLE)])
def test_descriptors_travel_as_json(descriptor: PoolDescriptor, tmp_path: Path) -> None:
    text = descriptor.to_json()
    assert PoolDescriptor.from_json(text) == descriptor
    assert PoolDescriptor.read(text) == descriptor
    for mode in (0o644, 0o600):
        descriptor.write(tmp_path / "pool.json", mode)
        assert (tmp_path / "pool.json").stat().st_mode & 0o777 == mode
    assert PoolDescriptor.read(str(tmp_path / "pool.json")) == descriptor
    assert [path.name for path in tmp_path.iterdir()] == ["pool.json"]


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(DESCRIPTOR.to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no JSON"),
        ("[" * 60_000, "this is no JSON"),
        (" " * 70_000, "at most 65536 characters"),
        ("[]", "a pool descriptor is a JSON object, not list"),
        ("{}", "needs the field 'layout'"),
        (changed(colour="red"), "a pool descriptor has no field 'colour'"),
        (changed(layout=None), "a layout is a JSON object, not NoneType"),
        (changed(layout={**json.loads(changed())["layout"], "head_dim": -1}), "head_dim is at least 1"),
        (changed(num_blocks=0), "num_blocks is at least 1"),
        (changed(num_blocks="8"), "num_blocks is an integer"),
        (changed(num_reserved_blocks=8), "num_reserved_blocks is at least 0 and at most 7"),
        (changed(path="../pool"), "path is an absolute path, not '../pool'"),
        (changed(path="/pool\0"), "path is an absolute path"),
        (changed(path="/pool\ud800"), "path is an absolute path"),
        (changed(pool_id=""), "pool_id is a string of 1"),
        (changed(cuda={}), "a cuda needs the field 'device_uuid'"),
    ],
)
def test_bad_descriptors(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PoolDescriptor.from_json(text)


@pytest.mark.parametrize(("field", "value"), [("handle", "xyz"), ("event", None), ("num_bytes", -1)])
def test_bad_handles(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=field):
        replace(HANDLE, **{field: value})


def test_a_descriptor_without_its_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file"):
        PoolDescriptor.read(str(tmp_path / "none"))
    with pytest.raises(InvalidArgument, match="not the name of a file with text"):
        PoolDescriptor.read("a\0b")
    assert not DESCRIPTOR.is_owner_alive()
    with pytest.raises(PoolGone, match="/nowhere/pool is gone"):
        DESCRIPTOR.open_file()


def test_another_pool_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "pool").write_text("something else")
    descriptor = replace(DESCRIPTOR, path=str(tmp_path / "pool"))
    assert not descriptor.is_owner_alive()
    with pytest.raises(PoolGone, match="is another pool's"):
        descriptor.open_file()
    os.mkfifo(tmp_path / "pipe")
    assert not replace(DESCRIPTOR, path=str(tmp_path / "pipe")).is_owner_alive()


def test_no_torch_is_needed() -> None:
    code = "import radix_cache.pool_descriptor, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
