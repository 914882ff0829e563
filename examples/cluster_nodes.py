"""A node of the cluster: a server in a process of its own, and an engine in front of it whose compute is a sleep."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from radix_cache_service import Client

BLOCK_SIZE = 16
PREFILL_S = 10e-6  # of compute for each token of a prompt
DECODE_S = 0.01

_READY = "listening on "
_WAIT_S = 30.0  # for blocks


class Process:
    """A command of ours in a process; ``address`` is there once it serves."""

    def __init__(self, *arguments: str, listen: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-c", "from radix_cache.cli import main; main()", *arguments]
        command += ["--listen", listen, "--log-level", "error"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_READY):
                return line.removeprefix(_READY).strip()
        raise SystemExit(self._process.wait())  # it has said why

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._close()

    def stop(self) -> None:
        """End it as an orchestrator would."""
        self._process.terminate()
        self._close()

    def _close(self) -> None:
        self._process.wait(timeout=20)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Work(NamedTuple):
    """What a node has done."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


class Node:
    """A server whose pool has ``num_blocks`` blocks, and its engine."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self._options = ["--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE)]
        self._options += ["--events-listen", "127.0.0.1:0"]
        self._process = Process("serve", *self._options)
        self.address = self._process.address
        self.client = Client(self.address, engine_id=name)
        self.work = Work()
        self._computing = threading.Lock()
        self._counting = threading.Lock()

    def kill(self) -> None:
        self._process.kill()

    def start_again(self) -> None:
        self._process = Process("serve", *self._options, listen=self.address)

    def close(self) -> None:
        self.client.close()
        self._process.stop()

    def serve(self, tokens: array[int], namespace: tuple[str, ...]) -> None:
        """Do one request, as an engine does it."""
        n = len(tokens)
        lease = self.client.match_prefix(tokens, namespace, max_tokens=n - 1, num_tokens=n + 1, wait_s=_WAIT_S)
        with self._computing:
            time.sleep((n - lease.num_cached_tokens) * PREFILL_S)
        self.client.insert(lease, tokens)
        time.sleep(DECODE_S)
        self.client.release(lease)
        with self._counting:
            work = self.work
            self.work = Work(
                num_requests=work.num_requests + 1,
                num_prompt_tokens=work.num_prompt_tokens + n,
                num_cached_tokens=work.num_cached_tokens + lease.num_cached_tokens,
            )


@dataclass(frozen=True)
class Request:
    namespace: tuple[str, ...]
    tokens: array[int]


@dataclass(frozen=True)
class Tenants:
    """Who asks: all prompts of a tenant begin alike, then comes one of its chats, which grow and begin anew.

    skew: of how often each of them asks, a power law.
    """

    number: int = 48
    num_shared_tokens: int = 1024
    num_chats: int = 3
    skew: float = 0.6

    def requests(self, number: int, seed: int) -> list[Request]:
        """Draw requests, the same for the same seed."""
        draw = random.Random(seed)
        shared = [_words(draw, self.num_shared_tokens, self.num_shared_tokens) for _ in range(self.number)]
        chats = {(tenant, chat): array("I") for tenant in range(self.number) for chat in range(self.num_chats)}
        weights = [rank**-self.skew for rank in range(1, self.number + 1)]
        drawn = []
        for tenant in draw.choices(range(self.number), weights, k=number):
            chat = tenant, draw.randrange(self.num_chats)
            chats[chat] = (chats[chat] if len(chats[chat]) < 300 else array("I")) + _words(draw, 20, 80)
            drawn.append(Request(("llm", f"tenant-{tenant}"), shared[tenant] + chats[chat]))
        return drawn


def _words(draw: random.Random, least: int, most: int) -> array[int]:
    return array("I", (draw.randrange(32_000) for _ in range(draw.randint(least, most))))
