"""The one way in, where tokens or limits are set: it asks the guard before a call's message is read, and counts calls.

Health is open to everybody: whoever starts a server must know whether it serves. Where neither is set there is no gate,
unless leases that were brought back need one (`radix_cache_service.access.kept`).
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health

from radix_cache.errors import RadixCacheError
from radix_cache_service.access.guard import Caller, Guard
from radix_cache_service.errors import abort, code_of, to_status

__all__ = ["Gate"]

_OPEN = f"/{health.SERVICE_NAME}/"


class Gate(grpc.aio.ServerInterceptor):
    """Before every method of a server. record: told the method and the status of each refusal."""

    def __init__(self, guard: Guard, record: Callable[[str, str], object]) -> None:
        self._guard = guard
        self._record = record

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Return the method's handler with the guard before it, or one that refuses and reads nothing."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        method = details.method.rpartition("/")[2]
        try:
            caller = self._guard.identify(method, details.invocation_metadata)
        except RadixCacheError as error:
            return self._refusing(method, error)
        return self._counted(method, handler, caller)

    def _refusing(self, method: str, error: RadixCacheError) -> Any:
        async def refuse(_: Any, context: Any) -> None:
            await self._refuse(method, context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)  # any other kind would wait for the message

    def _counted(self, method: str, handler: Any, caller: Caller) -> Any:
        """Return the handler such that its calls count, in the form that it has: a generator or a coroutine."""
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        behavior = getattr(handler, kind)
        is_stream = kind != "unary_unary"

        @asynccontextmanager
        async def counted(context: Any) -> AsyncIterator[None]:
            try:
                self._guard.enter(caller, context, is_stream)
            except RadixCacheError as error:
                await self._refuse(method, context, error)
            try:
                yield
            finally:
                self._guard.leave(caller, is_stream)

        async def answer(request: Any, context: Any) -> Any:
            async with counted(context):
                return await behavior(request, context)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            async with counted(context), aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return handler._replace(**{kind: generate if inspect.isasyncgenfunction(behavior) else answer})

    async def _refuse(self, method: str, context: Any, error: RadixCacheError) -> NoReturn:
        status = to_status(error)
        self._record(method, code_of(status.code).name)
        await abort(context, status)


def _arity(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"
