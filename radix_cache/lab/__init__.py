"""The laboratory: recorded traces, and what a cache would have made of them.

`read_trace` turns a file into requests. `replay_policy` plays them to a new cache with a policy, or finds the offline
`optimal`; `replay` plays them to a cache of yours, a `radix_cache.PrefixCache` or a server's client alike. `lru_curve`
gives LRU at every capacity in one pass.

All answers are frozen dataclasses of plain numbers. Only the standard library is needed.
"""

from radix_cache.lab.blocks import BlockTrace
from radix_cache.lab.compare import Comparison, Point, compare
from radix_cache.lab.curve import Curve, HitCurve, block_curve, lru_curve
from radix_cache.lab.fit import fit
from radix_cache.lab.hits import Hits, ReplayResult
from radix_cache.lab.info import Spread, TraceInfo, trace_info
from radix_cache.lab.likeness import Likeness
from radix_cache.lab.optimal import block_optimal, optimal, plan_ahead
from radix_cache.lab.playing import load_policy, replay_policy
from radix_cache.lab.record import Anonymizer, RecordingCache
from radix_cache.lab.replay import TraceClock, replay
from radix_cache.lab.requests import Request, TraceError, group_ties, in_time_order
from radix_cache.lab.resample import resample
from radix_cache.lab.sampling import Estimate, SampledCurve, sampled_curve
from radix_cache.lab.sources import TraceSource, make_requests, read_profile
from radix_cache.lab.sweep import Job, plan_sweep, run_in_processes, sweep
from radix_cache.lab.synth import Profile, synthesize
from radix_cache.lab.tables import read_rows, write_rows
from radix_cache.lab.timed import Engine, TimedResult, replay_in_time
from radix_cache.lab.trace import TraceReader, count_requests, read_records, read_trace

__all__ = [
    "Anonymizer",
    "BlockTrace",
    "Comparison",
    "Curve",
    "Engine",
    "Estimate",
    "HitCurve",
    "Hits",
    "Job",
    "Likeness",
    "Point",
    "Profile",
    "RecordingCache",
    "ReplayResult",
    "Request",
    "SampledCurve",
    "Spread",
    "TimedResult",
    "TraceClock",
    "TraceError",
    "TraceInfo",
    "TraceReader",
    "TraceSource",
    "block_curve",
    "block_optimal",
    "compare",
    "count_requests",
    "fit",
    "group_ties",
    "in_time_order",
    "load_policy",
    "lru_curve",
    "make_requests",
    "optimal",
    "plan_ahead",
    "plan_sweep",
    "read_profile",
    "read_records",
    "read_rows",
    "read_trace",
    "replay",
    "replay_in_time",
    "replay_policy",
    "resample",
    "run_in_processes",
    "sampled_curve",
    "sweep",
    "synthesize",
    "trace_info",
    "write_rows",
]
