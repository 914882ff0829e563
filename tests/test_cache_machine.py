"""`machine.CacheMachine` on the cache in process."""

from __future__ import annotations

from calls import Free, Insert, Match, Release, Who
from helpers import Prompt
from machine import CacheMachine

TestCacheMachine = CacheMachine.TestCase

ANY = Who(0)


def start(block_size: int) -> CacheMachine:
    machine = CacheMachine()
    config = {"num_reserved_blocks": 0, "lease_ttl_s": None, "growth_share": 0.0, "pin_share": 0.25, "limits": {}}
    machine.start(num_blocks=4, block_size=block_size, **config)
    return machine


def publish(machine: CacheMachine, *symbols: int) -> None:
    for drawn in (Match(Prompt(symbols), spare=0), Insert(ANY, Prompt(symbols), stray=True), Release(ANY)):
        machine.one(drawn, None, by_id=False)


def test_the_model_follows_a_block_that_is_replaced_in_the_batch_that_handed_it_out() -> None:
    machine = start(block_size=1)
    publish(machine, 0, 1)
    again = [Match(Prompt((0,)), num_blocks=1, reuse=ANY), Insert(ANY, Prompt((0, 1)), stray=True, over=True)]
    machine.batch(drawn=again, engine=None, strict=False, skip=0)
    machine.all_agrees()
    (lease,) = machine.model.leases.values()
    assert len(lease.redundant) == 1
    machine.teardown()


def test_the_model_follows_a_block_that_is_given_back_in_the_batch_that_handed_it_out() -> None:
    machine = start(block_size=1)
    machine.one(Match(Prompt(()), num_blocks=4), None, by_id=False)
    again = [Release(ANY), Match(Prompt(()), num_blocks=4, reuse=ANY), Free(ANY, 2)]
    machine.batch(drawn=again, engine=None, strict=False, skip=0)
    machine.all_agrees()
    (lease,) = machine.model.leases.values()
    assert len(lease.private) == 2
    machine.teardown()


def test_a_batch_is_repeated_when_a_lease_of_it_has_let_go_of_its_partial_block() -> None:
    machine = start(block_size=2)
    publish(machine, 0, 1)
    machine.batch(drawn=[Match(Prompt((0, 0)), spare=0, partial=True)], engine="E", strict=False, skip=0)
    lease = list(machine.leases.values())[-1]
    assert lease.num_partial_tokens == 1
    machine.one(Insert(ANY, Prompt((0, 0)), stray=True), None, by_id=False)
    assert lease.num_partial_tokens == 0
    machine.repeat_batches()
    machine.all_agrees()
    machine.teardown()
