"""The leases of an engine, listed and released, on every route; and what a server adds: pieces, rights, a journal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import counters
from routes import Caller, InProcess, Route
from security_help import ALICE, ENTRIES, MINE, ROOT, THEIRS, write_tokens
from service_process import ServerProcess

from radix_cache.cli.app import app
from radix_cache.cli.leases import listed
from radix_cache.cli.show import make_console
from radix_cache.errors import InvalidArgument, PermissionDenied, UnknownLease
from radix_cache.stats import LeaseInfo
from radix_cache_service import Client

TTL_S = 60
ENGINE = "engine-0123456789abcdef"


@pytest.fixture
def route(open_route: Callable[..., Route]) -> Route:
    return open_route(num_blocks=64, block_size=2, lease_ttl_s=TTL_S)


def leases(caller: Caller, *args: Any) -> list[LeaseInfo]:
    found: list[LeaseInfo] = caller.call("leases", *args)
    return found


def opened(caller: Caller, name: str, **options: Any) -> Any:
    return caller.match_prefix([1, 2, 3, 4, 5], lease_id=name, **{"num_tokens": 6, **options})


def names(found: list[LeaseInfo]) -> list[str]:
    return [info.lease_id for info in found]


def numbers(cached: int, published: int, private: int, redundant: int) -> dict[str, Any]:
    return {
        "num_cached_tokens": cached,
        "num_published_tokens": published,
        "num_private_blocks": private,
        "num_redundant_blocks": redundant,
    }


class TestLeases:
    def test_say_what_each_has_the_oldest_first(self, route: Route) -> None:
        one, two = route.caller("one"), route.caller("two")
        opened(one, "a", namespace=("m", "w7"))
        one.insert("a", [1, 2, 3, 4])
        second = opened(two, "b", namespace=("m", "w7"), max_tokens=2)
        two.insert(second, [1, 2, 3, 4])
        opened(route.caller(), "c", num_tokens=0)
        common = {"namespace": ("m", "w7"), "left_s": TTL_S, "is_promised": False, "is_pin": False}
        expected = [
            LeaseInfo("a", engine_id="one", **numbers(0, 4, 1, 0), **common),
            LeaseInfo("b", engine_id="two", **numbers(2, 4, 1, 1), **common),
            LeaseInfo("c", engine_id=None, **numbers(0, 0, 0, 0), **{**common, "namespace": ()}),
        ]
        assert leases(one) == expected
        assert leases(one, "two") == expected[1:2]
        assert leases(one, "three") == []

    def test_say_how_long_they_live_on(self, route: Route) -> None:
        caller = route.caller("one")
        opened(caller, "a")
        opened(caller, "b")
        caller.renew("b", ttl_s=100)
        opened(route.caller(), "c")
        caller.insert("a", [1, 2])
        route.caller("one").pin([1, 2], 500, lease_id="d")
        route.advance(20)
        found = {info.lease_id: info for info in leases(route.caller())}
        assert {name: info.left_s for name, info in found.items()} == {"a": 40, "b": 80, "c": 40, "d": 480}
        assert [name for name, info in found.items() if info.is_promised] == ["b"]
        assert [name for name, info in found.items() if info.is_pin] == ["d"]
        route.advance(50)
        assert sorted(names(leases(route.caller()))) == ["b", "d"]

    def test_to_list_them_renews_nothing_and_counts_nothing(self, route: Route) -> None:
        opened(route.caller("one"), "a")
        before = route.caller().stats().counters
        route.advance(30)
        leases(route.caller("two"))
        leases(route.caller(), "one")
        route.advance(31)
        assert leases(route.caller()) == []
        assert route.caller().stats().counters == {**before, "num_expired_leases": 1}

    def test_without_a_ttl_they_live_for_ever(self) -> None:
        caller = InProcess(num_blocks=4, block_size=2).caller("one")
        opened(caller, "a", num_tokens=2)
        assert leases(caller)[0].left_s is None


class TestReleaseEngine:
    def test_ends_what_it_has_and_nothing_else(self, route: Route) -> None:
        one, two = route.caller("one"), route.caller("two")
        for number in range(3):
            opened(one, f"one-{number}")
        one.insert("one-0", [1, 2, 3, 4])
        opened(two, "two-0", num_tokens=8)
        assert route.caller().call("release_engine", "one") == 3
        assert names(leases(two)) == ["two-0"]
        found = counters(two.stats())
        assert (found.leased, found.cached, found.protected) == (2, 2, 2)  # two-0 has matched what was published
        for number in range(3):
            with pytest.raises(UnknownLease):
                one.allocate(f"one-{number}", num_tokens=8)
        assert route.caller().call("release_engine", "one") == 0
        opened(one, "again")
        assert names(leases(two, "one")) == ["again"]

    def test_leaves_what_was_handed_over(self, route: Route) -> None:
        caller = route.caller("one")
        opened(caller, "mine")
        opened(caller, "handed over")
        caller.renew("handed over", ttl_s=1000)
        assert caller.call("release_engine", "one") == 1
        assert names(leases(caller)) == ["handed over"]
        route.caller("two").release("handed over")
        assert counters(caller.stats()).leased == 0

    def test_refuses_what_is_no_name(self, route: Route) -> None:
        caller = route.caller()
        opened(caller, "nobody's")
        for name in ("", "x" * 257, 3, None):
            with pytest.raises(InvalidArgument, match="engine_id"):
                caller.call("release_engine", name)
        for name in ("", "x" * 257, 3):
            with pytest.raises(InvalidArgument, match="engine_id"):
                leases(caller, name)
        assert names(leases(caller)) == ["nobody's"]


class TestServer:
    def test_very_many_come_and_go_in_pieces(self) -> None:
        with ServerProcess(num_blocks=700) as server, Client(server.address, engine_id="one") as client:
            for start in (0, 300):
                with client.batch() as batch:
                    for number in range(start, start + 300):
                        batch.match_prefix([], num_blocks=1, lease_id=str(number))
            assert names(client.leases()) == [str(number) for number in range(600)]
            assert client.release_engine("one") == 600
            assert client.stats().num_free_blocks == 700

    def test_what_was_released_stays_so_after_a_crash(self, tmp_path: Path) -> None:
        settings = {"num_blocks": 64, "state_dir": tmp_path / "state"}
        first = ServerProcess(**settings)
        with Client(first.address, engine_id="one") as client:
            kept = client.match_prefix([], num_blocks=2)
            client.renew(kept, ttl_s=1000)
            client.match_prefix([], num_blocks=3)
            assert client.release_engine("one") == 1
            first.stop(signal.SIGKILL)
        with ServerProcess(**settings) as second, Client(second.address) as client:
            assert names(client.leases()) == [kept.lease_id]
            assert client.stats().num_leased_blocks == 2

    def test_a_token_sees_its_own_namespaces(self, tmp_path: Path) -> None:
        entries = [*ENTRIES, {"name": "engine", "token": ENGINE, "namespaces": [()], "rights": ["read", "write"]}]
        path = write_tokens(tmp_path / "tokens.toml", entries)
        with ServerProcess(num_blocks=64, tokens_file=path) as server:
            operator, tenant, engine = (
                Client(server.address, engine_id="e", token=each) for each in (ROOT, ALICE, ENGINE)
            )
            with operator, tenant, engine:
                engine.match_prefix([], MINE, num_blocks=1, lease_id="in a")
                engine.match_prefix([], THEIRS, num_blocks=1, lease_id="in b")
                (name,) = {info.engine_id for info in operator.leases()}
                assert name is not None
                for refused in (engine.leases, lambda: engine.release_engine(name)):
                    with pytest.raises(PermissionDenied):
                        refused()
                assert names(tenant.leases()) == ["in a"]
                assert tenant.release_engine(name) == 1
                assert names(operator.leases(name)) == ["in b"]
                assert operator.release_engine(name) == 1


class TestCommand:
    @pytest.fixture
    def address(self) -> Iterator[str]:
        with ServerProcess(num_blocks=64) as server, Client(server.address, engine_id="llama-0") as client:
            first = client.match_prefix([1, 2], ("m", "w7"), num_tokens=20, lease_id="first")
            client.insert(first, [1, 2])
            handed = client.match_prefix([1, 2, 3], ("m", "w7"), lease_id="second")
            client.renew(handed, ttl_s=500)
            with Client(server.address) as other:
                other.match_prefix([], num_blocks=1, lease_id="third")
                yield server.address

    def printed(self, *arguments: str) -> str:
        result = CliRunner().invoke(app, ["leases", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    def test_table(self, address: str) -> None:
        lines = [line.split() for line in self.printed(address).splitlines() if line.strip()]
        assert lines[0] == ["lease", "engine", "namespace", "cached", "published", "private", "redundant", "left"]
        rows = {line[0]: line[1:] for line in lines[2:]}
        assert rows["first"][:7] == ["llama-0", "('m',", "'w7')", "0", "2", "9", "0"]
        assert rows["second"][-2:] == ["handed", "over"]
        assert rows["third"][:2] == ["-", "()"]
        assert lines[-1] == ["3", "leases"]

    def test_json_of_one_engine(self, address: str) -> None:
        said = json.loads(self.printed(address, "--engine", "llama-0", "--json"))
        assert [each["lease_id"] for each in said] == ["first", "second"]
        assert said[0]["num_private_blocks"] == 9
        assert 0 < said[0]["left_s"] <= TTL_S

    def test_release(self, address: str) -> None:
        assert self.printed(address, "-e", "llama-0", "--release") == "1 lease of engine llama-0 released\n"
        assert json.loads(self.printed(address, "-e", "llama-0", "--release", "--json")) == {"num_released_leases": 0}
        assert [each["lease_id"] for each in json.loads(self.printed(address, "--json"))] == ["second", "third"]

    def test_nobody_releases_all(self, address: str) -> None:
        result = CliRunner().invoke(app, ["leases", address, "--release"])
        assert result.exit_code == 2
        assert "--release needs --engine" in result.output


def test_names_that_are_commands_to_a_terminal_are_shown_as_text() -> None:
    """A client chooses them, and must not forge what an operator sees; nor is a long one cut."""
    name = "a\x1b[31mRED\nfake [bold]row[/bold]" + "x" * 200
    info = LeaseInfo(name, ("n\x1b",), "\x1b]0;title\x07", 0, 0, 0, 0, None, False, False)
    console = make_console()
    with console.capture() as shown:
        console.print(listed([info]))
    text = shown.get()
    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"a\x1b[31mRED\nfake [bold]row[/bold]" + "x" * 200 in text
