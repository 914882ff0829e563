"""A request of a `radix_cache.integrations.transformers.Generator`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Request"]


@dataclass(eq=False)
class Request:
    """A prompt and what is generated from it. Attributes are read-only to callers.

    tokens: the prompt, then what was sampled. num_reused_tokens: of the prompt, found in the cache when it was first
    admitted. num_prefill_tokens: of the prompt, computed before the first token was sampled: all that was not reused,
    and what was lost to a preemption in between. num_preemptions: how often it gave way. error: what it failed with.
    """

    tokens: list[int]
    num_prompt_tokens: int
    stop_at: int
    stop_ids: frozenset[int]
    submitted_at: float
    first_token_at: float | None = None
    num_reused_tokens: int | None = None
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    error: Exception | None = None
    lease: Any = None
    num_computed: int = field(default=0)  # tokens whose KV is in the lease's blocks
    to_copy: tuple[int, int] | None = None  # a partial block, and the own one that is to begin like it

    @property
    def computed(self) -> list[int]:
        """The tokens whose KV is in the lease's blocks."""
        return self.tokens[: self.num_computed]

    @property
    def new_tokens(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_over(self) -> bool:
        """Whether it came to its end."""
        num_new = len(self.tokens) - self.num_prompt_tokens
        return len(self.tokens) >= self.stop_at or bool(num_new and self.tokens[-1] in self.stop_ids)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from `Generator.submit` to the first token; None before."""
        return None if self.first_token_at is None else self.first_token_at - self.submitted_at
