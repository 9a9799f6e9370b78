"""The store in which the ranks of an attempt find each other, and exchange what they need before they have a group."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, TCPStore

from dtf.core.types import Place


def rank_store(place: Place, timeout_s: float) -> PrefixStore:
    """The store of this attempt. `timeout_s`: how long to wait for a key that nobody has set yet."""
    store: FileStore | TCPStore
    if place.store.startswith("/"):
        store = FileStore(place.store)
        store.set_timeout(timedelta(seconds=timeout_s))
    else:
        host, _, port = place.store.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    return PrefixStore(place.prefix, store)
