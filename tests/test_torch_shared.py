"""One pool in many processes: who may end without harm, and who is missed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from radix_cache.errors import InvalidArgument  # noqa: E402
from radix_cache.pool_descriptor import lock_owned  # noqa: E402
from radix_cache.torch_pool import (  # noqa: E402
    KVLayout,
    PoolDescriptor,
    PoolGone,
    SharedKVPool,
    attach_pool,
    share_pool,
)

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
SHARED_MEMORY = Path("/dev/shm")

# Reads commands, one a line, and answers each with a line: an engine, or an owner, that knows no other process.
PROCESS = """
import sys, torch
from pathlib import Path
from radix_cache.torch_pool import *
torch.set_num_threads(1)
layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
ones = torch.ones(4, 2, 4)
print("ready", flush=True)
for line in sys.stdin:
    try:
        exec(line)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


class Process:
    def __init__(self) -> None:
        command = [sys.executable, "-u", "-W", "error", "-c", PROCESS]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def do(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> int:
        self.process.communicate()
        return self.process.returncode


@contextmanager
def running() -> Iterator[Process]:
    process = Process()
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[SharedKVPool]:
    with share_pool(LAYOUT, 8, num_reserved_blocks=1, path=tmp_path / "pool") as owned:
        yield owned


def attach(pool: SharedKVPool) -> str:
    return f"pool = attach_pool({pool.descriptor.to_json()!r}); print(pool.is_owner, pool.is_owner_alive(), flush=True)"


@pytest.mark.parametrize("ending", ["kill", "end"])
def test_an_engine_that_ends_leaves_the_pool_as_it_is(pool: SharedKVPool, ending: str) -> None:
    with running() as engine:
        assert engine.do(attach(pool)) == "False True"
        assert pool.is_owner
        engine.do("pool.write(1, pool.slot_mapping([5], 0, 4), ones, 2 * ones); print()")
        assert [plane.sum().item() for plane in pool.gather(1, [5], 4)] == [32, 64]
        pool.copy_blocks([5], [6])
        assert engine.do("print(pool.gather(1, [6], 4)[1].sum().item(), flush=True)") == "64.0"
        getattr(engine, ending)()
    assert pool.is_owner_alive()
    assert Path(pool.descriptor.path).exists()
    assert attach_pool(pool.descriptor).kv.sum().item() == 2 * 96


def test_a_dead_owner_is_noticed_and_its_file_removed_by_the_next(tmp_path: Path) -> None:
    show = "print(pool.descriptor.to_json(), flush=True)"
    with running() as owner:
        texts = [
            owner.do(f"pool = share_pool(layout, 8); {show}"),
            owner.do(f"unnamed = pool; pool = share_pool(layout, 8, path={str(tmp_path / 'pool')!r}); {show}"),
        ]
        pools = [attach_pool(text) for text in texts]
        for pool in pools:
            pool.check_owner()
        owner.kill()
    for pool, text in zip(pools, texts, strict=True):
        assert not pool.is_owner_alive()
        with pytest.raises(PoolGone, match=f"the owner of pool {pool.descriptor.pool_id} has ended"):
            pool.check_owner()
        with pytest.raises(PoolGone, match="has ended"):
            attach_pool(text)
    assert Path(pools[1].descriptor.path).exists()  # the other one goes with any pool that is made on this machine
    with share_pool(LAYOUT, 8) as unnamed, share_pool(LAYOUT, 8, path=tmp_path / "pool") as named:
        assert not Path(pools[0].descriptor.path).exists()
        assert Path(unnamed.descriptor.path).parent == SHARED_MEMORY or not SHARED_MEMORY.is_dir()
        assert named.descriptor.path == pools[1].descriptor.path
        for text in texts:
            with pytest.raises(PoolGone, match="has ended"):
                attach_pool(text)
        assert not any(pool.is_owner_alive() for pool in pools)
        named.check_owner()
        pools[1].gather(0, [5], 4)  # what is mapped stays mapped: nobody's process ends by a signal
    assert not list(tmp_path.iterdir())


def test_an_owner_that_ends_in_order_takes_the_file_with_it(tmp_path: Path) -> None:
    share = (
        f"pool = share_pool(layout, 8, path={str(tmp_path / 'pool')!r}); print(pool.descriptor.to_json(), flush=True)"
    )
    with running() as owner:
        for line in ("pool.close(); print()", "del pool; print()", "sys.exit()"):
            pool = attach_pool(owner.do(share))
            owner.do(line)
            if line == "sys.exit()":
                assert owner.end() == 0
            assert not list(tmp_path.iterdir())
            assert not pool.is_owner_alive()


def test_a_live_owner_s_path_is_not_taken(pool: SharedKVPool) -> None:
    path = Path(pool.descriptor.path)
    with pytest.raises(InvalidArgument, match="is in use by another pool"):
        share_pool(LAYOUT, 8, path=path)
    pool.check_owner()
    assert sorted(item.name for item in path.parent.iterdir()) == ["pool"]


def test_who_only_asks_holds_nothing(tmp_path: Path) -> None:
    """A dead owner stays dead and its path can be had, however many ask for it meanwhile."""
    path, other = tmp_path / "pool", tmp_path / "other"
    with running() as owner:
        owner.do(f"pool = share_pool(layout, 8, path={str(path)!r}); print()")
        owner.kill()
    left = path.read_bytes()
    dead = PoolDescriptor(left.split(b"\n")[1].decode(), str(path), LAYOUT, 8)
    ended, seen = threading.Event(), []

    def ask() -> None:
        while not ended.is_set():
            seen.append(dead.is_owner_alive())

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    for _ in range(200):
        other.write_bytes(left)
        other.rename(path)
        share_pool(LAYOUT, 8, path=path).close()
    ended.set()
    for thread in asking:
        thread.join()
    assert seen
    assert not any(seen)


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm")
def test_what_a_killed_maker_left_is_removed() -> None:
    fresh, old, owned = (SHARED_MEMORY / f".radix-cache-kv-test-{os.urandom(8).hex()}.new" for _ in range(3))
    try:
        for path in (fresh, old, owned):
            path.write_bytes(b"")
        for path in (old, owned):
            os.utime(path, (0, 0))
        with owned.open("r+b") as file:
            lock_owned(file.fileno())
            share_pool(LAYOUT, 8).close()
            assert [path.exists() for path in (fresh, old, owned)] == [True, False, True]
    finally:
        for path in (fresh, old, owned):
            path.unlink(missing_ok=True)


def test_what_is_no_pool_s(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="a pool descriptor is a JSON text"):
        attach_pool(None)
    with pytest.raises(InvalidArgument, match="num_blocks is an integer, not '8'"):
        share_pool(LAYOUT, "8", path=tmp_path / "pool")
    with pytest.raises(InvalidArgument, match="device is a CPU or a CUDA device, not meta"):
        share_pool(LAYOUT, 8, "meta", path=tmp_path / "pool")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_pool_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "pool").write_text("letters")
    with pytest.raises(InvalidArgument, match="or is something else"):
        share_pool(LAYOUT, 8, path=tmp_path / "pool")
    assert (tmp_path / "pool").read_text() == "letters"
    with pytest.raises(InvalidArgument, match="No such file"):
        share_pool(LAYOUT, 8, path=tmp_path / "none" / "pool")


def test_a_pool_that_memory_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no room for .* bytes at"):
        share_pool(replace(LAYOUT, num_layers=2**20, head_dim=2**20), 2**16, path=tmp_path / "pool")
    assert not list(tmp_path.iterdir())


def test_a_forked_child_neither_owns_the_pool_nor_seems_to(tmp_path: Path) -> None:
    script = f"""
import os, sys
from radix_cache.torch_pool import *
layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
pool = share_pool(layout, 8, path={str(tmp_path / "pool")!r})
if os.fork() == 0:
    sys.exit()  # as a process ends, with finalizers
os.wait()
print(pool.is_owner_alive(), flush=True)
if os.fork() == 0:
    sys.stdin.read()  # lives on
    os._exit(0)
print(pool.descriptor.to_json(), flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "True\n"
        descriptor = PoolDescriptor.from_json(parent.stdout.readline())
        assert parent.wait(timeout=60) == -9
        deadline = time.monotonic() + 60
        while descriptor.is_owner_alive():  # until the child has had its first moment
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_descriptor_that_lies_is_refused(pool: SharedKVPool) -> None:
    with pytest.raises(InvalidArgument, match=r"has 8192 bytes, not 10240"):
        attach_pool(replace(pool.descriptor, num_blocks=12))
    said = json.loads(pool.descriptor.to_json())
    with pytest.raises(PoolGone, match="has ended"):
        attach_pool(json.dumps({**said, "pool_id": "f" * 32}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_others_may_not_open_it(pool: SharedKVPool) -> None:
    Path(pool.descriptor.path).chmod(0)
    with pytest.raises(InvalidArgument, match="Permission denied"):
        attach_pool(pool.descriptor)


def test_modes(pool: SharedKVPool, tmp_path: Path) -> None:
    assert Path(pool.descriptor.path).stat().st_mode & 0o777 == 0o600
    with share_pool(LAYOUT, 8, path=tmp_path / "other", mode=0o666) as other:
        assert Path(other.descriptor.path).stat().st_mode & 0o777 == 0o666, "whatever the umask"


def test_a_pool_is_never_pickled(pool: SharedKVPool) -> None:
    with pytest.raises(TypeError, match="travels as its descriptor"):
        pickle.dumps(pool)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_processes_share_a_gpu() -> None:
    with share_pool(LAYOUT, 8, device="cuda") as pool, running() as engine, running() as other:
        assert pool.descriptor.cuda is not None
        for each in (engine, other):  # one handle, several readers
            assert each.do(attach(pool)) == "False True"
        engine.do("pool.write(1, pool.slot_mapping([5], 0, 4), ones, 2 * ones); torch.cuda.synchronize(); print()")
        assert [plane.sum().item() for plane in pool.gather(1, [5], 4)] == [32, 64]
        engine.kill()
        pool.copy_blocks([5], [6])
        torch.cuda.synchronize()
        assert other.do("print(pool.gather(1, [6], 4)[1].sum().item(), flush=True)") == "64.0"
        assert pool.kv.sum().item() == 2 * 96
        assert attach_pool(pool.descriptor).kv.data_ptr() == pool.kv.data_ptr()  # in the owner's own process


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_dead_owner_on_a_gpu(tmp_path: Path) -> None:
    with running() as owner:
        made = (
            f"pool = share_pool(layout, 8, 'cuda', path={str(tmp_path / 'pool')!r}); print(pool.descriptor.to_json())"
        )
        pool = attach_pool(owner.do(made))
        pool.check_owner()
        owner.kill()
    with pytest.raises(PoolGone):
        pool.check_owner()
    with pytest.raises(PoolGone):
        attach_pool(pool.descriptor)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_that_is_not_here() -> None:
    with share_pool(LAYOUT, 8, device="cuda") as pool:
        handle = replace(pool.descriptor.cuda, device_uuid="GPU-of-another-machine")
        with pytest.raises(InvalidArgument, match="GPU-of-another-machine is not visible here"):
            attach_pool(replace(pool.descriptor, cuda=handle))
