"""A toy recipe whose rank 1 leaves instead of meeting the others, and whose rank 0 says when it waits for it in C."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch import distributed

from dtf.core.errors import Exit
from tests.support import toy  # noqa: F401 - registers the recipe


def _wait(backend: str, store: Any, rank: int, **options: Any) -> None:
    if rank == 1:
        os._exit(Exit.PREEMPTED)
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    store.set("waits", "")
    store.wait(["never"], timedelta(seconds=600))


distributed.init_process_group = _wait
