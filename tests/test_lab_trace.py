"""Reading traces: what is understood, and what is refused by line number."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radix_cache.errors import InvalidArgument
from radix_cache.hints import NO_HINTS, Hints
from radix_cache.lab import (
    Request,
    TraceError,
    count_requests,
    group_ties,
    in_time_order,
    read_records,
    read_trace,
)
from radix_cache.tokens import pack_tokens, unpack_tokens

Write = Callable[..., Path]

HASHED = {"timestamp": 27, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
TOKENS = {"timestamp": 1.5, "tokens": [7, 8, 2**32 - 1], "output_tokens": [4, 5]}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a trace: dicts become JSON, strings stay as they are."""

    def write_one(*lines: dict[str, Any] | str, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write_one


def test_hash_ids(write: Write) -> None:
    (request,) = read_trace(write(HASHED))
    assert (request.timestamp_ms, request.num_prompt_tokens, request.num_output_tokens) == (27, 1100, 5)
    assert list(unpack_tokens(request.prompt)) == [0, 1, 2]
    assert (request.num_ids, request.tokens_per_id, request.output) == (3, 512, b"")


def test_token_ids(write: Write) -> None:
    with_output, without = read_trace(write(TOKENS, {"timestamp": 2, "tokens": []}))
    assert list(unpack_tokens(with_output.prompt)) == [7, 8, 2**32 - 1]
    assert list(unpack_tokens(with_output.output)) == [4, 5]
    assert (with_output.num_prompt_tokens, with_output.num_output_tokens, with_output.tokens_per_id) == (3, 2, 1)
    assert without == Request(2, 0, 0, b"")


def test_both_kinds_in_one_file_and_unknown_fields(write: Write) -> None:
    first, second = read_trace(write({**HASHED, "session_id": 3}, TOKENS))
    assert (first.tokens_per_id, second.tokens_per_id) == (512, 1)


def test_blank_lines_are_skipped_and_still_counted(write: Write) -> None:
    path = write("", HASHED, "  ", HASHED, "nonsense")
    with pytest.raises(TraceError, match="line 5: not JSON"):
        list(read_trace(path))
    assert count_requests(path) == 3


def test_an_empty_file_has_no_requests(write: Write) -> None:
    path = write()
    assert list(read_trace(path)) == []
    assert count_requests(path) == 0


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace.jsonl", "trace"])
def test_gzip_is_known_by_its_content(write: Write, name: str) -> None:
    path = write(HASHED, HASHED, name=name)
    plain = list(read_trace(path))
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert list(read_trace(path)) == plain
    assert count_requests(path) == 2


def test_damaged_gzip_names_the_line(write: Write) -> None:
    path = write(*[{**HASHED, "timestamp": number} for number in range(2_000)])
    path.write_bytes(gzip.compress(path.read_bytes())[:-2_000])
    seen = []
    with pytest.raises(TraceError, match="compressed data is damaged") as caught:
        seen.extend(read_trace(path))
    assert caught.value.line > 100


def test_requests_come_before_the_file_ends(write: Write) -> None:
    path = write(*[HASHED] * 500, "nonsense")
    assert next(read_trace(path)).num_ids == 3


@pytest.mark.parametrize(
    ("num_tokens", "num_ids", "size"),
    [(1100, 3, 512), (1100, 2, 512), (1024, 2, 512), (1307, 81, 16), (1307, 82, 16), (260, 2, 256), (0, 0, 512)],
)
def test_tokens_per_block_follow_from_the_lengths(write: Write, num_tokens: int, num_ids: int, size: int) -> None:
    record = {"timestamp": 0, "input_length": num_tokens, "output_length": 1, "hash_ids": list(range(num_ids))}
    (request,) = read_trace(write(record))
    assert (request.num_ids, request.tokens_per_id) == (num_ids, size)


def test_a_later_line_tells_the_size_of_an_ambiguous_first(write: Write) -> None:
    short = {"timestamp": 0, "input_length": 12, "output_length": 1, "hash_ids": [0]}
    long = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [0, 1, 2]}
    assert [request.tokens_per_id for request in read_trace(write(short, long))] == [16, 16]


def test_an_odd_size_is_an_option(write: Write) -> None:
    path = write({"timestamp": 0, "input_length": 20, "output_length": 1, "hash_ids": [0, 1, 2]})
    with pytest.raises(TraceError, match="line 1: input_length 20 does not make 3 hash_ids with 512 tokens"):
        list(read_trace(path))
    (request,) = read_trace(path, tokens_per_block=7)
    assert request.tokens_per_id == 7


def test_a_record_may_say_its_own_size(write: Write) -> None:
    own = {"timestamp": 0, "input_length": 20, "output_length": 1, "hash_ids": [0, 1, 2], "block_size": 7}
    assert [request.tokens_per_id for request in read_trace(write(own, HASHED))] == [7, 512]
    assert [request.tokens_per_id for request in read_trace(write(HASHED, own), 512)] == [512, 7]


def test_output_length_and_timestamp_may_be_missing(write: Write) -> None:
    (request,) = read_trace(write({"input_length": 3, "hash_ids": [9]}))
    assert (request.timestamp_ms, request.num_output_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "a JSON object is needed, not list"),
        ({}, "neither hash_ids nor tokens"),
        ({**HASHED, "hash_ids": None}, "hash_ids is a list of integers, not NoneType"),
        ({**HASHED, "hash_ids": [0, 1, 2**32]}, r"hash_ids: .* not 4294967296 \(index 2\)"),
        ({**HASHED, "hash_ids": [0, 1, "2"]}, "hash_ids: .* not str"),
        ({**HASHED, "hash_ids": [0, 1, 2, 3, 4]}, "input_length 1100 does not make 5 hash_ids"),
        ({**HASHED, "hash_ids": [0]}, "does not make 1 hash_ids"),
        ({"hash_ids": [0]}, "input_length is an integer of at least 0, not missing"),
        ({**HASHED, "input_length": -1}, "input_length .* not -1"),
        ({**HASHED, "input_length": 1100.0}, "input_length .* not 1100.0"),
        ({**HASHED, "input_length": True}, "input_length .* not True"),
        ({**HASHED, "output_length": "5"}, "output_length .* not '5'"),
        ({**HASHED, "block_size": 0}, "block_size is an integer of at least 1, not 0"),
        ({**HASHED, "block_size": 10**30}, "block_size is at most 9007199254740992, not 10000"),
        ({**HASHED, "output_length": 2**53 + 1}, "output_length is at most 9007199254740992, not 9007199254740993"),
        ({**HASHED, "timestamp": 10**400}, "timestamp is at most 1e[+]18 milliseconds from 0, not 10000"),
        ({**HASHED, "timestamp": -1e19}, "timestamp is at most 1e[+]18 milliseconds from 0, not -1e[+]19"),
        ({**HASHED, "timestamp": "now"}, "timestamp is a number of milliseconds, not 'now'"),
        ('{"timestamp": NaN, "tokens": [1]}', "timestamp .* not nan"),
        ({"tokens": "abc"}, "tokens is a list of integers, not str"),
        ({"tokens": [1, -1]}, r"tokens: .* not -1 \(index 1\)"),
        ({"tokens": [1, True]}, "tokens: .* not bool"),
        ({"tokens": [1], "output_tokens": [0.5]}, "output_tokens: .* not float"),
    ],
)
def test_bad_lines_are_named(write: Write, line: dict[str, Any] | str, why: str) -> None:
    path = write(HASHED, HASHED, line)
    seen: list[Request] = []
    with pytest.raises(TraceError, match=f"trace.jsonl, line 3: .*{why}") as caught:
        seen.extend(read_trace(path, 512))
    assert len(seen) == 2
    assert (caught.value.line, caught.value.path) == (3, path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"tokens": [1]}\n{"tokens": [1], "x": "\xff\xff"}\n')
    with pytest.raises(TraceError, match="line 2: not JSON"):
        list(read_trace(path))


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(read_trace(tmp_path / "none.jsonl"))


def test_the_error_survives_pickling() -> None:
    error = TraceError("a.jsonl", 7, "why")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.path, copied.line) == ("a.jsonl, line 7: why", "a.jsonl", 7)
    assert isinstance(error, InvalidArgument)


@pytest.mark.parametrize(
    ("name", "num_requests", "tokens_per_id", "num_blocks"),
    [
        ("conversation_trace", 12_031, 512, 182_790),
        ("synthetic_trace", 3_993, 512, 43_924),
        ("mooncake_arxiv_1000", 1_000, 512, 12_207),
        ("lmcache_agent_16", 1_619, 16, 26_228),
    ],
)
def test_public_traces(traces: Path, name: str, num_requests: int, tokens_per_id: int, num_blocks: int) -> None:
    path = traces / f"{name}.jsonl.gz"
    requests = list(read_trace(path))
    assert len(requests) == count_requests(path) == num_requests
    assert {request.tokens_per_id for request in requests} == {tokens_per_id}
    assert len(set().union(*(unpack_tokens(request.prompt) for request in requests))) == num_blocks


def test_bailian(write: Write) -> None:
    """Seconds, 16 tokens in a block, and a conversation that is found through its parents."""
    first = {"chat_id": 5, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 7}
    first |= {"type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
    second = {**first, "chat_id": 8, "parent_chat_id": 5, "timestamp": 70, "turn": 2}
    third = {**first, "chat_id": 9, "parent_chat_id": 8, "turn": 3}
    cut_off = {**first, "chat_id": 10, "parent_chat_id": 2}
    requests = list(read_trace(write(first, second, third, cut_off)))
    assert [(r.conversation, r.turn) for r in requests] == [("5", 1), ("5", 2), ("5", 3), ("2", 1)]
    assert requests[0].timestamp_ms == 61_500
    assert (requests[0].tokens_per_id, requests[0].request_type) == (16, "text")
    assert requests[0].hints == Hints(conversation="5", request_type="text")


def test_a_short_bailian_trace_has_16_tokens_in_a_block(write: Write) -> None:
    (request,) = read_trace(write({"chat_id": 1, "parent_chat_id": -1, "input_length": 9, "hash_ids": [4]}))
    assert request.tokens_per_id == 16


def test_a_session_is_a_conversation(write: Write) -> None:
    hashed, tokens, neither = read_trace(write({**HASHED, "session_id": 3}, {**TOKENS, "session_id": "a"}, TOKENS))
    assert (hashed.conversation, tokens.conversation, neither.conversation) == ("3", "a", "")
    assert neither.hints is NO_HINTS


def code_points(text: str) -> list[int]:
    return list(map(ord, text))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda messages, choices: {"messages": messages, "choices": choices},
        lambda messages, choices: {"body": {"messages": messages}, "response": {"body": {"choices": choices}}},
        lambda messages, choices: {"request": {"messages": messages}, "response": {"choices": choices}},
    ],
    ids=["flat", "batch", "pair"],
)
def test_chat_logs(write: Write, wrap: Callable[..., dict[str, Any]]) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    path = write(wrap(messages, [{"message": {"role": "assistant", "content": "yo"}}]) | {"created": 7})
    (request,) = read_trace(path, tokenize=code_points)
    shown = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(map(chr, unpack_tokens(request.prompt))) == shown
    assert "".join(map(chr, unpack_tokens(request.output))) == "yo"
    assert (request.timestamp_ms, request.num_output_tokens, request.tokens_per_id) == (7000, 2, 1)


def test_the_next_turn_of_a_chat_extends_the_one_before(write: Write) -> None:
    said = [{"role": "user", "content": "hi"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    path = write({"messages": said}, {"messages": [*said, call, {"role": "tool", "content": "42"}]})
    first, second = read_trace(path, tokenize=code_points)
    assert second.prompt.startswith(first.prompt)
    assert '"name": "f"' in "".join(map(chr, unpack_tokens(second.prompt)))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"messages": "hi"}, "messages is a list, not str"),
        ({"messages": [{"content": "hi"}]}, "each message has a role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is a list, not int"),
        ({"messages": [], "choices": [{}]}, "each choice has a message"),
        ({"messages": [], "choices": {}}, "choices is a list, not dict"),
        ({**HASHED, "session_id": [1]}, "session_id is a string or an integer, not list"),
        ({**HASHED, "session_id": "x" * 129}, "session_id has at most 128 characters, not 129"),
        ({**HASHED, "turn": 0}, "turn is an integer of at least 1, not 0"),
        ({**HASHED, "chat_id": 1}, "parent_chat_id is an integer of at least -1, not missing"),
        ({"messages": [], "created": "now"}, "created is a number of seconds, not 'now'"),
    ],
)
def test_bad_chats_are_named(write: Write, line: dict[str, Any], why: str) -> None:
    with pytest.raises(TraceError, match=f"line 2: {why}"):
        list(read_trace(write(HASHED, line), 512, tokenize=code_points))


def test_a_chat_log_needs_a_tokenizer(write: Write) -> None:
    with pytest.raises(TraceError, match="line 1: a chat log needs a tokenizer"):
        list(read_trace(write({"messages": []})))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_stdin(write: Write, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]) -> None:
    path = write(HASHED, TOKENS)
    stdin = io.TextIOWrapper(io.BytesIO(pack(path.read_bytes())))
    monkeypatch.setattr("sys.stdin", stdin)
    assert list(read_trace("-")) == list(read_trace(path))
    assert not stdin.buffer.closed


def test_a_reader_of_ones_own_names_its_bad_lines(write: Write) -> None:
    def parse(fields: Any) -> Request:
        if "ids" not in fields:
            raise InvalidArgument("no ids")
        return Request(0, len(fields["ids"]), 0, pack_tokens(fields["ids"]))

    seen = []
    with pytest.raises(TraceError, match="line 2: no ids"):
        seen.extend(read_records(write({"ids": [1, 2]}, {"x": 1}), parse))
    assert [request.num_ids for request in seen] == [2]


def test_time_order_and_ties() -> None:
    late, early, tied = (Request(at, 1, 0, pack_tokens([number])) for number, at in enumerate((5, 1, 5)))
    assert in_time_order([late, early, tied]) == [early, late, tied]
    assert list(group_ties([early, late, tied])) == [[early], [late, tied]]
    assert list(group_ties([late, early, tied])) == [[late], [early], [tied]], "only neighbours are tied"
