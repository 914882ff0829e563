"""Hypothesis profiles, and the fixtures that several files share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell that runs us in the background has us ignore Ctrl-C, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("helpers", "model", "routes", "scenarios", "machine", "mirror")

from helpers import Clock  # noqa: E402 - its asserts are rewritten only if it comes after the line above
from routes import ROUTES, Caller, Route  # noqa: E402
from security_help import ALICE, BOB, ROOT, Tenant, give_back_all, tenant_of  # noqa: E402

from radix_cache_service import Client, Router  # noqa: E402

# The default keeps the whole suite at a few minutes on two cores; "long" is what `make fuzz` runs for about ten.
# How long an example takes to draw says how busy the machine is.
settings.register_profile(
    "default",
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    report_multiple_bugs=False,
)
settings.register_profile("long", parent=settings.get_profile("default"), max_examples=700, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session", autouse=True)
def patience() -> None:
    """Clients wait for longer than the 5 s of their default, unless a test says how long: a machine may stand still."""
    for make in (Client.__init__, Router.__init__):
        make.__defaults__ = tuple(60.0 if value == 5.0 else value for value in make.__defaults__ or ())


@pytest.fixture(scope="module", autouse=True)
def tidy() -> None:
    """Collect what the file before has left: not in a thread of this one, where gRPC's objects may end badly."""
    gc.collect()


@pytest.fixture
def clock() -> Clock:
    """A clock that stands still until the test moves it."""
    return Clock()


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder with the public traces."""
    folder = os.environ.get("RADIX_CACHE_TRACES")
    if not folder:
        pytest.skip("RADIX_CACHE_TRACES does not name the folder with the traces")
    if not Path(folder).is_dir():
        pytest.skip(f"RADIX_CACHE_TRACES is {folder!r}, which is no folder")
    return Path(folder)


@pytest.fixture(params=ROUTES, ids=lambda route: route.name)
def open_route(request: pytest.FixtureRequest) -> Iterator[Callable[..., Route]]:
    """A function that opens the route under test on a new cache: ``open_route(num_blocks=8, block_size=2)``.

    All that was opened is closed when the test ends.
    """
    opened: list[Route] = []

    def open_one(**config: object) -> Route:
        opened.append(request.param(**config))
        return opened[-1]

    yield open_one
    for route in reversed(opened):
        route.close()


@pytest.fixture
def cache(open_route: Callable[..., Route]) -> Caller:
    """A caller without an engine id, on a new cache of 8 blocks of 2 tokens, over the route under test."""
    return open_route(num_blocks=8, block_size=2).caller()


# Tenants of the server at the ``address`` of a file's own fixture, by the tokens of `security_help.ENTRIES`.


@pytest.fixture
def root(address: str) -> Iterator[Tenant]:
    """Who may do everything; what a test left behind goes when it ends."""
    with tenant_of(address, ROOT) as tenant:
        yield tenant
        give_back_all(tenant)


@pytest.fixture
def alice(address: str, root: Tenant) -> Iterator[Tenant]:
    """Who may do everything in her namespace."""
    with tenant_of(address, ALICE) as tenant:
        yield tenant


@pytest.fixture
def bob(address: str, root: Tenant) -> Iterator[Tenant]:
    """The same in another one."""
    with tenant_of(address, BOB) as tenant:
        yield tenant
