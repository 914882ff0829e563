"""Small traces for the lab's tests: conversations that share the beginnings of their prompts, drawn by a seed."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from radix_cache.lab import Request
from radix_cache.tokens import pack_tokens


def chats(seed: int, num_requests: int = 300, size: int = 10, *, is_ragged: bool = True) -> list[Request]:
    """Requests of hash ids, ``size`` tokens in a block: some prompts are popular, conversations go on for a while."""
    draw = random.Random(seed)
    ids = iter(range(10**9))
    shared = [[next(ids) for _ in range(draw.randint(1, 6))] for _ in range(4)]
    open_chats: list[list[int]] = []
    requests = []
    for number in range(num_requests):
        if not open_chats or draw.random() < 0.3:
            open_chats.append(list(draw.choices(shared, weights=(8, 4, 2, 1))[0]))
        chat = draw.choice(open_chats)
        chat += [next(ids) for _ in range(draw.randint(1, 5))]
        if draw.random() < 0.2:
            open_chats.remove(chat)
        num_tokens = len(chat) * size - (draw.randrange(size) if is_ragged else 0)
        requests.append(Request(number * 10, num_tokens, 3, pack_tokens(chat), tokens_per_id=size))
        if is_ragged and num_tokens % size:  # the last block is another one when it is full
            chat[-1] = next(ids)
    return requests


def token_requests() -> st.SearchStrategy[list[Request]]:
    """Short prompts over two tokens, with outputs: nearly everything is shared."""
    ids = st.lists(st.integers(1, 2), max_size=9)
    pairs = st.tuples(ids, st.lists(st.integers(1, 2), max_size=4))
    return st.lists(pairs.map(lambda pair: tokens(*pair)), max_size=25)


def tokens(prompt: list[int], output: list[int] | None = None) -> Request:
    """A request of token ids."""
    output = output or []
    return Request(0, len(prompt), len(output), pack_tokens(prompt), pack_tokens(output))
