"""What the tests of tokens, TLS and limits share: token files, certificates, and stubs that carry a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from service_process import reason_of, stub_to

from radix_cache_service.pb import prefix_cache_pb2 as pb

DEADLINE_S = 60

ALICE, BOB, ROOT, READER = (f"{name}-0123456789abcdef" for name in ("alice", "bob", "root", "reader"))
MINE, THEIRS = ("m", "alice"), ("m", "bob")

ENTRIES = [
    {"name": "alice", "token": ALICE, "namespaces": [MINE], "rights": ["read", "write", "admin"]},
    {"name": "bob", "token": BOB, "namespaces": [THEIRS], "rights": ["read", "write", "admin"]},
    {"name": "root", "token": ROOT, "namespaces": [()], "rights": ["read", "write", "admin"]},
    {"name": "reader", "token": READER, "namespaces": [MINE], "rights": ["read"]},
]


def write_tokens(path: Path, entries: list[dict[str, Any]]) -> Path:
    """Write a token file in one step; readers see the old one or the new one."""
    lines: list[str] = []
    for entry in entries:
        lines += ["[[token]]", *(f"{key} = {_toml(value)}" for key, value in entry.items()), ""]
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines))
    new.replace(path)
    return path


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"'


class Tenant:
    """A stub whose calls carry a token and a deadline; ``tenant.Probe(request)`` returns the answer, or the list of
    answers of a stream.
    """

    def __init__(self, stub: Any, token: str | None) -> None:
        self.stub = stub
        self.metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        def call(request: Any) -> Any:
            answer = getattr(self.stub, method)(request, timeout=DEADLINE_S, metadata=self.metadata)
            return list(answer) if isinstance(answer, grpc.Call) and hasattr(answer, "__next__") else answer

        return call


@contextmanager
def tenant_of(address: str, token: str | None) -> Iterator[Tenant]:
    """Yield a tenant on a connection of its own."""
    with stub_to(address) as stub:
        yield Tenant(stub, token)


def give_back_all(root: Tenant) -> None:
    """Release every lease, and see that all blocks are free."""
    leases = [info.lease_id for part in root.ListLeases(pb.ListLeasesRequest()) for info in part.leases]
    releases = [pb.Operation(release=pb.ReleaseRequest(lease_id=lease_id)) for lease_id in leases]
    root.Batch(pb.BatchRequest(operations=releases))
    root.Reset(pb.ResetRequest())
    stats = root.GetStats(pb.GetStatsRequest())
    assert (stats.num_free_blocks, stats.num_leases) == (root.Describe(pb.DescribeRequest()).num_blocks, 0)


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Make a call that is refused; return the code, the reason and its numbers."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return reason_of(caught.value)


def said(call: Callable[[], Any]) -> tuple[str, ...]:
    """Make a call that is refused; return all that it says: the code, the text and the trailing metadata."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return str(error.code()), error.details(), *(f"{key}={value!r}" for key, value in error.trailing_metadata() or ())


class Issued:
    """A certificate, its key and who signed it, as PEM files that can be renewed."""

    def __init__(self, folder: Path, authority: Any, *names: str, common_name: str | None = None) -> None:
        self.certificate = folder / f"{names[0]}.pem"
        self.private_key = folder / f"{names[0]}.key"
        self._names = names
        self._common_name = common_name
        self.renew(authority)

    def renew(self, authority: Any, *, only_certificate: bool = False) -> None:
        """Write a new certificate, and its key."""
        issued = authority.issue_cert(*self._names, common_name=self._common_name)
        _replace(self.certificate, b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        if not only_certificate:
            _replace(self.private_key, issued.private_key_pem.bytes())


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(path.suffix + ".new")
    new.write_bytes(data)
    new.replace(path)


def root_of(folder: Path, name: str, authority: Any) -> Path:
    """Write whom to trust."""
    path = folder / f"{name}.ca"
    _replace(path, authority.cert_pem.bytes())
    return path
