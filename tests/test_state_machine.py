"""`machine.CacheMachine` on a cache that is killed and started again in between: its callers notice nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from kept import KeptRoute
from machine import CacheMachine

pytestmark = pytest.mark.timeout(600)


class KeptMachine(CacheMachine):
    """With a rule more."""

    route_class = KeptRoute

    @rule(num_torn=st.sampled_from([0, 0, 1, 36, 50]))
    def kill_and_restart(self, num_torn: int) -> None:
        """What was answered is still so; each lease has a full ttl."""
        self.route.kept.restart(num_torn)
        by_id = self.route.kept.ledger.cache._executor.leases.by_id
        self.leases = {lease_id: by_id[lease_id] for lease_id in self.leases if lease_id in by_id}
        if self.model.ttl_s is not None:
            self.renew_all()

    @rule()
    def compact(self) -> None:
        """The journal becomes a snapshot; nobody notices."""
        self.route.kept.compact()

    def renew_all(self) -> None:
        """Do in the model what a start does."""
        for lease in self.model.leases.values():
            if lease.engine_id is not None:
                self.model.engines[lease.engine_id] = self.model.now + self.model.ttl_s
            elif not lease.is_pin:
                lease.deadline = max(lease.deadline, self.model.now + self.model.ttl_s)


TestKeptMachine = KeptMachine.TestCase
TestKeptMachine.settings = settings(max_examples=settings().max_examples // 5)
