"""Sweeps: rows, resuming after a kill, several processes; and what is compared and drawn of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from client_help import wait_until
from lab_traces import chats

from radix_cache.errors import InvalidArgument, RadixCacheError
from radix_cache.lab import (
    Job,
    Profile,
    TraceError,
    TraceSource,
    compare,
    plan_sweep,
    read_rows,
    replay_in_time,
    replay_policy,
    run_in_processes,
    sweep,
    write_rows,
)
from radix_cache.lab.plot import Line, line_chart
from radix_cache.lab.report import comparison_report
from radix_cache.lab.sweep import play
from radix_cache.lab.writing import as_line

MINE = '''
from radix_cache.policies import ScoredPolicy


class Oldest(ScoredPolicy):
    """Whoever came first goes first, and of these the one that ``sign`` says."""

    name = "oldest"

    def __init__(self, sign: int = 1) -> None:
        super().__init__()
        if isinstance(sign, str):
            raise ValueError("no number")
        self.sign = sign

    def score(self, leaf):
        return self.sign * leaf.created
'''


COMMAND = (sys.executable, "-c", "from radix_cache.cli import main; main()")


@pytest.fixture
def trace(tmp_path: Path) -> TraceSource:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(map(as_line, chats(1, 150))))
    return TraceSource(str(path))


def test_rows_are_replays(trace: TraceSource) -> None:
    jobs = plan_sweep([trace], ["lru", "optimal"], [30, "10%"])
    rows = sweep(jobs)
    assert [(row["policy"], row["num_blocks"]) for row in rows[:2]] == [("lru", 30), ("optimal", 30)]
    assert rows[2]["num_blocks"] == rows[2]["num_trace_blocks"] // 10
    for row in rows:
        found = replay_policy(trace.read(), row["policy"], row["num_blocks"])
        assert row["num_hit_tokens"] == found.whole.num_hit_tokens
        assert row["last_half_block_hit_rate"] == found.last_half.block_hit_rate
        assert row["num_evicted_blocks"] == found.num_evicted_blocks


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_files_are_read_again(trace: TraceSource, tmp_path: Path, suffix: str) -> None:
    rows = sweep(plan_sweep([trace], ["lru"], [30, 60]), out := tmp_path / f"rows{suffix}")
    assert read_rows(out) == rows
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl"] == (
        [] if suffix == ".jsonl" else [out.name]
    )


def test_several_processes_write_the_same_bytes(trace: TraceSource, tmp_path: Path) -> None:
    jobs = plan_sweep([trace], ["lru", "lfu", "optimal"], [20, 40])
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    sweep(jobs, one, lambda missing: run_in_processes(missing, 1))
    sweep(jobs, two, lambda missing: run_in_processes(missing, 2))
    assert one.read_bytes() == two.read_bytes()


def test_what_is_done_is_not_done_again(trace: TraceSource, tmp_path: Path) -> None:
    jobs = plan_sweep([trace], ["lru", "lfu"], [20, 40])
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    sweep(jobs, whole)

    def cut_off(missing: list[Job]) -> object:
        for job in missing[:2]:
            yield job, play(job)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(jobs, out, cut_off)
    partial = tmp_path / "out.jsonl.partial"
    with partial.open("a") as file:
        file.write('["torn')
    seen: list[int] = []
    played: list[Job] = []

    def rest(missing: list[Job]) -> object:
        played.extend(missing)
        return run_in_processes(missing, 1)

    sweep(jobs, out, rest, seen.append)
    assert played == jobs[2:]
    assert seen == [2, 3, 4]
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


def test_another_trace_or_policy_file_is_another_job(trace: TraceSource, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    job = Job(trace, f"{mine}:Oldest", 20)
    before = job.key
    mine.write_text(MINE + "# changed\n")
    changed = job.key
    with Path(trace.path).open("a") as file:
        file.write("\n")
    longer = job.key
    found = Path(trace.path).stat()
    os.utime(trace.path, ns=(found.st_atime_ns, found.st_mtime_ns + 1000))
    assert len({before, changed, longer, job.key}) == 4
    profile = tmp_path / "profile.json"
    keys = set()
    for turns in (2.5, 3.5):
        profile.write_text(json.dumps(replace(Profile(), turns=turns).as_dict()))
        os.utime(profile, ns=(0, 0))
        keys.add(Job(TraceSource(str(profile)), "lru", 20).key)
    assert len(keys) == 2


KILLED = """
import sys, time
from radix_cache.lab import Job, TraceSource, run_in_processes, sweep
from pathlib import Path

def main():
    jobs = [Job(TraceSource(sys.argv[1]), policy, size) for size in range(20, 60) for policy in ("lru", "lfu")]
    def slowly(missing):
        for number, pair in enumerate(run_in_processes(missing, 2)):
            time.sleep(0.02 if number < 40 else 3600)
            yield pair
    sweep(jobs, Path(sys.argv[2]), slowly)

if __name__ == "__main__":
    main()
"""


def test_killed_and_taken_up_again(trace: TraceSource, tmp_path: Path) -> None:
    """SIGKILL half way: the processes end, and the rest gives the bytes of a sweep that nobody disturbed."""
    script, out, whole = tmp_path / "script.py", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    script.write_text(KILLED)
    process = subprocess.Popen([sys.executable, script, trace.path, out], start_new_session=True)
    partial = tmp_path / "out.jsonl.partial"
    deadline = time.monotonic() + 60
    while not partial.exists() or partial.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    num_done = partial.read_bytes().count(b"\n")
    assert 5 <= num_done < 80
    for _ in range(6000):  # the group is empty once its processes have noticed
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("processes live on without their parent")
    jobs = [Job(trace, policy, size) for size in range(20, 60) for policy in ("lru", "lfu")]
    played: list[Job] = []
    sweep(jobs, out, lambda missing: (played.extend(missing), run_in_processes(missing, 1))[1])
    sweep(jobs, whole)
    assert len(played) <= 80 - num_done + 1
    assert out.read_bytes() == whole.read_bytes()


WAITS = """
import os, time
from radix_cache.policies import ScoredPolicy

class Waits(ScoredPolicy):
    name = "waits"

    def score(self, leaf):
        while not os.path.exists(__file__ + ".go"):
            time.sleep(0.01)
        return leaf.created
"""


def test_interrupted_and_taken_up_again(trace: TraceSource, tmp_path: Path) -> None:
    """Ctrl-C, which all processes of a terminal get: they end, whatever they play, and say how to go on."""
    waits, out, whole = tmp_path / "waits.py", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    waits.write_text(WAITS)
    policies = f"lru;{waits}:Waits"
    command = [*COMMAND, "sweep", trace.path, "--policies", policies, "--capacities", "20", "--processes", "2"]
    process = subprocess.Popen([*command, "--out", str(out)], stderr=subprocess.PIPE, text=True, start_new_session=True)
    partial = tmp_path / "out.jsonl.partial"
    wait_until(lambda: partial.exists() and partial.read_bytes().endswith(b"\n"))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.split("\n", 1)[0] == f"what is done is in {partial}: the same command goes on from there"
    assert "Traceback" not in errors
    assert process.returncode == 1
    wait_until(lambda: not is_alive(process.pid))
    (tmp_path / "waits.py.go").touch()
    subprocess.run([*command, "--out", str(out)], check=True)
    sweep(plan_sweep([trace], policies.split(";"), [20]), whole)
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


def is_alive(group: int) -> bool:
    """Whether a process of the group is there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_policy_of_ones_own(trace: TraceSource, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    jobs = plan_sweep([trace], ["fifo", f"{mine}:Oldest", f"{mine}:Oldest:sign=-1", "filo"], [40])
    rows = sweep(jobs, run=lambda missing: run_in_processes(missing, 2))
    fifo, oldest, youngest, filo = (row["num_hit_blocks"] for row in rows)
    assert (oldest, youngest) == (fifo, filo)
    assert fifo != filo


FAILS = """
from radix_cache.policies import ScoredPolicy

class Names(ScoredPolicy):
    name = "names"
    def score(self, leaf):
        return leaf.nothing

class Mixes(ScoredPolicy):
    name = "mixes"
    def score(self, leaf):
        return "a" if leaf.last_access % 2 else 0
"""


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(("name", "where"), [("Names", ", line 7: AttributeError"), ("Mixes", ": TypeError")])
def test_a_policy_that_fails_is_told_with_its_line(
    trace: TraceSource, tmp_path: Path, name: str, where: str, num_processes: int
) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    policy = f"{tmp_path}/fails.py:{name}"
    jobs = plan_sweep([trace], [policy], [20, 40])
    with pytest.raises(RadixCacheError, match=rf"fails\.py:{name}'{where}: ") as caught:
        sweep(jobs, run=partial(run_in_processes, num_processes=num_processes))
    assert caught.value.__cause__ is not None
    with pytest.raises(RadixCacheError, match=rf"fails\.py:{name}'{where}: "):
        replay_in_time(trace.read(), policy, 200)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("./none.py:Mine", "is no file of Python"),
        ("{}/mine.py:None", r"policy '\S+/mine.py:None' cannot be imported"),
        ("{}/mine.py:Oldest:size=2", r"policy '\S+/mine.py:Oldest:size=2': .*unexpected keyword argument 'size'"),
        ("{}/mine.py", "say which class of the file"),
        ("{}/broken.py:Mine", "cannot be run: SyntaxError"),
        ("{}/mine.py:Oldest:sign=a", r"mine.py:Oldest:sign=a', line 13: ValueError: no number"),
        ("best", "neither built in"),
        ("LRU", "nor an entry point; 'lru' is one"),
        ("two_hit", "nor an entry point; 'two-hit' is one"),
        ("optimla", "nor an entry point; 'optimal' is one"),
        ("optimal:seed=1", "optimal stands alone and has no parameters"),
    ],
)
def test_policies_that_are_not_there(trace: TraceSource, tmp_path: Path, policy: str, why: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("def")
    with pytest.raises(RadixCacheError, match=why):
        plan_sweep([trace], [policy.format(tmp_path)], [10])


def test_seeds_are_for_generated_traces(trace: TraceSource, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(replace(Profile(), num_requests=50, block_tokens=64).as_dict()))
    jobs = plan_sweep([trace, TraceSource(str(path))], ["lru"], ["10%"], seeds=[1, 2])
    assert [job.trace.seed for job in jobs] == [0, 1, 2]
    rows = sweep(jobs)
    assert rows[1]["num_hit_tokens"] != rows[2]["num_hit_tokens"]
    recorded, made = compare(rows)
    assert (recorded.trace, made.trace) == ("chats.jsonl", "profile.json")
    (both,) = made.points
    assert (recorded.points[0].num_seeds, both.num_seeds) == (1, 2)
    assert both.rate == pytest.approx((rows[1]["block_hit_rate"] + rows[2]["block_hit_rate"]) / 2)
    assert both.error == pytest.approx(abs(rows[1]["block_hit_rate"] - rows[2]["block_hit_rate"]) / 2)
    assert recorded.points[0].error is None


def test_two_traces_of_one_name_are_two() -> None:
    found = compare([row("lru", 10, 0.2, "a/x.jsonl"), row("lru", 10, 0.4, "b/x.jsonl"), row("lru", 10, 0.4, "b/y")])
    assert [comparison.trace for comparison in found] == ["a/x.jsonl", "b/x.jsonl", "y"]


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "none.jsonl").write_text("\n")
    jobs = plan_sweep([TraceSource(str(path))], ["lru"], [10, 20])
    for num_processes in (1, 2):
        with pytest.raises(InvalidArgument, match=r"none\.jsonl: there is no request in it"):
            sweep(jobs, run=partial(run_in_processes, num_processes=num_processes))


def test_stdin_cannot_be_swept() -> None:
    with pytest.raises(InvalidArgument, match="stdin"):
        plan_sweep([TraceSource("-")], ["lru"], [10])


def test_other_suffixes(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"\.jsonl, \.csv, \.parquet"):
        write_rows(tmp_path / "rows.txt", [])


def test_rows_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"trace": "a"}\n[]\n')
    with pytest.raises(TraceError, match="line 2"):
        read_rows(path)
    with pytest.raises(InvalidArgument, match="no results of a sweep: 'block_hit_rate'"):
        compare([{"trace": "a"}])
    with pytest.raises(InvalidArgument, match="metric is one of"):
        compare([], "page")


# What is compared.


def row(
    policy: str, num_blocks: int, rate: object, trace: str = "a<b", seed: int = 0, block_size: int = 1
) -> dict[str, object]:
    return {
        "trace": trace,
        "seed": seed,
        "block_size": block_size,
        "policy": policy,
        "num_blocks": num_blocks,
        "num_trace_blocks": 100,
        "block_hit_rate": rate,
        "last_half_token_hit_rate": 0.5,
    }


ROWS = [row("lru", 10, 0.2), row("mine", 10, 0.3), row("optimal", 10, 0.6), row("lru", 5, 0.1), row("mine", 5, 0.05)]


def test_the_share_of_the_gap() -> None:
    (found,) = compare(ROWS)
    assert (found.policies, found.capacities) == (["lru", "mine", "optimal"], [5, 10])
    shares = {(p.policy, p.num_blocks): p.gap_closed for p in found.points}
    assert shares["mine", 10] == pytest.approx(0.25)
    assert (shares["lru", 10], shares["optimal", 10]) == (0.0, 1.0)
    assert shares["mine", 5] is None, "nobody knows the optimum there"
    assert found.at("optimal", 5) is None
    assert compare(ROWS, "token", last_half=True)[0].points[0].rate == 0.5


def test_seeds_have_a_mean_and_an_error() -> None:
    """Rates of 10, 20 and 30 %: their standard deviation is 10 points, that of their mean 10 / sqrt(3)."""
    seeds = [row("lru", 10, rate, seed=seed) for seed, rate in enumerate((0.1, 0.2, 0.3))]
    (found,) = compare([*seeds, row("optimal", 10, 0.5), row("mine", 10, 0.35)])
    assert list(map(str, found.points)) == ["20.00 ± 5.77 (0 %)", "50.00 (100 %)", "35.00 (50 %)"]
    html = comparison_report(compare(seeds), "block", "all requests")
    assert "20.00 ± 5.77" in html
    assert "polygon" not in comparison_report(compare(ROWS), "block", "all requests")


def test_a_row_that_is_there_twice_counts_once() -> None:
    """As of two files that have a sweep in common: it is no second seed."""
    (found,) = compare([*ROWS, *ROWS[:2]])
    assert found == compare(ROWS)[0]
    assert found.points[0].error is None
    (found,) = compare([row("lru", 10, 0.2, seed=1), row("lru", 10, 0.2, seed=2)])
    assert str(found.points[0]) == "20.00 ± 0.00"


def test_sizes_of_blocks_are_compared_apart() -> None:
    found = compare([row("lru", 10, rate, "a/x", block_size=size) for size, rate in ((16, 0.2), (8, 0.4))])
    assert [(one.trace, str(one.points[0])) for one in found] == [
        ("x, 16 tokens in a block", "20.00"),
        ("x, 8 tokens in a block", "40.00"),
    ]


@pytest.mark.parametrize(
    ("name", "value"), [("block_hit_rate", "abc"), ("num_blocks", None), ("num_trace_blocks", None)]
)
def test_rows_with_other_than_numbers_are_no_results(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is a number, not {value!r}"):
        compare([{**row("lru", 10, 0.5), name: value}, row("lru", 9, 0.5)])


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_other_bytes_are_no_results(tmp_path: Path, suffix: str) -> None:
    (path := tmp_path / f"rows{suffix}").write_bytes(b"\xff\0garbage\n")
    with pytest.raises(InvalidArgument, match=rf"rows{suffix} is no {suffix} file"):
        read_rows(path)


def test_nothing_lies_between() -> None:
    (found,) = compare([row("lru", 10, 0.2), row("optimal", 10, 0.2), row("lru", 9, None)])
    assert [point.gap_closed for point in found.points] == [None, None, None]
    assert found.points[0].rate == 0.0


def test_the_report_is_one_file_that_loads_nothing() -> None:
    html = comparison_report(compare(ROWS), "block", "all requests")
    tree = ET.fromstring(html.removeprefix("<!DOCTYPE html>\n"))
    assert len(tree.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3
    assert "a&lt;b" in html
    assert "30.00 (25 %)" in html
    assert not any(word in html for word in ("<script", "src=", "href=", "@import", "url("))


def test_a_chart_has_its_points_where_they_belong() -> None:
    svg = line_chart("t", "x", "y", [Line("one", [1, 10, 100], [0, 50, 100], [1, 1, 1])], is_log_x=True, y_high=100)
    tree = ET.fromstring(svg)
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in tree.iter() if c.tag.endswith("circle")]
    (left, bottom), (middle, half), (right, top) = circles
    assert middle == pytest.approx((left + right) / 2, abs=0.2)
    assert half == pytest.approx((top + bottom) / 2, abs=0.2)
    assert "polygon" in svg


def test_a_span_without_round_numbers_is_told_by_its_ends() -> None:
    svg = line_chart("t", "x", "y", [Line("one", [210, 480], [1, 1])], is_log_x=True)
    assert all(f">{text}</text>" in svg for text in ("210", "480"))


def test_a_long_name_is_told_by_its_end() -> None:
    svg = line_chart("t", "x", "y", [Line("./policies/shallow.py:Shallow:bonus=<500>", [1], [1])])
    assert "<title>./policies/shallow.py:Shallow:bonus=&lt;500&gt;</title>….py:Shallow:bonus=&lt;500&gt;</text>" in svg


@pytest.mark.parametrize(
    "lines", [[], [Line("none", [], [])], [Line("one", [5], [0.0])], [Line("log", [0, -1], [1, 2])]]
)
def test_charts_of_nearly_nothing(lines: list[Line]) -> None:
    for is_log_x in (False, True):
        ET.fromstring(line_chart("t", "x", "y", lines, is_log_x=is_log_x))
