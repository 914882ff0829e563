"""`machine.CacheMachine` over the wire, with the answers and the books of each client."""

from __future__ import annotations

import pytest
from hypothesis import settings
from machine import CacheMachine
from routes import OverAsyncio, OverSession, OverUnixSocket

pytestmark = pytest.mark.timeout(600)

# Each example starts a server.
FEWER = settings(max_examples=settings().max_examples // 5)


class ClientMachine(CacheMachine):
    """Over a unix socket."""

    route_class = OverUnixSocket


class AsyncClientMachine(CacheMachine):
    """With asyncio."""

    route_class = OverAsyncio


class SessionMachine(CacheMachine):
    """Over a stream."""

    route_class = OverSession


TestClientMachine = ClientMachine.TestCase
TestClientMachine.settings = FEWER
TestAsyncClientMachine = AsyncClientMachine.TestCase
TestAsyncClientMachine.settings = FEWER
TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = FEWER
