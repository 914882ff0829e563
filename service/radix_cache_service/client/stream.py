"""The stream under a session: messages out, answers in, in the same order."""

from __future__ import annotations

import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc

from radix_cache.errors import DeadlineExceeded, RadixCacheError, ServiceUnavailable
from radix_cache.operations import Outcome
from radix_cache_service.client.exchange import Exchange
from radix_cache_service.errors import REFUSALS, from_call_error, from_status
from radix_cache_service.pb import prefix_cache_pb2 as pb

if TYPE_CHECKING:
    from radix_cache_service.client.blocking import Client

__all__ = ["Answer", "Stream"]

_inherited: list[Stream] = []


class Answer:
    """What a message came to, or will."""

    def __init__(self, stream: Stream, exchange: Exchange) -> None:
        self.exchange = exchange
        self.outcomes: list[Outcome] | None = None
        self.error: RadixCacheError | None = None
        self._stream = stream

    @property
    def is_there(self) -> bool:
        """Tell whether waiting is over."""
        return self.outcomes is not None or self.error is not None

    def wait(self) -> list[Outcome]:
        """Return the outcomes, or raise what the message as a whole ended in."""
        self._stream.read_up_to(self)
        if self.error is not None:
            raise self.error
        assert self.outcomes is not None
        return self.outcomes


class Stream:
    """One stream of a client's. It sends from any one thread at a time, and reads from any.

    stub: what it was opened on.
    """

    def __init__(self, stub: Any, client: Client) -> None:
        self.stub = stub
        self._client = client
        self._outgoing: SimpleQueue[pb.SessionRequest | None] = SimpleQueue()
        self._call = stub.Session(iter(self._outgoing.get, None), metadata=client._metadata)
        self._unanswered: deque[Answer] = deque()
        self._reading = threading.Lock()
        self._waiting_since: float | None = None
        self._is_late = False
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._watcher = threading.Thread(target=self._watch, name="radix-cache session", daemon=True)
        self._watcher.start()

    @property
    def is_ours(self) -> bool:
        """Tell whether it was opened in this process."""
        return self._pid == os.getpid()

    @property
    def is_active(self) -> bool:
        """Tell whether it can still be used, as far as is known."""
        return bool(self._call.is_active())

    def send(self, exchange: Exchange) -> Answer:
        """Send a message; its answer can be waited for."""
        answer = Answer(self, exchange)
        self._unanswered.append(answer)
        self._outgoing.put(pb.SessionRequest(batch=exchange.request))
        return answer

    def read_up_to(self, answer: Answer) -> None:
        """Read until this answer is there."""
        while not answer.is_there:
            with self._reading:
                if not answer.is_there:
                    self._read_one()

    def end(self) -> None:
        """Read what is still to come, and end the stream."""
        self._outgoing.put(None)
        if self._unanswered:
            self.read_up_to(self._unanswered[-1])
        self._ended.set()
        self._call.cancel()
        self._watcher.join()

    def give_up(self) -> None:
        """It is broken: so are all the answers that are not there. One of the parent process's is left alone."""
        if not self.is_ours:
            _inherited.append(self)  # to end it could hang
            return
        self._ended.set()
        self._call.cancel()
        with self._reading:
            self._break(ServiceUnavailable("the stream broke"))

    # Reading, by whoever has the lock.

    def _read_one(self) -> None:
        self._waiting_since = self._client._books.clock()
        try:
            response = next(self._call)
        except StopIteration:
            self._break(ServiceUnavailable("the server ended the stream"))
        except grpc.RpcError as error:
            self._break(self._meaning(error))
        except BaseException:
            self._call.cancel()
            self._break(ServiceUnavailable("a wait for an answer was interrupted"))
            raise
        else:
            self._take(response)
        finally:
            self._waiting_since = None

    def _take(self, response: pb.SessionResponse) -> None:
        answer = self._unanswered.popleft()
        try:
            with answer.exchange:
                if response.HasField("error"):
                    raise from_status(response.error)
                if self._client._is_news(answer.exchange, response.batch.state):
                    self._client.describe()
                answer.outcomes = answer.exchange.answered(response.batch)
        except RadixCacheError as error:
            answer.error = error

    def _break(self, error: RadixCacheError) -> None:
        self._ended.set()
        while self._unanswered:
            answer = self._unanswered.popleft()
            answer.exchange.failed(error)
            answer.error = error

    def _meaning(self, error: grpc.RpcError) -> RadixCacheError:
        if self._is_late:
            return DeadlineExceeded(f"no answer in the session for {self._client.timeout_s} s")
        found = from_call_error(error)
        return found if isinstance(found, (ServiceUnavailable, *REFUSALS)) else ServiceUnavailable(str(found))

    def _watch(self) -> None:
        """End the stream when a reader has waited too long. Wakes rarely: no wait that begins later ends earlier."""
        now = self._client._books.clock
        while not self._ended.wait(self._patience_s()) and self.is_active:
            since = self._waiting_since
            if since is not None and now() >= since + self._client.timeout_s:
                self._is_late = True
                self._call.cancel()
                return

    def _patience_s(self) -> float:
        since = self._waiting_since
        left = self._client.timeout_s
        return left if since is None else max(since + left - self._client._books.clock(), 0.0)
