"""OpenTelemetry spans: one for each call and for each batch of a session, in the caller's trace where it has one.

Off unless the settings name an endpoint, and only then is anything of OpenTelemetry imported (the extra ``otel``). The
instrumentation that OpenTelemetry has for grpc.aio iterates over what a stream's handler returns, and `Session` returns
nothing, it writes; it would make one span of a session that lasts for days; and it puts the texts of errors into spans.
These have the method, the status and the time waited for blocks, and nothing of the request.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import grpc

from radix_cache import __version__
from radix_cache.errors import InvalidArgument
from radix_cache_service.pb import prefix_cache_pb2 as pb

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace import Span, SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise InvalidArgument(
        f"otlp_endpoint is set, and {error.name} is not installed: pip install 'radix-cache[otel]'"
    ) from error

__all__ = ["Tracing"]

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["PrefixCacheService"].full_name
_FAULTS: Final = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
_LAST_WORDS_S: Final = 2.0


class Tracing:
    """Sends spans to ``endpoint`` (OTLP over gRPC) from a thread of its own.

    share: of the calls whose caller does not say whether they are traced.
    """

    def __init__(self, endpoint: str, share: float) -> None:
        resource = Resource.create({"service.name": "radix-cache", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(share)))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("radix_cache_service", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, context: Any) -> _Traced:
        """Return the span of a call, begun. context: its servicer context, or None."""
        span = self._tracer.start_span(
            f"{_SERVICE}/{method}",
            context=self._parent(context),
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": method},
        )
        return _Traced(span)

    def _parent(self, context: Any) -> Context:
        metadata = () if context is None else context.invocation_metadata() or ()
        return self._propagator.extract({key: value for key, value in metadata if isinstance(value, str)}, Context())

    def close(self) -> None:
        """Send what is left, for as long as `_LAST_WORDS_S`; a collector that is gone holds nobody up."""
        sender = threading.Thread(target=self._provider.shutdown, daemon=True)
        sender.start()
        sender.join(_LAST_WORDS_S)


class _Traced:
    """A span and its end."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def finish(self, code: str, waited_s: float) -> None:
        """End the span with the status of the call."""
        self._span.set_attribute("rpc.grpc.status_code", grpc.StatusCode[code].value[0])
        if waited_s:
            self._span.set_attribute("radix_cache.waited_s", waited_s)
        if code in _FAULTS:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
