"""Bytes for a server's port as hypothesis draws them: messages that are right, nearly right, or no messages at all.

Most values are usual ones out of a few, so that calls meet each other's leases and tokens; one in twenty is odd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from service_process import pack

LEASE_IDS = [f"lease-{number}" for number in range(4)]

Strategy = st.SearchStrategy[Any]


def _mostly(usual: Strategy, odd: Strategy, one_in: int = 20) -> Strategy:
    return st.integers(1, one_in).flatmap(lambda number: odd if number == one_in else usual)


_names = _mostly(st.sampled_from(LEASE_IDS), st.sampled_from(["", "x" * 257, "\x00", "é" * 200]) | st.text(max_size=6))
_namespaces = _mostly(st.sampled_from([[], [], ["a"]]), st.lists(_names, max_size=40))
_tokens = _mostly(st.lists(st.integers(0, 1), max_size=9).map(lambda tokens: pack(*tokens)), st.binary(max_size=9))
_BY_KIND: dict[int, Strategy] = {
    FieldDescriptor.CPPTYPE_UINT64: _mostly(st.integers(0, 8), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1])),
    FieldDescriptor.CPPTYPE_UINT32: _mostly(st.integers(0, 12), st.sampled_from([2**31, 2**32 - 1])),
    FieldDescriptor.CPPTYPE_INT64: _mostly(st.integers(-9, 9), st.sampled_from([-(2**63), 2**63 - 1])),
    FieldDescriptor.CPPTYPE_INT32: _mostly(st.integers(-9, 9), st.sampled_from([-(2**31), 2**31 - 1])),
    FieldDescriptor.CPPTYPE_DOUBLE: _mostly(st.sampled_from([1.0, 0.5]), st.floats()),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: _mostly(st.integers(0, 2), st.just(2**31 - 1)),
}


def _value(field: FieldDescriptor) -> Strategy:
    if field.message_type is not None:
        return messages(field.message_type)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _tokens
    return _names if field.type == FieldDescriptor.TYPE_STRING else _BY_KIND[field.cpp_type]


def _field(field: FieldDescriptor) -> Strategy:
    if field.name == "namespace":
        return _namespaces
    return st.lists(_value(field), max_size=4) if field.is_repeated else _value(field)


def messages(descriptor: Descriptor) -> Strategy:
    """Draw messages of a type, with some of its fields, and of each oneof one."""
    make = GetMessageClass(descriptor)
    choices = [oneof.fields for oneof in descriptor.oneofs if len(oneof.fields) > 1]  # one field: it is ``optional``
    chosen = {field.name for fields in choices for field in fields}
    free = {f.name: _mostly(_field(f), st.none(), one_in=4) for f in descriptor.fields if f.name not in chosen}
    drawn = [st.fixed_dictionaries(free), *map(_one_of, choices)]
    return st.tuples(*drawn).map(lambda parts: make(**{name: value for part in parts for name, value in part.items()}))


def _one_of(fields: Sequence[FieldDescriptor]) -> Strategy:
    return st.one_of([st.fixed_dictionaries({field.name: _field(field)}) for field in fields])


@st.composite
def spoiled(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> bytes:
    """Cut pieces out of it, put others in, write over some."""
    drawn = draw(data)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(drawn)))
        stop = start + draw(st.integers(0, 3))
        drawn = drawn[:start] + draw(st.binary(max_size=3)) + drawn[stop:]
    return drawn


def requests(descriptor: Descriptor) -> st.SearchStrategy[bytes]:
    """Draw what a client sends as a message of a type: mostly good ones, some spoiled, some mere bytes."""
    good = messages(descriptor).map(lambda message: message.SerializeToString())
    return _mostly(good, st.binary(max_size=60) | spoiled(good), one_in=3)
