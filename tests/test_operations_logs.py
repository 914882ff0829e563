"""What the server logs: the steps of its life, in either form, and nothing of a prompt."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime
from typing import Any

import faulty
import grpc
import pytest
from service_process import ServerProcess, stub_to

from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.telemetry import logs

DEADLINE_S = 60
TOKENS = "3, 1, 3, 3, 7"


def read_json(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_the_steps_of_a_life_as_json(name: signal.Signals) -> None:
    server = ServerProcess(log_format="json", log_level="info", metrics_listen="127.0.0.1:0", drain_delay_s=0.1)
    open_until = threading.Event()
    with stub_to(server.address) as stub:
        session = stub.Session(until(open_until), timeout=DEADLINE_S)
        next(session)
        server.process.send_signal(name)
        with pytest.raises(grpc.RpcError):
            next(session)
        open_until.set()
    status, errors = server.finish()
    assert status == 0
    said = read_json(errors)
    assert [line["message"] for line in said] == [
        "serving",
        "draining: not ready, still serving",
        "draining: streams and waiting calls end, calls in flight finish",
        "ended",
    ]
    assert (said[0]["addresses"], said[0]["metrics"]) == (server.addresses, server.metrics_address)
    assert said[1]["drain_delay_s"] == 0.1
    assert (said[2]["streams"], said[2]["waiting_calls"]) == (1, 0)
    for line in said:
        assert (line["level"], line["logger"]) == ("info", "radix_cache_service.server")
        assert abs((datetime.now(UTC) - datetime.fromisoformat(line["time"])).total_seconds()) < 60


def until(event: threading.Event) -> Any:
    yield pb.SessionRequest(batch=pb.BatchRequest())
    event.wait(DEADLINE_S)


def test_the_steps_as_text() -> None:
    server = ServerProcess(log_level="info")
    _, errors = server.stop()
    assert [line.split(maxsplit=4)[2] for line in errors.splitlines()] == ["INFO"] * 4
    assert f"serving addresses=['{server.address}']" in errors


def test_the_level_is_the_least_that_is_logged() -> None:
    assert ServerProcess(log_level="warning").stop() == (0, "")


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_error_that_quotes_a_prompt_is_logged_without_it(form: str) -> None:
    server = ServerProcess(policy="faulty:Faulty", log_format=form)
    with stub_to(server.address) as stub, pytest.raises(grpc.RpcError):
        faulty.provoke(stub, faulty.RAISES, 31337, timeout=DEADLINE_S)
    _, errors = server.stop()
    assert "ValueError" in errors
    assert "31337" not in errors
    if form == "json":
        (line,) = read_json(errors)
        assert line["level"] == "error"


def formatted(form: str, error: BaseException, **extra: object) -> str:
    """What the log has of an error that was raised."""
    formatter = logs._Json() if form == "json" else logs._Text()
    record = logging.LogRecord(
        "a.b", logging.ERROR, __file__, 1, "it %s", ("broke",), (type(error), error, error.__traceback__)
    )
    vars(record).update(extra)
    return formatter.format(record)


def raised() -> BaseException:
    try:
        try:
            {}[TOKENS]
        except KeyError as cause:
            raise RuntimeError(TOKENS) from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("form", ["text", "json"])
def test_of_an_error_there_are_types_and_places(form: str) -> None:
    text = formatted(form, raised(), count=3)
    assert "KeyError" in text
    assert "RuntimeError" in text
    assert text.index("KeyError") < text.index("RuntimeError"), "the cause first"
    assert "in raised" in text
    assert TOKENS not in text
    assert "it broke" in text
    assert ("count=3" if form == "text" else '"count": 3') in text


@pytest.mark.parametrize(
    "ending", ["raise KeyError(TOKENS)", "threading.Thread(target={}.__getitem__, args=(TOKENS,)).start()"]
)
def test_what_ends_a_process_or_a_thread_is_logged_without_its_text(ending: str) -> None:
    code = f"""
import sys, threading
from radix_cache_service.telemetry.logs import set_up_logging
TOKENS = sys.argv[1]
set_up_logging("json", "error")
{ending}
"""
    ended = subprocess.run([sys.executable, "-c", code, TOKENS], capture_output=True, text=True, check=False)
    (line,) = read_json(ended.stderr)
    assert (line["level"], line["error"].splitlines()[-1]) == ("critical", "builtins.KeyError")
    assert TOKENS not in ended.stderr


def test_json_is_one_line_whatever_is_in_it() -> None:
    line = formatted("json", raised(), note="two\nlines", thing=object())
    assert "\n" not in line
    assert json.loads(line)["note"] == "two\nlines"


def test_an_error_in_a_task_is_logged_without_the_task(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio would print the task, and the error in it."""

    async def fail() -> None:
        raise ValueError(TOKENS)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(logs.log_loop_error)
        task = loop.create_task(fail())
        await asyncio.wait([task])
        del task

    asyncio.run(main())
    (record,) = caplog.records
    assert record.getMessage() == "Task exception was never retrieved"
    assert TOKENS not in formatted("json", record.exc_info[1])
