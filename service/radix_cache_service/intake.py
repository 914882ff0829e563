"""What comes in at the port, before a handler sees it: bytes that are no message of the method's type are refused.

grpc would answer UNKNOWN, with the text of an exception, and count it nowhere. Services are added to a `Registry` in
place of the server; each method then gets its message, or is not called at all. A stream goes on past such bytes if
its handler says so: it reads them as `MALFORMED`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError

__all__ = ["MALFORMED", "Registry"]

MALFORMED: Final = object()
"""Read from a stream in place of a message."""

_TEXT = "the bytes of the request are no message of this method's type"


class Registry:
    """Where the generated code adds a service. record: told the method and INVALID_ARGUMENT of each refusal."""

    def __init__(self, server: Any, record: Callable[[str, str], object] = lambda *_: None) -> None:
        self._server = server
        self._record = record

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of a service."""
        guarded = {name: self._guarded(name, handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: the generated code adds the same methods by their names as well."""

    def _guarded(self, name: str, handler: Any) -> Any:
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        behavior = self._wrapped(name, getattr(handler, kind), handler.request_streaming)
        return make(behavior, _lenient(handler.request_deserializer), handler.response_serializer)

    def _wrapped(self, name: str, behavior: Callable[..., Any], is_stream: bool) -> Callable[..., Any]:
        """Return the method with a check before it, in the form that it has: a generator or a coroutine."""

        async def answer(request: Any, context: Any) -> Any:
            if request is MALFORMED:
                await self._refuse(name, context)
            return await behavior(self._messages(name, request, context) if is_stream else request, context)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            if request is MALFORMED:
                await self._refuse(name, context)
            messages = self._messages(name, request, context) if is_stream else request
            async with aclosing(behavior(messages, context)) as responses:
                async for response in responses:
                    yield response

        return generate if inspect.isasyncgenfunction(behavior) else answer

    async def _messages(self, name: str, requests: Any, context: Any) -> AsyncIterator[Any]:
        """Yield what a stream brings, for handlers that iterate."""
        async for request in requests:
            if request is MALFORMED:
                await self._refuse(name, context)
            yield request

    async def _refuse(self, name: str, context: Any) -> NoReturn:
        self._record(name, grpc.StatusCode.INVALID_ARGUMENT.name)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _TEXT)
        raise AssertionError("to abort raises")


def _arity(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return MALFORMED

    return read
