"""The laboratory: recorded traces, and what a cache would have made of them.

`read_trace` turns a file into requests, `replay` plays them to anything that has the verbs of a cache, a
`radix_cache.PrefixCache` or a server's client alike.
"""

from radix_cache.lab.replay import Hits, ReplayResult, replay
from radix_cache.lab.trace import Request, TraceError, count_requests, read_trace

__all__ = ["Hits", "ReplayResult", "Request", "TraceError", "count_requests", "read_trace", "replay"]
