"""Events over ZeroMQ with keys: who has the right ones reads, nobody else gets anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq
from helpers import cached
from zmq.auth import create_certificates, load_certificate
from zmq.utils.monitor import recv_monitor_message

from radix_cache.errors import InvalidArgument
from radix_cache_service import ServerConfig
from radix_cache_service.events.curve import read_curve
from radix_cache_service.events.service import EventService

ANY = "127.0.0.1:0"
WAIT_MS = 60_000
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
ENDED = REFUSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class Keys(NamedTuple):
    """What is in a directory of certificates, one for each name."""

    path: Path

    def make(self, name: str) -> Path:
        """Make a certificate; return the file with its secret key."""
        return Path(create_certificates(self.path, name)[1])

    def read(self, name: str) -> tuple[bytes, bytes]:
        """Return its public and secret key."""
        public, secret = load_certificate(self.path / f"{name}.key_secret")
        assert secret is not None
        return public, secret


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Certificates of a server, of a reader, and of somebody else; the reader's public one is where it has to be."""
    made = Keys(tmp_path)
    for name in ("server", "reader", "other"):
        made.make(name)
    (tmp_path / "readers").mkdir()
    shutil.copy(tmp_path / "reader.key", tmp_path / "readers")
    return made


class Peers:
    """Sockets of others. They are kept until all are closed."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def connect(
        self, kind: int, address: str, server: bytes | None, own: tuple[bytes, bytes]
    ) -> tuple[zmq.Socket[bytes], bool]:
        """Return a socket whose handshake is over, and whether it went well. server: its key; None: no keys at all."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        if server is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own[0])
            socket.setsockopt(zmq.CURVE_SECRETKEY, own[1])
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = socket.get_monitor_socket(ENDED)
        self._sockets.append(monitor)
        socket.connect(f"tcp://{address}")
        assert monitor.poll(WAIT_MS)
        event = recv_monitor_message(monitor)["event"]
        socket.disable_monitor()
        return socket, event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def peers() -> Iterator[Peers]:
    """Those on the other side."""
    made = Peers()
    yield made
    made.close()


class Published:
    """A cache whose events are published by the settings."""

    def __init__(self, **settings: str | None) -> None:
        config = ServerConfig(num_blocks=64, block_size=2, events_listen=ANY, **settings)  # type: ignore[arg-type]
        self.cache = config.make_cache()
        self.service = EventService(config, self.cache)
        self.service.start()

    def __enter__(self) -> Published:
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()


def asked(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Ask for all that was; return the first message of the answer, None if there is none."""
    socket.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
    return socket.recv_multipart() if socket.poll(WAIT_MS) else None


@pytest.mark.parametrize("readers_dir", [True, False], ids=["listed", "anybody"])
def test_the_right_keys_read_both_ports(keys: Keys, peers: Peers, readers_dir: bool) -> None:
    listed = str(keys.path / "readers") if readers_dir else None
    public, _ = keys.read("server")
    with Published(events_key_file=str(keys.path / "server.key_secret"), events_readers_dir=listed) as published:
        cached(published.cache, [1, 2])
        address, replay_address = published.service.addresses
        reader, is_in = peers.connect(zmq.SUB, address, public, keys.read("reader"))
        assert is_in
        assert reader.poll(WAIT_MS)
        assert len(reader.recv_multipart()) == 3
        asker, is_in = peers.connect(zmq.DEALER, replay_address, public, keys.read("reader"))
        assert is_in
        answer = asked(asker)
        assert answer is not None
        assert b"BlockStored" in answer[-1]


@pytest.mark.parametrize("port", [0, 1], ids=["published", "missed"])
@pytest.mark.parametrize("how", ["no keys", "another server's key", "not listed"])
def test_nobody_else_gets_anything(keys: Keys, peers: Peers, port: int, how: str) -> None:
    server = {"no keys": None, "another server's key": keys.read("other")[0], "not listed": keys.read("server")[0]}[how]
    own = keys.read("other" if how == "not listed" else "reader")
    settings = {"events_key_file": f"{keys.path}/server.key_secret", "events_readers_dir": f"{keys.path}/readers"}
    with Published(**settings) as published:
        address = published.service.addresses[port]
        socket, is_in = peers.connect((zmq.SUB, zmq.DEALER)[port], address, server, own)
        assert not is_in
        stream = published.service.stream
        assert stream is not None
        cached(published.cache, [1, 2])
        good, is_in = peers.connect(
            zmq.SUB, published.service.addresses[0], keys.read("server")[0], keys.read("reader")
        )
        assert is_in
        assert good.poll(WAIT_MS)
        assert not socket.poll(0)
        assert stream.figures().num_replays == 0


def test_who_is_taken_off_the_list_is_not_let_in_again(
    keys: Keys, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    public, _ = keys.read("server")
    readers = keys.path / "readers"
    settings = {"events_key_file": f"{keys.path}/server.key_secret", "events_readers_dir": str(readers)}
    with Published(**settings) as published:
        address = published.service.addresses[0]
        for is_listed, change in (
            (True, lambda: None),
            (False, (readers / "reader.key").unlink),
            (True, lambda: shutil.copy(keys.path / "reader.key", readers)),
            (False, lambda: (readers / "bad.key").write_text("nothing")),
        ):
            change()
            _, is_in = peers.connect(zmq.SUB, address, public, keys.read("reader"))
            assert is_in == is_listed
    assert any("events_readers_dir can't be read" in record.getMessage() for record in caplog.records)


def test_keys_make_a_network_good_enough(keys: Keys) -> None:
    ServerConfig(events_listen="0.0.0.0:5557", events_key_file=f"{keys.path}/server.key_secret")


@pytest.mark.parametrize("how", ["missing", "public only", "not a pair", "no keys", "no text"])
def test_a_bad_key_file_is_refused_by_name_and_shows_nothing(keys: Keys, how: str) -> None:
    path = keys.path / "bad"
    secret = keys.read("server")[1].decode()
    text = (keys.path / "server.key_secret").read_text()
    content = {
        "public only": (keys.path / "server.key").read_bytes(),
        "not a pair": text.replace(secret, keys.read("other")[1].decode()).encode(),
        "no keys": b"nothing",
        "no text": text.replace(secret, "\x00\xff" + secret[2:]).encode("latin-1"),
    }
    if how in content:
        path.write_bytes(content[how])
    with pytest.raises(InvalidArgument, match=r"events_key_file .*/bad") as caught:
        ServerConfig(events_listen=ANY, events_key_file=str(path))
    assert secret[3:] not in str(caught.value)


def test_a_bad_list_of_readers_is_refused_by_name(keys: Keys) -> None:
    with pytest.raises(InvalidArgument, match=r"events_readers_dir: .*/nowhere"):
        read_curve(f"{keys.path}/server.key_secret", f"{keys.path}/nowhere")


def test_without_keys_there_is_no_list(keys: Keys) -> None:
    with pytest.raises(InvalidArgument, match="events_readers_dir goes with events_key_file"):
        ServerConfig(events_listen=ANY, events_readers_dir=str(keys.path))
    with pytest.raises(InvalidArgument, match=r"events_key_file goes with events_listen"):
        ServerConfig(events_key_file=str(keys.path))
