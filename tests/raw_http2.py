"""What hypothesis sends over a bare socket to a server of HTTP/2: frames in any order, cut off, too long, or no frames.

The parts of a proper call are among them, so that some calls get through, whole or in pieces.
"""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import strategies as st
from raw_port import LEASE_IDS
from service_process import pack

from radix_cache_service.pb import prefix_cache_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/radixcache.v1.PrefixCacheService/"
DATA, HEADERS, SETTINGS = 0, 1, 4
NUM_KINDS = 12  # of frames; from 10 on there are none
END_STREAM, END_HEADERS = 1, 4

Headers = list[tuple[str, str]]


def frame(kind: int, flags: int, stream: int, body: bytes, length: int | None = None) -> bytes:
    """Return a frame as it is on the wire; ``length``: what it claims to be."""
    claimed = len(body) if length is None else length
    return struct.pack(">I", claimed)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def headers_of(method: str) -> Headers:
    """Return the headers of a call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", SERVICE + method),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]


def headers_frame(headers: Headers, stream: int = 1, flags: int = 0) -> bytes:
    """Return a frame that opens a stream, each header written out in full."""
    block = b"".join(b"\x10" + _string(name) + _string(value) for name, value in headers)
    return frame(HEADERS, END_HEADERS | flags, stream, block)


def _string(text: str) -> bytes:
    """Return a string as HPACK has it, without Huffman's code: its length in 7 bits, or more."""
    data = text.encode()
    left = len(data) - 127
    if left < 0:
        return bytes([len(data)]) + data
    length = bytearray([127])
    while left > 127:
        length.append(left % 128 + 128)
        left //= 128
    return bytes(length) + bytes([left]) + data


def message(data: bytes, flag: int = 0, length: int | None = None) -> bytes:
    """Return a message as gRPC frames it; ``length``: what it claims to be."""
    return struct.pack(">BI", flag, len(data) if length is None else length) + data


def data_frame(data: bytes, stream: int = 1, flags: int = 0) -> bytes:
    """Return a frame with a piece of a stream."""
    return frame(DATA, flags, stream, data)


HELLO = PREFACE + frame(SETTINGS, 0, 0, b"")


def call(method: str, request: Any, stream: int = 1) -> bytes:
    """Return the frames of a whole call."""
    sent = message(request.SerializeToString())
    return headers_frame(headers_of(method), stream) + data_frame(sent, stream, END_STREAM)


def match(lease_id: str) -> pb.MatchPrefixRequest:
    """Return a request that opens a lease."""
    return pb.MatchPrefixRequest(lease_id=lease_id, tokens=pack(0, 1, 1, 0), num_tokens=4)


# What hypothesis draws.

_streams = st.sampled_from([1, 1, 1, 3, 5, 0, 2, 2**31 - 1])
_methods = st.sampled_from(["MatchPrefix", "MatchPrefix", "Session", "Probe", "Release", "Nothing", "", "é"])
_odd_headers = st.sampled_from(
    [
        (":path", "no slash"),
        (":method", "GET"),
        (":status", "200"),
        ("te", ""),
        ("content-type", "text/html"),
        ("content-type", "application/grpc+json"),
        ("grpc-encoding", "gzip"),
        ("grpc-encoding", "nonsense"),
        ("grpc-timeout", "0n"),
        ("grpc-timeout", "99999999H"),
        ("grpc-timeout", "-1S"),
        ("grpc-timeout", "soon"),
        ("content-length", "3"),
        ("connection", "keep-alive"),
        ("Upper-Case", "x"),
        ("x-bin", "!"),
        ("x", "\r\nx: y"),
        ("x", "x" * 20_000),
    ]
)


@st.composite
def _headers(draw: st.DrawFn) -> Headers:
    """The headers of a call, perhaps with one left out, in another order, or with odd ones."""
    drawn = headers_of(draw(_methods))
    if draw(st.booleans()):
        drawn += draw(st.lists(_odd_headers, max_size=2))
    if draw(st.integers(0, 4)) == 4:
        drawn = draw(st.permutations(drawn))[draw(st.integers(0, 1)) :]
    return drawn


_ends = st.sampled_from([0, END_STREAM])
_bodies = st.one_of(
    st.sampled_from(LEASE_IDS).map(lambda lease_id: match(lease_id).SerializeToString()),
    st.binary(max_size=40),
)
_messages = st.builds(
    message, _bodies, st.sampled_from([0, 0, 0, 1, 255]), st.sampled_from([None, None, 0, 1, 2**24, 2**32 - 1])
)
_proper = st.builds(
    lambda lease_id, stream: call("MatchPrefix", match(lease_id), stream), st.sampled_from(LEASE_IDS), _streams
)
_pieces = st.one_of(
    _proper,
    st.builds(headers_frame, _headers(), _streams, _ends),
    st.builds(data_frame, _messages, _streams, _ends),
    st.builds(
        frame,
        st.integers(0, NUM_KINDS),
        st.integers(0, 255),
        _streams,
        st.binary(max_size=40),
        st.sampled_from([None, None, 0, 1, 16_384, 16_385, 2**24 - 1]),
    ),
    st.binary(max_size=40),
)


def connections() -> st.SearchStrategy[bytes]:
    """Draw all that a client sends on one connection, which may end in the middle of anything."""
    begun = st.sampled_from([HELLO, HELLO, HELLO, HELLO, PREFACE, PREFACE[:10], b"", b"GET / HTTP/1.1\r\n\r\n"])
    whole = st.builds(lambda start, pieces: start + b"".join(pieces), begun, st.lists(_pieces, max_size=8))
    return st.builds(lambda sent, cut: sent[: len(sent) - cut], whole, st.sampled_from([0, 0, 0, 1, 7, 30]))
