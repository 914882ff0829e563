"""NVIDIA Dynamo's selection service: a router that knows nodes by their events. Run by itself: for other processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from radix_cache_service.events.names import lora_name_of

os.environ.setdefault("DYN_LOG", "off")
llm = pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'")

CONVERGED_S = 60.0
BLOCK_SIZE = 2


class Router:
    """Subscribes to publishers and is asked what they have. peers: where others like it are; it begins with what the
    first of them knows.
    """

    def __init__(self, *peers: str) -> None:
        self._runner = asyncio.Runner()
        self._lock = threading.Lock()
        self._service: Any = self._do(
            lambda: llm.SelectionService(indexer_threads=1, indexer_peers=list(peers) or None)
        )

    def _do(self, call: Callable[[], Any]) -> Any:
        async def run() -> Any:
            said = call()
            return await said if asyncio.isfuture(said) else said

        with self._lock:
            return self._runner.run(run())

    def add(self, worker_id: int, address: str, replay_address: str | None) -> None:
        """Subscribe to a node. Without a replay address it is never asked for what was missed."""
        worker = {"worker_id": worker_id, "model_name": "m", "block_size": BLOCK_SIZE, "endpoint": "http://127.0.0.1:1"}
        worker["kv_events_endpoint"] = f"tcp://{address}"
        if replay_address is not None:
            worker["replay_endpoint"] = f"tcp://{replay_address}"
        self._do(lambda: self._service.upsert_worker(worker))

    def score(self, tokens: Sequence[int], namespace: tuple[str, ...], worker_id: int = 1) -> int:
        """How many tokens of a prompt it thinks that the worker has."""
        request = {"model_name": "m", "token_ids": list(tokens), "lora_name": lora_name_of(tuple(namespace))}
        said = self._do(lambda: self._service.overlap_scores(request))
        found = [each["device_blocks"] for each in said["workers"] if each["worker_id"] == worker_id]
        return max(found) * BLOCK_SIZE

    def wait_for(self, tokens: Sequence[int], namespace: tuple[str, ...], num_tokens: int, worker_id: int = 1) -> None:
        """Wait until it thinks that the worker has so much of a prompt."""
        deadline = time.monotonic() + CONVERGED_S
        while (seen := self.score(tokens, namespace, worker_id)) != num_tokens:
            assert time.monotonic() < deadline, f"{seen} tokens after {CONVERGED_S} s, not {num_tokens}"
            time.sleep(0.005)

    def dump(self) -> bytes:
        """All that it knows, as its peers ask for it."""
        return json.dumps(self._do(self._service.indexer_snapshot)).encode()

    def close(self) -> None:
        """End it."""
        self._service.shutdown()
        self._runner.close()


@contextmanager
def served_to_peers(router: Router) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of an HTTP server that tells peers what ``router`` knows, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            content = router.dump()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    """Do what comes as lines of JSON, a method and its arguments each, and answer each with a line."""
    router = Router()
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(router, method)(*arguments)), flush=True)
    router.close()


if __name__ == "__main__":
    main()
