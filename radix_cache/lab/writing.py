"""Writing traces of hash ids, in the form that `radix_cache.lab.read_trace` reads."""

from __future__ import annotations

import json
from typing import Any

from radix_cache.lab.requests import Request
from radix_cache.tokens import unpack_tokens

__all__ = ["as_line", "as_record"]


def as_record(request: Request) -> dict[str, Any]:
    """Return the JSON object that makes the request again: of hash ids, or of token ids."""
    record: dict[str, Any] = {"timestamp": request.timestamp_ms}
    if request.tokens_per_id == 1:
        record["tokens"] = unpack_tokens(request.prompt).tolist()
        if request.output:
            record["output_tokens"] = unpack_tokens(request.output).tolist()
    else:
        record["input_length"] = request.num_prompt_tokens
        record["output_length"] = request.num_output_tokens
        record["block_size"] = request.tokens_per_id
        record["hash_ids"] = unpack_tokens(request.prompt).tolist()
    extra = {"session_id": request.conversation, "type": request.request_type, "turn": request.turn}
    return record | {name: value for name, value in extra.items() if value}


def as_line(request: Request) -> str:
    """Return the record as one line."""
    return json.dumps(as_record(request), separators=(",", ":")) + "\n"
