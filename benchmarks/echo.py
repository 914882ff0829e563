"""``python -m benchmarks.echo aio|threads BYTES``: a bare gRPC server, the floor for `benchmarks.service`.

It reads the same request as `MatchPrefix`, and its answer has a block table of so many bytes: the same stack and the
same payload, and nothing in between. Prints its address and serves until it is terminated.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 2**26)]


def main(kind: str, num_bytes: int) -> None:
    """Serve."""
    table = bytes(num_bytes)

    def answer(request: pb.MatchPrefixRequest) -> pb.MatchPrefixResponse:
        state = pb.ServerState(epoch="0123456789abcdef", num_available_blocks=len(request.tokens))
        return pb.MatchPrefixResponse(state=state, lease_id=request.lease_id, block_table=table)

    class Threaded(pb_grpc.PrefixCacheServiceServicer):
        def MatchPrefix(self, request: Any, context: Any) -> Any:  # noqa: N802
            return answer(request)

    class Coroutines(pb_grpc.PrefixCacheServiceServicer):
        async def MatchPrefix(self, request: Any, context: Any) -> Any:  # noqa: N802
            return answer(request)

    if kind == "threads":
        server = grpc.server(ThreadPoolExecutor(16), options=OPTIONS)
        pb_grpc.add_PrefixCacheServiceServicer_to_server(Threaded(), server)
        print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
        server.start()
        server.wait_for_termination()
    else:
        asyncio.run(_serve(Coroutines()))


async def _serve(servicer: Any) -> None:
    server = grpc.aio.server(options=OPTIONS)
    pb_grpc.add_PrefixCacheServiceServicer_to_server(servicer, server)
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
