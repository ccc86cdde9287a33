"""KV beyond the device: records, tiers, how long they are kept, and why a hit ended.

    device --demote--> host      one *record* = one part of one block's KV,
    device --store---> disk      named by the block's prefix key
    device <--load---- host, disk

A record says of itself what it is (``RecordMeta``); whoever loads it compares all
of it. Plain values: ``kv`` plans with them, ``worker`` moves them, ``disk`` keeps them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from headwater.core.blocks import PREFIX_KEY_BYTES, CacheIdentity, PrefixKey


class Tier(StrEnum):
    """Where KV lies, fastest first."""

    DEVICE = "device"
    PEER = "peer"  # another worker's device, while it hands a prompt over; nothing stays there
    HOST = "host"
    DISK = "disk"


class KVPart(StrEnum):
    """Which layers' KV a record holds. GLOBAL: all layers that see every token (all
    layers of a full-attention model). WINDOW: the layers with a window, less late layers where
    those begin anew at each use (decoder replay)."""

    GLOBAL = "global"
    WINDOW = "window"


class WindowKV(StrEnum):
    """What becomes of window layers' KV when a prefix is kept beyond the device.

    CHECKPOINT: the last window of every prefix unit is stored; a hit there is exact.
    REPLAY: nothing is stored; the last window of a hit is computed again, from the stored
    global KV and without the window KV before it, so the result is near and not equal.
    """

    CHECKPOINT = "checkpoint"
    REPLAY = "replay"


class RetentionClass(StrEnum):
    """By traffic: requests with tools return within days, chats within the week."""

    AGENT = "agent"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a record is kept after its last use. ``keep_s == 0``: the device only."""

    kind: RetentionClass
    keep_s: float


class MissReason(StrEnum):
    """Why a hit ended where it did. ``num_hit_tokens`` says where that is."""

    NONE = "none"  # it did not: all but the last token were a hit
    NEW = "new"  # nothing that was kept goes further
    DIFFERS = "differs"  # what was kept goes on with another token at exactly this place
    NO_WINDOW = "no_window"  # more is kept, but not the window KV that an exact hit needs there
    TOO_SHORT = "too_short"  # a hit would save less than a block: not worth keeping
    EXPIRED = "expired"  # was kept, and nobody used it for its retention
    EVICTED = "evicted"  # was kept, and had to make room
    OTHER_MODEL = "other_model"  # kept under other weights, config, numerics or layout
    OTHER_TENANT = "other_tenant"  # for the operator only: a caller is told NEW (C12)
    SLOW = "slow"  # kept, but computing was predicted or seen to be faster than loading
    DAMAGED = "damaged"  # kept, but a check failed; the record is gone now
    UNAVAILABLE = "unavailable"  # the store could not be asked in time
    ASKED = "asked"  # the request wants prompt logprobs, so its prompt is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """One prompt's hit: where it lay and why it ended. Tiers add up to the hit tokens.

    Tokens that were replayed are hit tokens too, computed again for their window KV or
    for late layers; they are counted apart because they cost that.
    """

    num_device_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_replayed_tokens: int = 0
    reason: MissReason = MissReason.NEW
    load_s: float = 0.0  # from the decision to load until the last byte was there

    @property
    def num_hit_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens + self.num_disk_tokens


def part_key(key: PrefixKey, part: KVPart) -> PrefixKey:
    """The name of one part's record. The global part has the block's own prefix key."""
    if part is KVPart.GLOBAL:
        return key
    digest = hashlib.blake2b(key, digest_size=PREFIX_KEY_BYTES, person=b"headwater-window")
    return PrefixKey(digest.digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMeta:
    """What a record is. ``tokens`` may be fewer than a block's: the tail of a prefix unit.

    ``parent`` is the key of the record before it in its part's chain, or for the first
    block the ``part_key`` of the identity's root key.
    """

    key: PrefixKey
    parent: PrefixKey
    identity: CacheIdentity
    part: KVPart
    start: int  # position of tokens[0] in the sequence; a multiple of the block size
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record that is there: where, and how many bytes of KV."""

    meta: RecordMeta
    tier: Tier
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """One tier's content now and its work since start."""

    tier: Tier
    num_records: int
    num_bytes: int  # what counts against ``max_bytes``
    max_bytes: int
    num_found: int = 0  # records that lookups found
    num_loaded: int = 0
    num_loaded_bytes: int = 0
    num_put: int = 0
    num_put_bytes: int = 0
    num_refused: int = 0  # puts of what was there already
    num_evicted: int = 0
    num_expired: int = 0
    num_damaged: int = 0  # a check failed on load: dropped, a miss
    num_errors: int = 0  # reads and writes that the system refused
    is_writable: bool = True
    last_error: str = ""  # what the system said, without content
