"""launcher=env and launcher=inline: processes that somebody else started, and this one."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
