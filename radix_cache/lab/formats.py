r"""The kinds of JSON records that make a request. Each function takes one record and checks all that it uses of it.

- Mooncake (Qin et al., FAST'25): ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``; an id stands
  for one block of tokens *and all before it*. ``block_size`` in a record says how many tokens; most files don't say.
  ``session_id``, where there is one, is the conversation.
- Qwen-Bailian (Wang et al., ATC'25): the same with ``chat_id``, ``parent_chat_id`` (-1: a first turn), ``type`` and
  ``turn``, ``timestamp`` in seconds, and 16 tokens in a block.
- Token ids: ``tokens`` and perhaps ``output_tokens``, ``timestamp`` in ms.
- Chat logs in OpenAI's form: ``messages`` and perhaps a response with ``choices``, at the top, in ``body`` or in
  ``request`` and ``response``; ``timestamp`` in ms, or ``created`` in seconds. They need a tokenizer. The text is laid
  out as ChatML, ``<|im_start|>role\ncontent<|im_end|>\n``, whatever the model's own template is: prefixes are shared
  where messages are, lengths are off by a few tokens a message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from radix_cache.errors import InvalidArgument, InvalidTokens
from radix_cache.hints import MAX_LABEL_LENGTH
from radix_cache.lab.requests import Request
from radix_cache.tokens import TOKEN_BYTES, pack_tokens

__all__ = ["Fields", "RecordParser", "Tokenizer", "guess_tokens_per_block"]

Fields: TypeAlias = Mapping[str, Any]
Tokenizer: TypeAlias = Callable[[str], Sequence[int]]

_MOST_TOKENS = 2**53  # what a float can count
_MOST_TIME = 1e18
_COMMON_SIZES = (512, 16, 256, 128, 64, 32, 1024, 2048)


class RecordParser:
    """Makes requests of the records of one trace, in their order: a chat is found through its parent.

    tokens_per_block: of hash ids in records that don't say it. tokenize: text to token ids, for chat logs.
    """

    def __init__(self, tokens_per_block: int, tokenize: Tokenizer | None = None) -> None:
        self._tokens_per_block = tokens_per_block
        self._tokenize = tokenize
        self._first_chats: dict[int, int] = {}  # chat -> the first of its conversation

    def __call__(self, fields: Fields) -> Request:
        """Return the request; raises `InvalidArgument` for a record that is none."""
        if "tokens" in fields:
            return self._from_tokens(fields)
        if "hash_ids" in fields:
            return self._from_hash_ids(fields)
        if (chat := _find_chat(fields)) is not None:
            return self._from_chat(fields, *chat)
        raise InvalidArgument("neither hash_ids nor tokens nor messages is there")

    def _from_tokens(self, fields: Fields) -> Request:
        prompt = _packed(fields, "tokens")
        output = _packed(fields, "output_tokens") if fields.get("output_tokens") is not None else b""
        return Request(
            _milliseconds(fields),
            len(prompt) // TOKEN_BYTES,
            len(output) // TOKEN_BYTES,
            prompt,
            output,
            conversation=_label(fields, "session_id"),
        )

    def _from_hash_ids(self, fields: Fields) -> Request:
        num_tokens = _count(fields, "input_length", most=_MOST_TOKENS)
        size = _count(fields, "block_size", 1, _MOST_TOKENS) if "block_size" in fields else self._tokens_per_block
        prompt = _packed(fields, "hash_ids")
        num_ids = len(prompt) // TOKEN_BYTES
        if not _fits(num_tokens, num_ids, size):
            raise InvalidArgument(
                f"input_length {num_tokens} does not make {num_ids} hash_ids with {size} tokens in a block"
            )
        is_bailian = "chat_id" in fields
        return Request(
            _milliseconds(fields, 1000 if is_bailian else 1),
            num_tokens,
            _count(fields, "output_length", most=_MOST_TOKENS) if "output_length" in fields else 0,
            prompt,
            tokens_per_id=size,
            conversation=self._conversation(fields) if is_bailian else _label(fields, "session_id"),
            request_type=_label(fields, "type"),
            turn=_count(fields, "turn", least=1) if "turn" in fields else None,
        )

    def _conversation(self, fields: Fields) -> str:
        chat, parent = _count(fields, "chat_id"), _count(fields, "parent_chat_id", least=-1)
        first = self._first_chats[chat] = chat if parent < 0 else self._first_chats.get(parent, parent)
        return str(first)

    def _from_chat(self, fields: Fields, messages: Any, choices: Any) -> Request:
        if self._tokenize is None:
            raise InvalidArgument("a chat log needs a tokenizer")
        shown = "".join(_rendered(message) for message in _listed(messages, "messages")) + "<|im_start|>assistant\n"
        answers = [_content(_message(choice)) for choice in _listed(choices, "choices")[:1]]
        prompt, output = (pack_tokens(self._tokenize(text)) for text in (shown, "".join(answers)))
        seconds = "timestamp" not in fields and "created" in fields
        return Request(
            _milliseconds(fields, 1000, "created") if seconds else _milliseconds(fields),
            len(prompt) // TOKEN_BYTES,
            len(output) // TOKEN_BYTES,
            prompt,
            output,
            conversation=_label(fields, "session_id"),
        )


def guess_tokens_per_block(head: Sequence[Fields]) -> int:
    """Return the common size that fits all records which need one; the commonest of their kind where none does."""
    unsized = [fields for fields in head if "hash_ids" in fields and "block_size" not in fields]
    lengths = [(fields.get("input_length"), fields["hash_ids"]) for fields in unsized]
    counted = [(n, len(ids)) for n, ids in lengths if isinstance(n, int) and isinstance(ids, list)]
    is_bailian = any("chat_id" in fields for fields in unsized)
    sizes = sorted(_COMMON_SIZES, key=(16).__ne__) if is_bailian else _COMMON_SIZES
    return next((size for size in sizes if all(_fits(n, num_ids, size) for n, num_ids in counted)), sizes[0])


def _fits(num_tokens: int, num_ids: int, size: int) -> bool:
    """Tell whether ``num_ids`` are the blocks of a prompt, the ragged last one counted or not."""
    return num_tokens // size <= num_ids <= -(-num_tokens // size)


def _milliseconds(fields: Fields, factor: int = 1, name: str = "timestamp") -> float:
    value = fields.get(name, 0)
    unit = "milliseconds" if factor == 1 else "seconds"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name} is a number of {unit}, not {value!r}")
    if not abs(value) <= _MOST_TIME:  # nor NaN
        raise InvalidArgument(f"{name} is at most {_MOST_TIME:g} {unit} from 0, not {value!r:.40}")
    return value * factor


def _packed(fields: Fields, name: str) -> bytes:
    values = fields[name]
    if not isinstance(values, list):
        raise InvalidArgument(f"{name} is a list of integers, not {type(values).__name__}")
    try:
        return pack_tokens(values)
    except InvalidTokens as error:
        raise InvalidArgument(f"{name}: {error}") from None


def _count(fields: Fields, name: str, least: int = 0, most: int | None = None) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        shown = "missing" if value is None else f"{value!r}"
        raise InvalidArgument(f"{name} is an integer of at least {least}, not {shown}")
    if most is not None and value > most:
        raise InvalidArgument(f"{name} is at most {most}, not {value!r:.40}")
    return value


def _label(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidArgument(f"{name} is a string or an integer, not {type(value).__name__}")
    if len(text := str(value)) > MAX_LABEL_LENGTH:
        raise InvalidArgument(f"{name} has at most {MAX_LABEL_LENGTH} characters, not {len(text)}")
    return text


def _find_chat(fields: Fields) -> tuple[Any, Any] | None:
    """Return messages and choices, wherever they are."""
    for place in (fields, fields.get("body"), fields.get("request")):
        if isinstance(place, dict) and "messages" in place:
            response = fields.get("response", fields)
            body = response.get("body", response) if isinstance(response, dict) else {}
            return place["messages"], body.get("choices", []) if isinstance(body, dict) else []
    return None


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidArgument(f"{name} is a list, not {type(value).__name__}")
    return value


def _message(choice: Any) -> Any:
    return choice.get("message") if isinstance(choice, dict) else None


def _rendered(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidArgument("each message has a role")
    return f"<|im_start|>{message['role']}\n{_content(message)}<|im_end|>\n"


def _content(message: Any) -> str:
    """Return all that a message says: text, parts of text, calls of tools. Other parts stand as their JSON."""
    if not isinstance(message, dict):
        raise InvalidArgument("each choice has a message")
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else _listed(content, "content")
    said = [part if isinstance(part, str) else _part(part) for part in parts]
    calls = message.get("tool_calls")
    return "".join(said) + (json.dumps(calls, sort_keys=True) if calls else "")


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else json.dumps(part, sort_keys=True)
