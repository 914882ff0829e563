"""`machine.CacheMachine` on the cache in process."""

from __future__ import annotations

from calls import Insert, Match, Release, Who
from helpers import Prompt
from machine import CacheMachine

TestCacheMachine = CacheMachine.TestCase

ANY = Who(0)


def test_the_model_follows_a_block_that_is_replaced_in_the_batch_that_handed_it_out() -> None:
    machine = CacheMachine()
    machine.start(
        num_blocks=4,
        block_size=1,
        num_reserved_blocks=0,
        lease_ttl_s=None,
        growth_share=0.0,
        pin_share=0.25,
        limits={},
    )
    insert = Insert(ANY, Prompt((0, 1)), stray=True, over=True)
    for drawn in (Match(Prompt((0, 1)), spare=0), insert, Release(ANY)):
        machine.one(drawn, None, by_id=False)
    machine.batch(drawn=[Match(Prompt((0,)), num_blocks=1, reuse=ANY), insert], engine=None, strict=False, skip=0)
    machine.all_agrees()
    (lease,) = machine.model.leases.values()
    assert len(lease.redundant) == 1
    machine.teardown()
