"""A cache folder with records in it, as a server leaves one: real store, made-up bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from headwater.core.blocks import CacheIdentity, chain_key
from headwater.core.cache import KVPart, RecordMeta, Retention, RetentionClass
from headwater.disk.store import DiskConfig, DiskStore

BLOCK_TOKENS = 8
BYTES_PER_TOKEN = 64
DAY_S = 86400.0
CHAT = Retention(RetentionClass.CHAT, 7 * DAY_S)
MAX_BYTES = 16 * 2**20


def open_store(folder: Path, *, ago_s: float = 0.0) -> DiskStore:
    """``ago_s``: as if all that is done with it were so long ago."""
    config = DiskConfig(folder=folder, max_bytes=MAX_BYTES, reserve_bytes=0)
    return DiskStore(config, lambda: time.time() - ago_s)


def keep(
    folder: Path,
    tokens: Sequence[int],
    identity: CacheIdentity,
    retention: Retention = CHAT,
    *,
    ago_s: float = 0.0,
) -> int:
    """Full blocks, then the tail; the number of records."""
    store = open_store(folder, ago_s=ago_s)
    try:
        parent, num_records = identity.root_key(), 0
        for start in range(0, len(tokens), BLOCK_TOKENS):
            content = tuple(tokens[start : start + BLOCK_TOKENS])
            key = chain_key(parent, content)
            meta = RecordMeta(
                key=key,
                parent=parent,
                identity=identity,
                part=KVPart.GLOBAL,
                start=start,
                tokens=content,
            )
            data = bytes([start % 251]) * (BYTES_PER_TOKEN * len(content))
            assert store.put(meta, [memoryview(data)], retention)
            parent, num_records = key, num_records + 1
        return num_records
    finally:
        store.close()
