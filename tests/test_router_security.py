"""Who may ask a router for what, and how it shows its nodes who it is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from client_help import wait_until
from helpers import cached
from security_help import ALICE, BOB, ENTRIES, MINE, READER, ROOT, THEIRS, Issued, root_of, write_tokens
from service_process import RouterProcess, ServerProcess

from radix_cache.errors import InvalidArgument, LimitExceeded, PermissionDenied, Unauthenticated
from radix_cache_service import Client, Router, Tls
from radix_cache_service.pb import router_pb2 as pb
from radix_cache_service.pb import router_pb2_grpc as pb_grpc

if find_spec("dynamo") is None:
    pytest.skip("ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'", allow_module_level=True)

from radix_cache_service.router.servicer import RULES

PROMPT = list(range(8))
NODE: dict[str, Any] = {"events_listen": "127.0.0.1:0"}


def test_every_method_has_a_rule() -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["RouterService"].methods}
    assert methods == RULES.keys() - {"ServerReflectionInfo"}


def test_a_token_says_who_may_ask_for_what(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    with ServerProcess(**NODE) as node, RouterProcess(node=f"a={node.address}", tokens_file=tokens) as process:
        with Router(process.address, token=ALICE) as alice:
            assert alice.route(PROMPT, MINE, "r").node == "a"
            with pytest.raises(PermissionDenied, match="may not use this namespace"):
                alice.route(PROMPT, THEIRS)
            with pytest.raises(PermissionDenied, match="AddNode concerns all namespaces"):
                alice.add_node("b", node.address)
            with pytest.raises(PermissionDenied):
                alice.nodes()
        with Router(process.address, token=READER) as reader:
            reader.route(PROMPT, MINE).finish()
            with pytest.raises(PermissionDenied, match="RemoveNode needs the right 'admin'"):
                reader.remove_node("a")
            reader.finish("r")  # of another token's requests, none is known
        with Router(process.address, token=ROOT) as root:
            assert [(info.node, info.num_requests) for info in root.nodes()] == [("a", 1)]
            root.remove_node("a")
        with Router(process.address, token=BOB[::-1]) as nobody, pytest.raises(Unauthenticated):
            nobody.route(PROMPT, MINE)
        with grpc.insecure_channel(process.address) as channel:
            stub = pb_grpc.RouterServiceStub(channel)
            for method in RULES.keys() - {"ServerReflectionInfo"}:
                with pytest.raises(grpc.RpcError) as caught:
                    getattr(stub, method)(getattr(pb, f"{method}Request")())
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED, method


def test_tls_and_a_token_on_both_sides(tmp_path: Path) -> None:
    authority = trustme.CA()
    root = root_of(tmp_path, "root", authority)
    issued = Issued(tmp_path, authority, "127.0.0.1")
    tls = {"tls_certificate": issued.certificate, "tls_private_key": issued.private_key}
    tokens = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    token = tmp_path / "token"
    token.write_text(ROOT)
    trusting = Tls(root_certificates=root)
    with ServerProcess(**NODE, **tls, tokens_file=tokens) as node:
        shown = {"node": f"a={node.address}", "node_tls_ca": root, "node_token_file": token}
        with RouterProcess(**shown, **tls, tokens_file=tokens) as process:
            with Client(node.address, tls=trusting, token=ROOT) as client:
                cached(client, PROMPT, MINE)
            with Router(process.address, tls=trusting, token=ALICE) as router:
                wait_until(lambda: router.route(PROMPT, MINE, peek=True).num_cached_tokens == 8, 60)
        token.write_text(ALICE)
        with RouterProcess(**shown) as process, Router(process.address) as router:
            (info,) = router.nodes()
            assert (info.state, "a token that may read them" in info.reason) == ("refused", True)
        with RouterProcess(node=f"a={node.address}", node_tls_ca=root) as process, Router(process.address) as router:
            (info,) = router.nodes()
            assert (info.state, info.reason) == (
                "down",
                "a token is needed here, as in authorization: Bearer TOKEN",
            )


def test_files_for_nodes_are_read_anew(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    root, wrong = root_of(tmp_path, "root", authority), root_of(tmp_path, "wrong", other)
    issued = Issued(tmp_path, authority, "127.0.0.1")
    tls = {"tls_certificate": issued.certificate, "tls_private_key": issued.private_key}
    tokens = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    token, trusted = tmp_path / "token", tmp_path / "trusted"
    token.write_text(BOB)
    trusted.write_bytes(Path(wrong).read_bytes())

    def state() -> str:
        (info,) = router.nodes()
        return info.state

    with (
        ServerProcess(**NODE, **tls, tokens_file=tokens) as node,
        RouterProcess(node=f"a={node.address}", node_tls_ca=trusted, node_token_file=token, heartbeat=4) as process,
        Router(process.address) as router,
    ):
        wait_until(lambda: state() == "down", 60)
        trusted.write_bytes(Path(root).read_bytes())
        wait_until(lambda: state() == "refused", 60)
        token.unlink()
        wait_until(lambda: process.has_logged("were not read anew"), 60)
        assert state() != "serving"
        token.write_text(ROOT)
        wait_until(lambda: state() == "serving", 60)


def test_a_node_that_is_not_trusted_fills_no_log(tmp_path: Path) -> None:
    issued = Issued(tmp_path, trustme.CA(), "127.0.0.1")
    wrong = root_of(tmp_path, "wrong", trustme.CA())
    tls = {"tls_certificate": issued.certificate, "tls_private_key": issued.private_key}
    with ServerProcess(**NODE, **tls) as node:
        process = RouterProcess(node=f"a={node.address}", node_tls_ca=wrong, log_level="error")
        with Router(process.address) as router:
            (info,) = router.nodes()
        assert (info.state, "handshake failed" in info.reason) == ("down", True)
        assert process.stop() == (0, "")


def test_each_token_has_its_share_of_requests(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    with (
        ServerProcess(**NODE) as node,
        RouterProcess(node=f"a={node.address}", tokens_file=tokens, max_requests=2) as process,
        Router(process.address, token=lambda: ALICE) as alice,
        Router(process.address, token=READER) as reader,
    ):
        for number in range(2):
            alice.route(PROMPT, MINE, f"r{number}")
        with pytest.raises(LimitExceeded, match="max_requests"):
            alice.route(PROMPT, MINE)
        reader.route(PROMPT, MINE, "r0")
        alice.finish("r0")
        alice.route(PROMPT, MINE)
        reader.route(PROMPT, MINE)


def test_a_token_is_not_sent_in_the_clear_unless_that_is_said() -> None:
    with pytest.raises(InvalidArgument, match="would go to router:50050 in the clear"):
        Router("router:50050", token=ALICE)
    Router("router:50050", token=ALICE, allow_plaintext_token=True).close()
