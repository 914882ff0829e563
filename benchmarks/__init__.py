"""Benchmarks: ours and its peers, measured in one run. ``python -m benchmarks list`` names them.

Reading order: `timing` (how anything is measured), `caches` and `sglang` (who is measured), then one module for each
question, and `report` (what is made of the answers).

What they do not do: assert anything about time. A figure depends on the machine, and the table names it.
"""
