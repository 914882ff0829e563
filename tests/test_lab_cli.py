"""The lab's commands: what they print, what they write, and what they refuse."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result
from lab_traces import chats, tokens
from test_lab_sweep import MINE

from radix_cache.cli.app import app
from radix_cache.lab import Profile, lru_curve, read_profile, read_rows, read_trace, replay_policy
from radix_cache.lab.writing import as_line

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in a folder with ``chats.jsonl.gz``, ``words.jsonl`` and ``mine.py``."""
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl.gz").write_bytes(gzip.compress("".join(map(as_line, chats(1, 120))).encode()))
    Path("words.jsonl").write_text("".join(as_line(tokens(list(range(n)), [1, 2])) for n in (40, 80, 60)))
    Path("mine.py").write_text(MINE)

    def run_one(*arguments: str, is_good: bool = True, stdin: bytes | None = None) -> Result:
        result = CliRunner().invoke(app, arguments, input=stdin)
        assert (result.exit_code == 0) is is_good, result.output
        return result

    return run_one


def is_drawn(path: str, num_charts: int) -> None:
    tree = ET.fromstring(Path(path).read_text().removeprefix("<!DOCTYPE html>\n"))
    assert len(tree.findall(".//{http://www.w3.org/2000/svg}svg")) == num_charts


class TestTraceInfo:
    def test_printed_and_drawn(self, run: Run) -> None:
        output = run("trace", "info", "chats.jsonl.gz", "--html", "info.html").output
        assert "conversations (a guess)" in output
        assert f"{lru_curve(chats(1, 120)).num_blocks:,}" in output
        is_drawn("info.html", 4)
        assert re.search(r">requests in [\d.]+ s<", Path("info.html").read_text())

    def test_json_from_stdin(self, run: Run) -> None:
        shown = json.loads(run("trace", "info", "-", "--json", stdin=Path("chats.jsonl.gz").read_bytes()).output)
        assert shown["num_requests"] == 120

    def test_nothing(self, run: Run) -> None:
        assert "there is no request in it" in run("trace", "info", "-", stdin=b"", is_good=False).output

    def test_a_bad_line_is_named(self, run: Run) -> None:
        assert "stdin, line 2: not JSON" in run("trace", "info", "-", stdin=b'{"tokens": [1]}\n{', is_good=False).output


class TestReplay:
    @pytest.mark.parametrize("policy", ["optimal", "./mine.py:Oldest", "lfu"])
    def test_policies(self, run: Run, policy: str) -> None:
        shown = json.loads(run("replay", "chats.jsonl.gz", "--num-blocks", "40", "--policy", policy, "--json").output)
        assert shown["whole"] == replay_policy(chats(1, 120), policy, 40).whole.as_dict()

    def test_in_time(self, run: Run) -> None:
        arguments = ("replay", "chats.jsonl.gz", "--num-blocks", "200", "--in-time", "--decode-rate", "50")
        assert "requests and" in run(*arguments).output
        shown = json.loads(run(*arguments, "--json", "--holds", "prefill").output)
        assert shown["max_running"] >= 1
        assert shown["wait_s"]["mean"] >= 0

    def test_stdin(self, run: Run) -> None:
        data = Path("chats.jsonl.gz").read_bytes()
        assert "stdin: lru, 40 blocks" in run("replay", "-", "--num-blocks", "40", stdin=data).output

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            (("--policy", "./none.py:Mine"), "./none.py is no file of Python"),
            (("--policy", "optimal", "--in-time"), "optimal knows no time"),
            (("--tokenizer", "./mine.py:none"), "cannot be imported"),
            (("--reader", "mine"), "cannot be imported"),
            (("--policy", "optimla"), "'optimal' is one"),
        ],
    )
    def test_refused(self, run: Run, arguments: tuple[str, ...], why: str) -> None:
        assert why in run("replay", "chats.jsonl.gz", "--num-blocks", "40", *arguments, is_good=False).output

    @pytest.mark.parametrize(
        ("body", "why"),
        [
            ("return None", "returns a NoneType, not requests"),
            ("yield {}", "yields a dict as number 1, no Request"),
            ("yield path.nothing", "line 2: AttributeError: 'str' object has no attribute 'nothing'"),
        ],
    )
    def test_readers_that_read_no_requests(self, run: Run, body: str, why: str) -> None:
        Path("own.py").write_text(f"def read(path):\n    {body}\n")
        output = run("replay", "words.jsonl", "--reader", "own.py:read", "--num-blocks", "9", is_good=False).output
        assert f"reader 'own.py:read' {why}" in output.replace("read', line", "read' line")

    def test_a_tokenizer_that_fails(self, run: Run) -> None:
        Path("own.py").write_text("def spell(text):\n    return text.nothing\n")
        chat = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
        output = run("curve", "-", "--tokenizer", "own.py:spell", stdin=chat, is_good=False).output
        assert "Error: tokenizer 'own.py:spell', line 2: AttributeError" in output

    def test_a_reader_and_a_tokenizer_of_ones_own(self, run: Run) -> None:
        Path("own.py").write_text(
            "from radix_cache.lab import Request, read_records\n"
            "from radix_cache.tokens import pack_tokens\n"
            "def read(path):\n"
            "    return read_records(path, lambda f: Request(0, len(f['ids']), 0, pack_tokens(f['ids'])))\n"
            "def code_points(text):\n"
            "    return list(map(ord, text))\n"
        )
        lines = b'{"ids": [1, 2]}\n{"ids": [1, 2, 3]}\n'
        options = ("--num-blocks", "9", "--block-size", "1", "--json")
        shown = json.loads(run("replay", "-", "--reader", "own.py:read", *options, stdin=lines).output)
        assert shown["whole"]["num_hit_tokens"] == 2
        chat = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode() + b"\n"
        shown = json.loads(run("replay", "-", "--tokenizer", "own.py:code_points", *options, stdin=chat * 2).output)
        assert shown["whole"]["num_hit_blocks"] == 9


class TestCurve:
    def test_printed_drawn_and_written(self, run: Run) -> None:
        shown = run("curve", "chats.jsonl.gz", "--out", "curve.csv", "--html", "curve.html", "--capacities", "30,50%")
        assert "30" in shown.output
        rows = read_rows(Path("curve.csv"))
        curve = lru_curve(chats(1, 120))
        assert len(rows) == curve.num_blocks + 1
        assert rows[30]["block_hit_rate"] == curve.whole.at(30).block_hit_rate
        assert rows[30]["last_half_token_hit_rate"] == curve.last_half.at(30).token_hit_rate
        is_drawn("curve.html", 1)

    def test_sampled(self, run: Run) -> None:
        arguments = ("curve", "chats.jsonl.gz", "--sample", "0.5", "--json", "--html", "curve.html")
        (row, *_) = json.loads(run(*arguments).output)["capacities"]
        assert set(row) == {
            "num_blocks", "sampled_block_hit_rate", "block_error", "sampled_token_hit_rate", "token_error",
        }  # fmt: skip
        (row, *_) = json.loads(run(*arguments, "--check").output)["capacities"]
        assert row["block_hit_rate"] == pytest.approx(row["sampled_block_hit_rate"], abs=0.2)
        is_drawn("curve.html", 1)

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            (("--check",), "--check goes with --sample"),
            (("--capacities", "x"), "not 'x'"),
            (("--out", "curve.txt"), "results are .jsonl"),
            (("--sample", "1.5"), "--sample"),
            (("--sample", "1e-9"), "--sample 1e-09: of"),
            (("--capacities", "5%,0%"), "more than 0 % of the different blocks, not '0%'"),
            (("--capacities", "-5%"), "more than 0 % of the different blocks, not '-5%'"),
            (("--capacities", "nan%"), "not 'nan%'"),
            (("--out", "none/curve.csv"), "none/curve.csv: there is no directory none"),
            (("--html", "none/curve.html"), "none/curve.html: there is no directory none"),
        ],
    )
    def test_refused(self, run: Run, arguments: tuple[str, ...], why: str) -> None:
        assert why in run("curve", "chats.jsonl.gz", *arguments, is_good=False).output

    def test_capacities_that_are_the_same_are_one(self, run: Run) -> None:
        shown = json.loads(run("curve", "words.jsonl", "--capacities", "1%,2%,1", "--json").output)
        assert [row["num_blocks"] for row in shown["capacities"]] == [1]

    @pytest.mark.parametrize("more", [(), ("--sample", "0.5")])
    def test_nothing(self, run: Run, more: tuple[str, ...]) -> None:
        assert "stdin: there is no request in it" in run("curve", "-", *more, stdin=b"\n", is_good=False).output

    def test_a_trace_is_not_written_over(self, run: Run) -> None:
        before = Path("words.jsonl").read_bytes()
        for command in (("curve",), ("sweep", "--capacities", "5")):
            output = run(*command, "./words.jsonl", "--out", "words.jsonl", is_good=False).output
            assert "--out words.jsonl is the trace itself" in output
        assert Path("words.jsonl").read_bytes() == before


class TestSweepAndCompare:
    def test_from_trace_to_report(self, run: Run) -> None:
        policies = "lru;./mine.py:Oldest:sign=-1;optimal"
        arguments = ("sweep", "chats.jsonl.gz", "words.jsonl", "--policies", policies, "--capacities", "20%,40%")
        assert run(*arguments, "--processes", "1", "--out", "rows.jsonl").output == "rows.jsonl: 12 rows\n"
        shown = run("compare", "rows.jsonl", "--html", "report.html").output
        assert "chats.jsonl.gz" in shown
        assert "./mine.py:Oldest:sign=-1" in shown
        assert "(100 %)" in shown
        is_drawn("report.html", 2)
        points = json.loads(run("compare", "rows.jsonl", "--json", "--metric", "token", "--last-half").output)
        assert points[0]["points"][0]["rate"] == read_rows(Path("rows.jsonl"))[0]["last_half_token_hit_rate"]

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            (("--policies", "best"), "neither built in"),
            (("--capacities", "0"), "capacity"),
            (("--seeds", "x"), "a seed is an integer"),
            (("--out", "rows.txt"), "results are .jsonl"),
        ],
    )
    def test_refused(self, run: Run, arguments: tuple[str, ...], why: str) -> None:
        assert why in run("sweep", "chats.jsonl.gz", "--out", "rows.csv", *arguments, is_good=False).output

    def test_other_files_are_no_results(self, run: Run) -> None:
        assert "these are no results of a sweep" in run("compare", "words.jsonl", is_good=False).output
        Path("none.csv").touch()
        assert "there is no row in none.csv" in run("compare", "none.csv", is_good=False).output


class TestSynth:
    def test_knobs(self, run: Run) -> None:
        run("trace", "synth", "--set", "num_requests=20", "--set", "turns=2", "--seed", "4", "--out", "made.jsonl")
        assert len(list(read_trace("made.jsonl"))) == 20
        run("trace", "synth", "--set", "turns=2.5", "--save-profile", "knobs.json")
        knobs = read_profile("knobs.json")
        assert isinstance(knobs, Profile)
        assert knobs.turns == 2.5
        assert len(run("trace", "synth", "--profile", "knobs.json", "--set", "num_requests=3").output.splitlines()) == 3

    def test_like(self, run: Run) -> None:
        run("trace", "synth", "--like", "chats.jsonl.gz", "--save-profile", "like.json", "--out", "made.jsonl")
        assert len(list(read_trace("made.jsonl"))) == 120
        assert run("trace", "synth", "--profile", "like.json").output == Path("made.jsonl").read_text()
        run("trace", "synth", "--profile", "like.json", "--set", "num_requests=7", "--out", "few.jsonl")
        assert len(list(read_trace("few.jsonl"))) == 7

    def test_fit(self, run: Run) -> None:
        run("trace", "synth", "--fit", "chats.jsonl.gz", "--save-profile", "knobs.json", "--out", "made.jsonl")
        assert read_profile("knobs.json").num_requests == len(list(read_trace("made.jsonl"))) == 120

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            (("--set", "turn=2"), "there is no knob 'turn'"),
            (("--set", "turns=many"), "turns is a number, not 'many'"),
            (("--set", "num_requests=1e3"), "num_requests is an integer, not '1e3'"),
            (("--set", "turns=0"), "turns is a number of at least 1"),
            (("--like", "chats.jsonl.gz", "--set", "turns=3"), "there is no knob 'turns' here, only num_requests"),
            (("--like", "chats.jsonl.gz", "--profile", "chats.jsonl.gz"), "one of --like, --fit and --profile"),
        ],
    )
    def test_refused(self, run: Run, arguments: tuple[str, ...], why: str) -> None:
        assert why in run("trace", "synth", *arguments, is_good=False).output


class TestRecord:
    def test_the_same_hits_without_the_tokens(self, run: Run) -> None:
        run("trace", "record", "words.jsonl", "--block-size", "20", "--out", "shared.jsonl")
        hidden = list(read_trace("shared.jsonl"))
        assert [request.num_prompt_tokens for request in hidden] == [40, 80, 60]
        assert "tokens" not in Path("shared.jsonl").read_text().replace("output_length", "")
        shown = json.loads(run("replay", "shared.jsonl", "--num-blocks", "9", "--json").output)
        assert shown["whole"]["num_hit_tokens"] == 40 + 60

    def test_in_place_and_all_or_nothing(self, run: Run) -> None:
        run("trace", "record", "words.jsonl", "--out", "words.jsonl")
        assert [request.num_prompt_tokens for request in read_trace("words.jsonl")] == [40, 80, 60]
        Path("torn.jsonl").write_text('{"tokens": [1]}\n{')
        before = sorted(Path().iterdir())
        run("trace", "record", "torn.jsonl", "--out", "shared.jsonl", is_good=False)
        assert sorted(Path().iterdir()) == before

    def test_a_link_goes_on_to_lead_to_what_is_written(self, run: Run) -> None:
        Path("kept.jsonl").write_text("old\n")
        Path("latest.jsonl").symlink_to("kept.jsonl")
        run("trace", "record", "words.jsonl", "--out", "latest.jsonl")
        assert Path("latest.jsonl").is_symlink()
        assert len(Path("kept.jsonl").read_text().splitlines()) == 3

    def test_a_disk_that_is_full(self, run: Run) -> None:
        assert run("trace", "synth", "--out", "/dev/full", is_good=False).output == (
            "Error: /dev/full: No space left on device\n"
        )

    def test_refused(self, run: Run) -> None:
        Path("salt").write_bytes(b"short")
        assert "16 to 64" in run("trace", "record", "words.jsonl", "--salt-file", "salt", is_good=False).output
        assert "hash ids" in run("trace", "record", "chats.jsonl.gz", is_good=False).output
