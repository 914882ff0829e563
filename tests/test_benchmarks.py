"""Every benchmark runs, at a size whose figures mean nothing. What they measure is never asserted."""

import importlib
import json

import pytest

from benchmarks.__main__ import NAMES
from benchmarks.options import Options
from benchmarks.report import Goal, Row, show
from benchmarks.timing import Spread, Work, measure, ratio, spread


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name):
    rows = importlib.import_module(f"benchmarks.{name}").run(Options("tiny", with_peers=False))
    assert rows
    for row in rows:
        assert all(value.low <= value.median <= value.high for value in row.figures.values())
        json.dumps(row.as_json())


def test_contestants_take_turns_and_the_first_round_is_thrown_away():
    order = []

    def contestant(name):
        return lambda: Work(1, lambda: order.append(name))

    series = measure({name: contestant(name) for name in "abc"}, num_rounds=3)
    assert "".join(order) == "abcbcacababc"
    assert {name: len(values) for name, values in series.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratios_are_taken_within_a_round():
    assert ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == Spread(2, 2, 2)
    assert spread([5.0]) == Spread(5, 5, 5)


def test_the_table_names_what_is_met(capsys):
    goals = (Goal("one", 3.0, 2.0), Goal("other", 3.0, 2.0, is_at_least=True))
    show(
        [Row("row", {"ours": Spread(1, 1, 2), "peer": Spread(3, 3, 3)}, ratios={"peer": Spread(3, 3, 3)}, goals=goals)],
        [],
    )
    shown = capsys.readouterr().out
    assert "one <= 2: 3, NOT met" in shown
    assert "other >= 2: 3, met" in shown
    assert "3x" in shown
