"""A real model in two engine processes on one pool of KV blocks: what one has computed, the other need not.

``make demo``. Both engines load SmolLM2-135M-Instruct (`chat_model.py`) and map one pool that this process owns; a
server hands out its blocks. Two users talk to a library's assistant, whose system prompt is long, and a router sends
each turn to the other engine. Then every turn is answered again without the cache: the texts must be the same, or the
exit status is 1. What they say is what so small a model can say.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import chat_model
from server_process import running_server

from radix_cache.cli.show import count, make_console, make_table
from radix_cache.errors import InvalidArgument
from radix_cache_service import Client

BLOCK_SIZE = 16
NUM_ENGINES = 2
SYSTEM_PROMPT = (Path(__file__).parent / "library.txt").read_text(encoding="utf-8")
TALKS = {
    "Ada": ["What is the wireless network called?", "How many computers are there?"],
    "Ben": ["Where is the children's room?", "And when is story time?"],
}


class Answer(NamedTuple):
    """What an engine says of one request."""

    text: str
    num_prompt_tokens: int
    num_reused_tokens: int
    num_prefill_tokens: int
    ttft_s: float
    seconds: float


def run_engine(number: int, address: str, connection: Connection) -> None:
    """One engine process: answers messages with the namespace to look them up in, until there are no more."""
    from radix_cache.integrations.transformers import Generator
    from radix_cache.torch_pool import attach_pool

    model, tokenizer = chat_model.load()
    with Client(address, engine_id=f"engine-{number}", timeout_s=30) as client, client.session() as session:
        pool = attach_pool(client.describe().pool_descriptor)
        connection.send("ready")
        while (question := connection.recv()) is not None:
            messages, namespace, max_new_tokens = question
            generator = Generator(model, pool, client, namespace, batch=session.batch)
            started = time.monotonic()
            tokens = chat_model.chat_tokens(tokenizer, messages)
            request = generator.submit(tokens, max_new_tokens, stop_ids={tokenizer.eos_token_id})
            generator.run()
            text = tokenizer.decode(request.new_tokens, skip_special_tokens=True)
            reused, computed = request.num_reused_tokens, request.num_prefill_tokens
            connection.send(Answer(text, len(tokens), reused, computed, request.ttft_s, time.monotonic() - started))


class Engines:
    """The engine processes, to ask one after the other."""

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections, self._processes = [], []
        for number in range(NUM_ENGINES):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_engine, args=(number, address, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        for number in range(NUM_ENGINES):
            self._hear(number)

    def ask(self, number: int, messages: list[dict[str, str]], namespace: tuple[str, ...], max_new: int) -> Answer:
        self._connections[number].send((messages, namespace, max_new))
        return self._hear(number)

    def _hear(self, number: int) -> Any:
        try:
            return self._connections[number].recv()
        except EOFError:
            sys.exit(f"engine-{number} failed: see above")

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                connection.send(None)
            process.join(timeout=30)


class Turn(NamedTuple):
    """One question: who asked, the conversation so far, which engine answered, and what."""

    user: str
    messages: list[dict[str, str]]
    engine: int
    answer: Answer


def talk(engines: Engines, console: Any, max_new: int) -> list[Turn]:
    """Let the users ask in turn; each next question goes to the other engine."""
    histories = {user: [{"role": "system", "content": SYSTEM_PROMPT}] for user in TALKS}
    turns: list[Turn] = []
    for number in range(max(map(len, TALKS.values()))):
        for place, (user, questions) in enumerate(TALKS.items()):
            engine = (number + place) % NUM_ENGINES
            messages = [*histories[user], {"role": "user", "content": questions[number]}]
            answer = engines.ask(engine, messages, chat_model.NAMESPACE, max_new)
            console.print(f"[bold]{user}[/]: {questions[number]}", highlight=False)
            console.print(f"[dim]engine-{engine}[/]: {answer.text}\n", highlight=False)
            histories[user] = [*messages, {"role": "assistant", "content": answer.text}]
            turns.append(Turn(user, messages, engine, answer))
    return turns


def again(engines: Engines, turns: list[Turn], max_new: int) -> list[Answer]:
    """Answer every turn once more, each in a namespace of its own, where nothing is cached."""
    return [
        engines.ask(turn.engine, turn.messages, (*chat_model.NAMESPACE, f"without-cache-{number}"), max_new)
        for number, turn in enumerate(turns)
    ]


def print_turns(console: Any, turns: list[Turn], without: list[Answer]) -> bool:
    table = make_table("turn", "engine", "prompt", "reused", "computed", "first token", "without cache", "", "text")
    same = []
    for turn, cold in zip(turns, without, strict=True):
        answer = turn.answer
        same.append(answer.text == cold.text and cold.num_reused_tokens == 0)
        same.append(answer.num_prefill_tokens == answer.num_prompt_tokens - answer.num_reused_tokens)
        table.add_row(
            turn.user,
            str(turn.engine),
            *map(count, (answer.num_prompt_tokens, answer.num_reused_tokens, answer.num_prefill_tokens)),
            f"{answer.ttft_s:.2f} s",
            f"{cold.ttft_s:.2f} s",
            f"{cold.ttft_s / answer.ttft_s:.1f}x",
            "the same" if answer.text == cold.text else "BROKEN",
        )
    console.print(table)
    return all(same)


def demo(settings: argparse.Namespace) -> bool:
    from radix_cache.torch_pool import KVLayout, share_pool, size_pool

    console = make_console()
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=BLOCK_SIZE, dtype="float32")
    size = size_pool(layout, settings.memory)
    console.print(f"One pool: {size}\n", highlight=False)
    with contextlib.ExitStack() as stack:
        try:
            pool = stack.enter_context(share_pool(layout, size.num_blocks, num_reserved_blocks=1))
        except InvalidArgument:  # /dev/shm is small in many containers
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pool = stack.enter_context(share_pool(layout, size.num_blocks, num_reserved_blocks=1, path=folder / "pool"))
        options = [f"--num-blocks={size.num_blocks}", f"--block-size={BLOCK_SIZE}", "--num-reserved-blocks=1"]
        options += [f"--pool-descriptor={pool.descriptor.to_json()}", "--log-level=warning"]
        with running_server(*options) as address:
            console.print(f"{NUM_ENGINES} engine processes load SmolLM2-135M-Instruct ...\n")
            engines = Engines(address)
            try:
                turns = talk(engines, console, settings.new_tokens)
                console.print("The same again, without the cache ...\n")
                without = again(engines, turns, settings.new_tokens)
            finally:
                engines.close()
            with Client(address) as client:
                stats = client.stats()
    is_good = print_turns(console, turns, without)
    is_settled = stats.num_leases == stats.num_leased_blocks == 0
    console.print(f"\n{stats.num_free_blocks} free + {stats.num_cached_blocks} cached = {size.num_blocks - 1} blocks")
    console.print("holds: the texts are identical" if is_good and is_settled else "BROKEN", style="bold")
    return is_good and is_settled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=32, help="of each answer, at most (%(default)s)")
    parser.add_argument("--memory", default="256 MiB", help="for the pool (%(default)s)")
    settings = parser.parse_args()
    if (what := chat_model.missing()) is not None:
        print(f"no real model here: {what}", file=sys.stderr)
        return 3
    try:
        return 0 if demo(settings) else 1
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
