"""TLS and mTLS on TCP ports, certificates renewed while the server runs, and what the clients do with both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from client_help import wait_until
from security_help import ALICE, ENTRIES, MINE, Issued, root_of, write_tokens
from service_process import ServerProcess, StartFailed, stub_to

from radix_cache.errors import InvalidArgument, PermissionDenied, ServiceUnavailable, Unauthenticated
from radix_cache_service import AsyncClient, Client, Tls
from radix_cache_service.config import ServerConfig
from radix_cache_service.pb import prefix_cache_pb2 as pb

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def issued(tmp_path: Path, authority: trustme.CA) -> Issued:
    """The server's certificate."""
    return Issued(tmp_path, authority, HOST)


@pytest.fixture
def trusted(tmp_path: Path, authority: trustme.CA) -> Tls:
    return Tls(root_certificates=root_of(tmp_path, "root", authority))


def settings(issued: Issued, **more: Any) -> dict[str, Any]:
    return {"tls_certificate": issued.certificate, "tls_private_key": issued.private_key, **more}


def answers(address: str, tls: Tls | None, **more: Any) -> bool:
    """Tell whether the server answers on a new connection."""
    try:
        with Client(address, tls=tls, timeout_s=60, **more) as client:
            return client.probe([1, 2]) == 0
    except ServiceUnavailable:
        return False


# TLS.


def test_the_ports_speak_tls_and_the_socket_does_not(tmp_path: Path, issued: Issued, trusted: Tls) -> None:
    with ServerProcess(f"{HOST}:0", f"unix:{tmp_path}/s.sock", f"{HOST}:0", **settings(issued)) as server:
        port, path, other_port = server.addresses
        for address in (port, other_port):
            assert answers(address, trusted)
            assert not answers(address, None)
            assert not answers(address, Tls(root_certificates=root_of(tmp_path, "other", trustme.CA())))
        assert answers(path, None)
        assert stat.S_IMODE((tmp_path / "s.sock").stat().st_mode) == 0o660


def test_every_verb_over_tls(issued: Issued, trusted: Tls) -> None:
    with ServerProcess(**settings(issued)) as server, Client(server.address, "e", tls=trusted) as client:
        lease = client.match_prefix([1, 2, 3], num_tokens=4)
        client.insert(lease, [1, 2, 3])
        with client.session() as session:
            assert session.probe([1, 2]) == 2
        assert client.dump()[0].depth == 0


def test_the_asyncio_client_over_tls(issued: Issued, trusted: Tls) -> None:
    async def probe(address: str) -> int:
        async with AsyncClient(address, tls=trusted) as client:
            await client.match_prefix([1, 2], num_tokens=2)
            return await client.probe([1, 2])

    with ServerProcess(**settings(issued)) as server:
        assert asyncio.run(probe(server.address)) == 0


def test_handshakes_that_fail_leave_nothing_in_the_log_that_is_not_ours(
    tmp_path: Path, issued: Issued, trusted: Tls
) -> None:
    """gRPC writes such lines of its own, in no form that anybody asked for."""
    server = ServerProcess(**settings(issued, log_format="json", log_level="info"))
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        raw.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    assert not answers(server.address, Tls(root_certificates=root_of(tmp_path, "other", trustme.CA())))
    assert answers(server.address, trusted)
    status, errors = server.stop()
    assert status == 0
    assert all(json.loads(line)["level"] == "info" for line in errors.splitlines())


# Renewal.


def test_a_renewed_certificate_is_seen_by_new_connections_and_old_ones_go_on(
    tmp_path: Path, issued: Issued, trusted: Tls
) -> None:
    """By a certificate of another authority, which the first client would not trust. On each port."""
    with (
        ServerProcess(f"{HOST}:0", f"{HOST}:0", **settings(issued)) as server,
        Client(server.address, tls=trusted) as before,
    ):
        assert before.probe([1, 2]) == 0
        other = trustme.CA()
        issued.renew(other)
        for address in server.addresses:
            assert answers(address, Tls(root_certificates=root_of(tmp_path, "other", other)))
            assert not answers(address, trusted)
        assert before.probe([1, 2]) == 0


def test_a_certificate_without_its_key_leaves_the_old_one_in_force(
    authority: trustme.CA, issued: Issued, trusted: Tls
) -> None:
    """As between the two writes of a renewal; and as soon as the second is there, the new one counts."""
    server = ServerProcess(**settings(issued))
    other = trustme.CA()
    issued.renew(other, only_certificate=True)
    assert answers(server.address, trusted)
    assert answers(server.address, trusted)
    issued.certificate.unlink()
    assert answers(server.address, trusted)
    issued.renew(authority)
    assert answers(server.address, trusted)
    status, errors = server.stop()
    assert status == 0
    assert errors.count("stays in force") == 2
    assert "PRIVATE KEY" not in errors


# mTLS.


@pytest.fixture
def mutual(tmp_path: Path, authority: trustme.CA, issued: Issued) -> Iterator[ServerProcess]:
    """A server that asks for a certificate of the authority "clients"."""
    clients = trustme.CA()
    root_of(tmp_path, "clients", clients)
    Issued(tmp_path, clients, "engine-0.example")
    with ServerProcess(**settings(issued, tls_client_ca=tmp_path / "clients.ca")) as server:
        yield server


def shown(tmp_path: Path, name: str) -> Tls:
    """Trust the server, and show the certificate of this name."""
    return Tls(tmp_path / "root.ca", tmp_path / f"{name}.pem", tmp_path / f"{name}.key")


def test_only_clients_with_a_certificate_are_let_in(
    tmp_path: Path, authority: trustme.CA, mutual: ServerProcess, trusted: Tls
) -> None:
    assert answers(mutual.address, shown(tmp_path, "engine-0.example"))
    assert not answers(mutual.address, trusted)
    Issued(tmp_path, authority, "stranger.example")
    assert not answers(mutual.address, shown(tmp_path, "stranger.example"))


def test_the_clients_authority_is_renewed_as_well(tmp_path: Path, mutual: ServerProcess, trusted: Tls) -> None:
    assert answers(mutual.address, shown(tmp_path, "engine-0.example"))
    other = trustme.CA()
    root_of(tmp_path, "clients", other)
    wait_until(lambda: not answers(mutual.address, shown(tmp_path, "engine-0.example")))
    Issued(tmp_path, other, "engine-1.example")
    assert answers(mutual.address, shown(tmp_path, "engine-1.example"))


# Settings.


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tls_private_key": None}, "tls_certificate and tls_private_key go together"),
        ({"tls_certificate": None, "tls_private_key": None, "tls_client_ca": "x"}, "tls_client_ca with both"),
        ({"tls_certificate": "nowhere.pem"}, r"tls_certificate nowhere.pem .*No such file"),
        ({"tls_private_key": "other.key"}, r"tls_private_key .*other.key: key values mismatch"),
        ({"tls_certificate": "empty"}, "tls_certificate .*empty"),
        ({"tls_client_ca": "empty"}, r"tls_client_ca .*empty"),
    ],
)
def test_files_that_are_no_good_are_named(
    tmp_path: Path, authority: trustme.CA, issued: Issued, changes: dict[str, str | None], fault: str
) -> None:
    Issued(tmp_path, authority, "other")
    (tmp_path / "empty").touch()
    named = {
        key: str(tmp_path / value) if value and (tmp_path / value).exists() else value for key, value in changes.items()
    }
    given = {key: str(value) for key, value in settings(issued).items()} | named
    with pytest.raises(InvalidArgument, match=fault):
        ServerConfig(num_blocks=8, **given)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path, issued: Issued) -> None:
    from cryptography.hazmat.primitives import serialization

    key: Any = serialization.load_pem_private_key(issued.private_key.read_bytes(), None)
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    issued.private_key.write_bytes(key.private_bytes(*pem, serialization.BestAvailableEncryption(b"secret")))
    with pytest.raises(InvalidArgument, match=r"tls_private_key .*\.key: "):
        ServerConfig(num_blocks=8, **{key: str(value) for key, value in settings(issued).items()})


def test_a_server_does_not_start_without_its_certificate(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="tls_certificate") as caught:
        ServerProcess(tls_certificate=tmp_path / "nowhere", tls_private_key=tmp_path / "nowhere")
    assert "Traceback" not in caught.value.errors


# Tokens from the client's side.


def test_clients_show_a_token_in_every_call(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    with ServerProcess(tokens_file=path, lease_ttl_s=600) as server:
        with Client(server.address, "engine-0", token=lambda: ALICE) as client:
            lease = client.match_prefix([1, 2, 3], MINE, num_tokens=4)
            client.insert(lease, [1, 2])
            with client.session() as session:
                assert session.probe([1, 2], MINE) == 2
            with client.batch() as batch:
                probed = batch.probe([1, 2], MINE)
                foreign = batch.probe([1, 2])
            assert probed.result() == 2
            with pytest.raises(PermissionDenied):
                foreign.result()
            client.heartbeat()
            assert [node.namespace for node in client.dump()] == [MINE, MINE]
            assert ALICE not in repr(client)
            with pytest.raises(PermissionDenied, match="concerns all namespaces") as caught:
                client.stats()
            assert isinstance(caught.value, PermissionError)
            assert isinstance(client.probe([1, 2], MINE), int)
        asyncio.run(_probed_by_asyncio(server.address))
        for token in (None, "nobody-0123456789abcdef"):
            with Client(server.address, token=token) as nobody, pytest.raises(Unauthenticated) as refused:
                nobody.probe([1, 2], MINE)
            assert isinstance(refused.value, PermissionError)
        with Client(server.address, token="root-0123456789abcdef") as root:
            assert root.stats().num_leases == 0, "the clients gave theirs back when they closed"


async def _probed_by_asyncio(address: str) -> None:
    async with AsyncClient(address, "engine-1", token=ALICE) as client:
        lease = await client.match_prefix([1, 2, 3], MINE, num_tokens=4)
        async with client.batch() as batch:
            probed = batch.probe([1, 2], MINE)
            renewed = batch.renew(lease)
        assert (probed.result(), renewed.result()) == (2, None)
        assert len(await client.dump(MINE)) == 2


def test_a_session_whose_token_was_withdrawn_goes_on_with_the_next(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    token = [ALICE]
    renewed = {**ENTRIES[0], "token": "alice-new-0123456789"}
    with (
        ServerProcess(tokens_file=path) as server,
        Client(server.address, token=lambda: token[0]) as client,
        client.session() as session,
    ):
        assert session.probe([1, 2], MINE) == 0
        write_tokens(path, [renewed])
        wait_until(lambda: _is_refused(client))
        with pytest.raises(Unauthenticated):
            session.probe([1, 2], MINE)
        token[0] = renewed["token"]
        assert session.probe([1, 2], MINE) == 0


def _is_refused(client: Client) -> bool:
    try:
        client.probe([1, 2], MINE)
    except Unauthenticated:
        return True
    return False


@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_a_token_does_not_leave_the_machine_in_the_clear(make: Any, trusted: Tls) -> None:
    for target in ("10.0.0.1:50051", "cache.internal:50051", "dns:///localhost:1", "ipv4:10.0.0.1:1"):
        with pytest.raises(InvalidArgument, match="in the clear: use tls, or set allow_plaintext_token"):
            make(target, token=ALICE)
        make(target, token=ALICE, allow_plaintext_token=True)
        make(target, token=ALICE, tls=trusted)
    for target in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/x.sock"):
        make(target, token=ALICE)


def test_settings_of_a_client_that_cannot_work(tmp_path: Path, trusted: Tls) -> None:
    with pytest.raises(InvalidArgument, match="go together"):
        Client(f"{HOST}:1", tls=Tls(certificate=tmp_path / "x"))
    with pytest.raises(InvalidArgument, match=r"root_certificates .*x: No such file"):
        Client(f"{HOST}:1", tls=Tls(root_certificates=tmp_path / "x"))
    with pytest.raises(InvalidArgument, match="give one of them"):
        Client(f"{HOST}:1", tls=trusted, channel_credentials=grpc.ssl_channel_credentials())
    for token in ("short", "with a space in the middle", "line\nbreak-0123456789", "ümlaut-0123456789", 5, b"x" * 20):
        with pytest.raises(InvalidArgument) as caught:
            Client(f"{HOST}:1", token=token)  # type: ignore[arg-type]
        assert not isinstance(token, str) or token not in str(caught.value)


def test_a_raw_stub_over_tls_and_with_a_token(tmp_path: Path, issued: Issued, trusted: Tls) -> None:
    """As another language would call: gRPC's own credentials carry the token."""
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    with ServerProcess(**settings(issued, tokens_file=path)) as server:
        both = grpc.composite_channel_credentials(trusted.credentials(), grpc.access_token_call_credentials(ALICE))
        from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

        with grpc.secure_channel(server.address, both) as channel:
            stub = pb_grpc.PrefixCacheServiceStub(channel)
            assert stub.Probe(pb.ProbeRequest(namespace=MINE), timeout=60).num_cached_tokens == 0
        with stub_to(server.address) as plain, pytest.raises(grpc.RpcError) as caught:
            plain.Probe(pb.ProbeRequest(namespace=MINE), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
