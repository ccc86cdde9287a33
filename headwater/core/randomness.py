"""Keyed randomness: a draw depends on (seed, position, purpose) and on nothing else.

Not on the batch, the neighbours, the step number or how many draws came
before. So a result is the same alone or in a crowd, after preemption, and in
another process. (Philox and other counter-based generators give the same
property on a device; one keyed hash per sampled token is cheap enough here.)
"""

from __future__ import annotations

import hashlib
import struct


def keyed_bits(seed: int, position: int, purpose: str) -> int:
    """64 uniform bits for ``(seed, position, purpose)``; stable across processes and versions."""
    message = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, position) + purpose.encode()
    digest = hashlib.blake2b(message, digest_size=8, person=b"headwater-random").digest()
    return int.from_bytes(digest, "little")


def keyed_uniform(seed: int, position: int, purpose: str) -> float:
    """A float in [0, 1) with 53 random bits for ``(seed, position, purpose)``."""
    return (keyed_bits(seed, position, purpose) >> 11) * 2.0**-53


def derived_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of a request with ``n > 1``; choice 0 keeps ``seed``."""
    return seed if index == 0 else keyed_bits(seed, index, "choice")
