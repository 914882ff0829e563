"""The settings of events: what goes together, what would show prompts, and what starting and ending comes to."""

from __future__ import annotations

import signal
import socket

import pytest
from service_process import ServerProcess, StartFailed

from radix_cache.errors import InvalidArgument
from radix_cache_service import ServerConfig
from radix_cache_service.events import settings as event_settings
from radix_cache_service.events.settings import replay_address_of


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"events_format": "json"}, "events_format is one of map, array, not 'json'"),
        ({"events_replay_listen": "127.0.0.1:1"}, "events_replay_listen goes with events_listen"),
        ({"events_listen": "5557"}, "events_listen: '5557' is not host:port"),
        ({"events_listen": "127.0.0.1:0", "events_replay_listen": "x"}, "events_replay_listen: 'x' is not host:port"),
        ({"events_listen": "0.0.0.0:5557"}, "0.0.0.0:5557 in the clear"),
        ({"events_listen": "127.0.0.1:1", "events_replay_listen": "[::]:1"}, r"\[::\]:1 in the clear"),
        ({"events_listen": "127.0.0.1:65000"}, "set events_replay_listen"),
        ({"events_rank": -1}, "events_rank"),
        ({"max_queued_events": 0}, "max_queued_events"),
        ({"max_kept_events": 2**24 + 1}, "max_kept_events"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        ServerConfig(**settings)  # type: ignore[arg-type]


def test_where_what_was_missed_is_sent_again() -> None:
    assert replay_address_of(ServerConfig(events_listen="127.0.0.1:5557")) == "127.0.0.1:6557"
    assert replay_address_of(ServerConfig(events_listen="127.0.0.1:0")) == "127.0.0.1:0"
    config = ServerConfig(events_listen="0.0.0.0:5557", events_replay_listen="[::]:1", allow_plaintext_events=True)
    assert replay_address_of(config) == "[::]:1"


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(event_settings, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(InvalidArgument, match=r"radix-cache\[service,events\]"):
        ServerConfig(events_listen="127.0.0.1:5557")
    ServerConfig(events=True)


def test_a_taken_port_ends_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartFailed) as failed:
            ServerProcess(events_listen=address, events_replay_listen="127.0.0.1:0")
    assert failed.value.status == 1
    assert f"cannot publish events at {address} and 127.0.0.1:0" in failed.value.errors


def test_a_server_that_publishes_ends_in_good_order() -> None:
    server = ServerProcess(events_listen="127.0.0.1:0", events_replay_listen="localhost:0")
    assert server.stop(signal.SIGTERM) == (0, "")
