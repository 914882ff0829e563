"""The files of examples/deploy: alerts, dashboard, unit and Dockerfile fit the server that is here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import promql_parser as promql
import pytest
import yaml
from click.testing import CliRunner
from scraping import read_metrics
from service_process import RouterProcess, ServerProcess

from radix_cache.cli.app import app
from radix_cache_service import Client, ServerConfig
from radix_cache_service.pb import prefix_cache_pb2 as pb

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "examples" / "deploy"
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((DEPLOY / "dashboard.json").read_text())
FROM_PROMETHEUS = {"up": {}}
METHODS = {method.name for method in pb.DESCRIPTOR.services_by_name["PrefixCacheService"].methods}
ADDED_BY_PROMETHEUS = {"job", "instance"}


def targets() -> list[tuple[str, str]]:
    """Every query of the dashboard, by the title of its panel."""
    shown = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    notes = [(note["name"], note["expr"]) for note in DASHBOARD["annotations"]["list"]]
    return shown + notes


QUERIES = [
    (title, query)
    for title, query in [(rule["alert"], rule["expr"]) for rule in RULES] + targets()
    if "radix_cache_router_" not in query or find_spec("dynamo") is not None  # else there is no router to ask
]


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, set[str]]]:
    """What a scrape exports: for each sample's name its labels, for each label its values."""
    with ServerProcess(metrics_listen="127.0.0.1:0") as server:
        with Client(server.address, engine_id="E") as client:
            with client.batch() as batch:
                lease = batch.match_prefix([1, 2, 3], num_tokens=4)
                batch.allocate(lease, num_tokens=6)
            client.release(lease.result())
            client.evict(1)
            client.reset()
        metrics = read_metrics(server.metrics_address)
    if find_spec("dynamo") is not None:
        with RouterProcess(node="a=127.0.0.1:1", metrics_listen="127.0.0.1:0") as router:
            metrics |= read_metrics(router.metrics_address)
    names: dict[str, dict[str, set[str]]] = {name: {} for name, metric in metrics.items() if metric.type == "gauge"}
    for metric in metrics.values():
        for sample in metric.samples:
            for label, value in sample.labels.items():
                names.setdefault(sample.name, {}).setdefault(label, set()).add(value)
            names.setdefault(sample.name, {})
    return names | FROM_PROMETHEUS


def parse(query: str) -> Any:
    return promql.parse(query.replace("$__rate_interval", "5m").replace("$instance", ".*"))


def walk(node: Any) -> Iterator[Any]:
    """Yield the node and all under it."""
    yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if getattr(node, name, None) is not None:
            yield from walk(getattr(node, name))
    for argument in getattr(node, "args", None) or ():
        yield from walk(argument)


def selectors(query: str) -> list[Any]:
    return [node for node in walk(parse(query)) if isinstance(node, promql.VectorSelector)]


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_what_is_asked_for_is_exported(title: str, query: str, exported: dict[str, dict[str, set[str]]]) -> None:
    found = selectors(query)
    assert found, title
    for selector in found:
        assert selector.name in exported
        for matcher in selector.matchers.matchers:
            if matcher.name not in ADDED_BY_PROMETHEUS:
                assert unknown_values(matcher, exported[selector.name]) == set()


@pytest.fixture(scope="module")
def at_first() -> list[Any]:
    """The samples of a server that nobody has called."""
    with ServerProcess(metrics_listen="127.0.0.1:0") as server:
        return [sample for metric in read_metrics(server.metrics_address).values() for sample in metric.samples]


def fits(selector: Any, sample: Any) -> bool:
    return selector.name == sample.name and all(
        re.fullmatch(matcher.value, sample.labels[matcher.name])
        for matcher in selector.matchers.matchers
        if matcher.name not in ADDED_BY_PROMETHEUS
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_counters_that_alerts_go_by_are_there_before_the_first_call(rule: dict[str, Any], at_first: list[Any]) -> None:
    """Of a series that begins at 1 there is no increase, and a sum with one that is not there is nothing."""
    for selector in selectors(rule["expr"]):
        if selector.name.startswith("radix_cache_") and selector.name.endswith("_total"):
            assert any(fits(selector, sample) for sample in at_first), selector.name


def test_each_kind_of_internal_error_is_enough_for_the_alert() -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == "RadixCacheInternalErrors"]
    either = parse(rule["expr"])
    assert str(either.op) == "or"
    for side, name in ((either.lhs, "radix_cache_operations_total"), (either.rhs, "radix_cache_calls_total")):
        assert (str(side.op), side.rhs.val) == (">", 0)
        assert [node.name for node in walk(side) if isinstance(node, promql.VectorSelector)] == [name]


def unknown_values(matcher: Any, labels: dict[str, set[str]]) -> set[str]:
    """The values that the matcher names and the label never has; it may have those of methods not called yet."""
    known = {code.name for code in grpc.StatusCode} if matcher.name == "code" else labels[matcher.name]
    known = known | METHODS if matcher.name == "method" else known
    return {*matcher.value.split("|")} - known


def test_a_misspelt_value_would_be_noticed() -> None:
    (selector,) = selectors('x{state=~"fre|evictable"}')
    assert unknown_values(selector.matchers.matchers[0], {"state": {"free", "evictable"}}) == {"fre"}


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_what_is_grouped_by_is_a_label(title: str, query: str, exported: dict[str, dict[str, set[str]]]) -> None:
    for node in walk(parse(query)):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            for selector in (below for below in walk(node) if isinstance(below, promql.VectorSelector)):
                assert {*node.modifier.labels} <= {*exported[selector.name], *ADDED_BY_PROMETHEUS}, title


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_says_how_bad_and_what(rule: dict[str, Any]) -> None:
    assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"critical", "warning"}
    shown = {name for text in rule["annotations"].values() for name in re.findall(r"\$labels\.(\w+)", text)}
    aggregations = [node for node in walk(parse(rule["expr"])) if isinstance(node, promql.AggregateExpr)]
    kept = {*aggregations[0].modifier.labels} if aggregations else {"instance"}
    assert shown <= kept


def test_the_dashboard_is_put_together_well() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert len({target["refId"] for target in panel.get("targets", ())}) == len(panel.get("targets", ()))


def test_all_that_is_said_of_the_journal_and_the_recording_is_shown(exported: dict[str, dict[str, set[str]]]) -> None:
    queried = {node.name for _, query in targets() for node in walk(parse(query)) if hasattr(node, "name")}
    assert {name for name in exported if re.search("journal|compaction|record", name)} <= queried


# What starts a server.


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """What would have been served."""
    configs: list[ServerConfig] = []
    monkeypatch.setattr("radix_cache_service.server.serve", configs.append)
    return configs


def unit() -> dict[str, str]:
    lines = (DEPLOY / "radix-cache.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_unit_starts_a_server_with_the_file_beside_it(started: list[ServerConfig]) -> None:
    program, *arguments = shlex.split(unit()["ExecStart"])
    assert Path(program).name == "radix-cache"
    arguments = [str(DEPLOY / Path(part).name) if part.endswith(".toml") else part for part in arguments]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (config,) = started
    said = tomllib.loads((DEPLOY / "radix-cache.toml").read_text())
    assert config.listen == tuple(said["listen"]) == ("unix:/run/radix-cache/cache.sock",)
    assert config.metrics_listen == "127.0.0.1:9464"
    assert f"/run/{unit()['RuntimeDirectory']}/" in config.listen[0]
    assert config.state_dir == f"/var/lib/{unit()['StateDirectory']}"
    assert float(unit()["TimeoutStopSec"]) > config.drain_delay_s + config.grace_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "radix-cache.service"
    text = (DEPLOY / path.name).read_text()
    path.write_text(text.replace("/opt/radix-cache/bin/radix-cache", sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def dockerfile() -> list[tuple[str, str]]:
    """The instructions and what they say."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_the_image_starts_a_server_whose_settings_flags_go_before(started: list[ServerConfig]) -> None:
    said = dict(dockerfile())
    environment = dict(part.split("=", 1) for part in shlex.split(said["ENV"]))
    program, *arguments = json.loads(said["ENTRYPOINT"])
    assert program == "radix-cache"
    flags = re.search(r"docker run .* radix-cache (--.*)", (DEPLOY / "Dockerfile").read_text())
    assert flags is not None
    for more in ([], shlex.split(flags[1]), ["--log-format", "text"]):
        result = CliRunner().invoke(app, [*arguments, *more], env=environment)
        assert result.exit_code == 0, result.output
    assert [config.log_format for config in started] == ["json", "json", "text"]
    assert started[0].listen == ("unix:/run/radix-cache/cache.sock",)
    assert started[0].metrics_listen == f"0.0.0.0:{said['EXPOSE']}"


def test_the_image_is_checked_by_a_command_that_works() -> None:
    command = json.loads(dict(dockerfile())["HEALTHCHECK"].partition("CMD ")[2])
    assert command[:2] == ["radix-cache", "stats"]
    with ServerProcess() as server:
        arguments = [server.address if part.startswith("unix:") else part for part in command[1:]]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, arguments).exit_code == 1


def test_the_image_installs_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = re.search(r"/src\[(.*?)\]", " ".join(rest for _, rest in dockerfile()))
    assert installed is not None
    assert {*installed[1].split(",")} <= {*extras}
