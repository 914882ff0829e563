"""What a namespace is called where there is room for one name only: by whoever publishes events and whoever asks."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

from radix_cache.operations import Namespace

__all__ = ["lora_name_of"]


@lru_cache(maxsize=1024)
def lora_name_of(namespace: Namespace) -> str | None:
    """Return the one name that stands for a namespace: its parts with slashes between, None for the empty one.

    What is in a part and no letter, digit or ``-._~`` is written as in a URL, an empty part as ``%``: two namespaces
    have two names.
    """
    return "/".join(quote(part, safe="", errors="surrogatepass") or "%" for part in namespace) or None
