"""A server tells its engines where the pool is, goes on under the pool's epoch, and ends with the pool's owner."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from service_process import ServerProcess, StartFailed

torch = pytest.importorskip("torch")

from radix_cache.errors import InvalidArgument  # noqa: E402
from radix_cache.torch_pool import KVLayout, PoolGone, SharedKVPool, attach_pool, share_pool  # noqa: E402
from radix_cache_service import Client, owner  # noqa: E402
from radix_cache_service.config import ServerConfig  # noqa: E402

LAYOUT = KVLayout(num_layers=1, num_kv_heads=2, head_dim=4, block_size=2, dtype="float32")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[SharedKVPool]:
    with share_pool(LAYOUT, 8, path=tmp_path / "pool") as owned:
        owned.descriptor.write(tmp_path / "pool.json")
        yield owned


def test_engines_find_the_pool(pool: SharedKVPool, tmp_path: Path) -> None:
    server = ServerProcess(pool_descriptor=tmp_path / "pool.json")
    try:
        with Client(server.address, layout_fingerprint=LAYOUT.fingerprint) as client:
            said = client.describe()
            engine = attach_pool(said.pool_descriptor)
            lease = client.match_prefix([1, 2, 3], num_tokens=3)
            states = torch.arange(24.0).view(3, 2, 4)
            engine.write(0, engine.slot_mapping(lease.block_table, 0, 3), states, -states)
            assert torch.equal(pool.gather(0, lease.block_table, 3)[0], states)
        assert (said.pool_epoch, said.layout_fingerprint) == (pool.descriptor.pool_id, LAYOUT.fingerprint)
        assert server.process.poll() is None
    finally:
        pool.close()
        status, errors = server.finish()
    assert status == 1
    assert f"the owner of pool {pool.descriptor.pool_id} has ended, and so has this server" in errors


def test_a_new_pool_is_a_cold_cache(pool: SharedKVPool, tmp_path: Path) -> None:
    """The server's state outlives the server, not the pool."""
    settings = {"pool_descriptor": tmp_path / "pool.json", "state_dir": tmp_path / "state"}

    def cached(more: list[int]) -> tuple[int, str]:
        with ServerProcess(**settings) as server, Client(server.address) as client:
            before = client.probe([1, 2, 3, 4])
            if more:
                lease = client.match_prefix(more, num_tokens=len(more))
                client.insert(lease, more)
                client.release(lease)
            return before, client.epoch

    assert cached([1, 2, 3, 4])[0] == 0
    kept, epoch = cached([])
    assert kept == 4
    pool.close()
    with pytest.raises(StartFailed) as failed:
        ServerProcess(**settings)
    assert failed.value.status == 1
    assert "its pool_descriptor is an old one" in failed.value.errors
    with share_pool(LAYOUT, 8, path=tmp_path / "pool") as following:
        following.descriptor.write(tmp_path / "pool.json")
        assert cached([])[0] == 0
        assert cached([])[1] != epoch


def test_the_owner_is_looked_for_again_after_a_failure(pool: SharedKVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_INTERVAL_S", 0.001)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def watched() -> None:
        ended = asyncio.Event()
        watch = asyncio.create_task(owner.end_with_owner(pool.descriptor, ended))
        await asyncio.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # no more files may be opened
        try:
            await asyncio.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not watch.done()
        pool.close()
        async with asyncio.timeout(60):
            await ended.wait()
        with pytest.raises(PoolGone):
            await watch

    asyncio.run(watched())


def test_without_a_pool_nothing_is_said() -> None:
    with ServerProcess() as server, Client(server.address) as client:
        assert client.describe().pool_descriptor is None


def test_settings_that_contradict_the_pool(pool: SharedKVPool) -> None:
    text = pool.descriptor.to_json()
    good = {"pool_descriptor": text, "num_blocks": 8, "block_size": 2}
    assert ServerConfig(**good).pool == pool.descriptor
    named = ServerConfig(**good, pool_epoch="boot 7", layout_fingerprint="mine")
    assert (named.pool_epoch, named.layout_fingerprint) == ("boot 7", "mine")
    assert replace(ServerConfig(**good), num_reserved_blocks=1).pool == pool.descriptor
    with pytest.raises(InvalidArgument, match="num_blocks is 9, and the pool_descriptor's pool has 8"):
        ServerConfig(**{**good, "num_blocks": 9})
    with pytest.raises(InvalidArgument, match="block_size is 4, and the pool_descriptor's pool has 2"):
        ServerConfig(**{**good, "block_size": 4})
    keeping = replace(pool.descriptor, num_reserved_blocks=2).to_json()
    with pytest.raises(InvalidArgument, match="num_reserved_blocks is 1, and the pool_descriptor's pool keeps 2"):
        ServerConfig(**{**good, "pool_descriptor": keeping, "num_reserved_blocks": 1})
    with pytest.raises(InvalidArgument, match="pool descriptor '/nowhere': No such file"):
        ServerConfig(pool_descriptor="/nowhere")


def test_a_server_needs_no_torch(pool: SharedKVPool) -> None:
    code = (
        "import sys; from radix_cache_service.config import ServerConfig; import radix_cache_service.server;"
        f"ServerConfig(pool_descriptor={pool.descriptor.to_json()!r}, num_blocks=8, block_size=2);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
