"""Nothing of a prompt, and no bearer token, in logs, status texts, trailing metadata, statistics or metrics."""

from __future__ import annotations

import struct
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faulty
import grpc
import pytest
from security_help import DEADLINE_S, Tenant, tenant_of, write_tokens
from service_process import ServerProcess, pack

from radix_cache_service.pb import prefix_cache_pb2 as pb

SECRET_IDS = (3_735_928_559, 2_882_400_001, 3_405_691_582)
SECRET_TEXT = "mark-of-the-tenant"
BEARER = "mark-of-the-bearer-0123456789"
NAMESPACE = (f"{SECRET_TEXT}-1", f"{SECRET_TEXT}-2")
TOKENS = pack(*SECRET_IDS, *SECRET_IDS)

TRACES = [
    *(str(token) for token in SECRET_IDS),
    *(f"{token:x}" for token in SECRET_IDS),
    *(struct.pack("<I", token).decode("latin-1") for token in SECRET_IDS),
    *(repr(struct.pack("<I", token))[2:-1] for token in SECRET_IDS),
    SECRET_TEXT,
    "mark-of-the-bearer",
]


def opens(lease_id: str, **more: Any) -> pb.MatchPrefixRequest:
    return pb.MatchPrefixRequest(**{"tokens": TOKENS, "namespace": NAMESPACE, "lease_id": lease_id, **more})


def faults() -> Iterator[tuple[str, Any]]:
    """Yield calls that are wrong in every way that there is a word for, and some that meet a bug."""
    yield "MatchPrefix", opens("a", num_tokens=6)
    yield "Insert", pb.InsertRequest(lease_id="a", tokens=TOKENS)
    yield "Insert", pb.InsertRequest(lease_id="a", tokens=pack(*SECRET_IDS[::-1]))
    yield "Insert", pb.InsertRequest(lease_id="a", tokens=TOKENS[:-1])
    yield "Insert", pb.InsertRequest(lease_id="a", tokens=TOKENS, offset=5)
    yield "Insert", pb.InsertRequest(lease_id="a", tokens=TOKENS * 4)
    yield "Insert", pb.InsertRequest(lease_id="nobody's", tokens=TOKENS)
    yield "MatchPrefix", opens("a", num_tokens=4)
    yield "MatchPrefix", opens("b", tokens=TOKENS + b"x")
    yield "MatchPrefix", opens("b", tokens=b"", token_ids=SECRET_IDS * 300)
    yield "MatchPrefix", opens("b", num_tokens=200)
    yield "MatchPrefix", opens("b", num_tokens=2**60)
    yield "MatchPrefix", opens("b", namespace=NAMESPACE * 20)
    yield "MatchPrefix", opens("b", namespace=[SECRET_TEXT * 100])
    yield "MatchPrefix", opens("b", parent_lease_id="a", namespace=[*NAMESPACE, "other"])
    yield "MatchPrefix", opens("b", parent_lease_id="a", max_tokens=1)
    yield "MatchPrefix", opens("b", parent_lease_id="nobody's")
    yield "MatchPrefix", opens("b" * 300)
    yield "MatchPrefix", opens("b", pin_s=-1.0)
    yield "MatchPrefix", opens("b", hints=pb.Hints(conversation=SECRET_TEXT * 20))
    yield "MatchPrefix", opens("b", hints=pb.Hints(priority=2**40, conversation=SECRET_TEXT))
    yield "MatchPrefix", opens("b", num_blocks=64, wait=True)
    yield "Probe", pb.ProbeRequest(tokens=TOKENS[1:], namespace=NAMESPACE)
    yield "Probe", pb.ProbeRequest(tokens=TOKENS, namespace=NAMESPACE * 20)
    yield "Reset", pb.ResetRequest(tokens=TOKENS[:4], namespace=NAMESPACE)
    yield "DumpTree", pb.DumpTreeRequest(namespace=NAMESPACE * 20)
    yield "Free", pb.FreeRequest(lease_id="a", block_ids=[99])
    yield "Allocate", pb.AllocateRequest(lease_id="a", num_blocks=64)
    yield "Reset", pb.ResetRequest(namespace=NAMESPACE)
    yield "Insert", pb.InsertRequest(lease_id="a", tokens=TOKENS)
    yield "MatchPrefix", opens("c", num_tokens=8)
    yield "Insert", pb.InsertRequest(lease_id="c", tokens=pack(faulty.RAISES, *SECRET_IDS))
    yield "Release", pb.ReleaseRequest(lease_id="c")
    yield "Evict", pb.EvictRequest(num_blocks=1)
    yield "Reset", pb.ResetRequest()
    yield "MatchPrefix", opens("d", num_tokens=8)
    yield "Insert", pb.InsertRequest(lease_id="d", tokens=pack(faulty.CANCELS, *SECRET_IDS))
    yield "Release", pb.ReleaseRequest(lease_id="d")
    yield "Evict", pb.EvictRequest(num_blocks=1)


FIELDS = {"MatchPrefix": "match_prefix", "Insert": "insert", "Free": "free", "Allocate": "allocate", "Probe": "probe"}


def in_a_batch() -> pb.BatchRequest:
    """Return those that can be in a batch, once more."""
    items = [pb.Operation(**{FIELDS[method]: request}) for method, request in faults() if method in FIELDS]
    return pb.BatchRequest(operations=[item for item in items if not item.match_prefix.wait])


def told(call: Callable[[], Any]) -> str:
    """Make a call; return all that is said if it fails."""
    try:
        call()
    except grpc.RpcError as error:
        found: Any = error
        trailers = [(key, value) for key, value in found.trailing_metadata() or ()]
        texts = [value.decode("latin-1") if isinstance(value, bytes) else value for _, value in trailers]
        return " ".join([found.details(), repr(trailers), *texts, str(found)])
    return ""


def drive(tenant: Tenant) -> list[str]:
    """Make all the faulty calls; return what was said to each."""
    said = [told(lambda m=method, r=request: getattr(tenant, m)(r)) for method, request in faults()]
    said += [shown(result.error) for result in tenant.Batch(in_a_batch()).results]
    batches = [in_a_batch(), pb.BatchRequest(operations=in_a_batch().operations, engine_id="e", seq=9)]
    batches.append(pb.BatchRequest(operations=in_a_batch().operations, engine_id="e", seq=8))
    messages = iter([pb.SessionRequest(batch=batch) for batch in batches])
    for answer in tenant.stub.Session(messages, timeout=DEADLINE_S, metadata=tenant.metadata):
        said += [shown(error) for error in (*(result.error for result in answer.batch.results), answer.error)]
    return said


def shown(status: Any) -> str:
    return str(status) + status.SerializeToString().decode("latin-1")


def raw_calls(address: str) -> list[str]:
    """Send bytes that are no message, with the secrets in them; and wrong tokens. Return what was said."""
    said = []
    with grpc.insecure_channel(address) as channel:
        for method in ("Probe", "Batch", "MatchPrefix"):
            call = channel.unary_unary(f"/radixcache.v1.PrefixCacheService/{method}")
            garbage = b"\xff\xff\xff" + TOKENS + SECRET_TEXT.encode()
            for token in (BEARER, BEARER + "x"):
                metadata = (("authorization", f"Bearer {token}"),)
                said.append(told(lambda c=call, g=garbage, m=metadata: c(g, timeout=DEADLINE_S, metadata=m)))
    assert all(said)
    return said


def assert_clean(text: str, where: str) -> None:
    assert [trace for trace in TRACES if trace in text] == [], where


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nothing_of_a_prompt_gets_out(tmp_path: Path, log_format: str) -> None:
    entry = {"name": "tenant", "token": BEARER, "namespaces": [()], "rights": ["read", "write", "admin"]}
    settings = {
        "num_blocks": 32,
        "policy": "faulty:Faulty",
        "max_tokens": 100,
        "max_operations": 100,
        "log_level": "debug",
        "log_format": log_format,
        "metrics_listen": "127.0.0.1:0",
        "tokens_file": write_tokens(tmp_path / "tokens.toml", [entry]),
    }
    server = ServerProcess(**settings)
    with tenant_of(server.address, BEARER) as tenant:
        said = [*drive(tenant), *raw_calls(server.address)]
        stats = tenant.GetStats(pb.GetStatsRequest())
        described = tenant.Describe(pb.DescribeRequest())
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=DEADLINE_S) as answer:
        metrics = answer.read().decode()
    server.process.terminate()
    _, errors = server.finish()
    for text in filter(None, said):
        assert_clean(text, text)
    assert len([text for text in said if text]) > 60
    assert_clean(str(stats) + str(described), "stats")
    assert_clean(metrics, "metrics")
    assert "ValueError" in errors
    assert_clean(errors, errors)


def test_the_traces_would_be_found() -> None:
    """In each of the forms in which an error could quote them."""
    for text in (str(SECRET_IDS), repr(TOKENS), str(list(SECRET_IDS)), TOKENS.decode("latin-1"), TOKENS[::-1].hex()):
        with pytest.raises(AssertionError):
            assert_clean(text, "")
