"""`machine.CacheMachine` on the cache in process."""

from __future__ import annotations

from machine import CacheMachine

TestCacheMachine = CacheMachine.TestCase
