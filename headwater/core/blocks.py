"""Blocks and prefix keys: how a run of tokens is named, wherever its KV lives.

A *block* is ``block_tokens`` consecutive tokens' KV over all layers. Row i of a
sequence's block table covers tokens [i*b, (i+1)*b). A *prefix key* chains the
hash of a block to everything before it and to the identity under which the KV
was computed, so equal keys mean equal KV (C07: no process-local hash anywhere).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
PrefixKey = NewType("PrefixKey", bytes)

PREFIX_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What KV depends on besides tokens. Differing in any field means a miss.

    ``model_fingerprint`` covers weights, config and numerics mode; ``layout``
    names the KV tensor layout and its version; ``tenant`` is derived on the
    server from the credential, never from the request body (C12).
    """

    model_fingerprint: str
    layout: str
    tenant: str = ""

    def root_key(self) -> PrefixKey:
        """The parent of a sequence's first block."""
        parts = (self.model_fingerprint, self.layout, self.tenant)
        # Length prefixes: ("ab", "c") and ("a", "bc") must not collide.
        message = b"".join(len(p.encode()).to_bytes(4, "little") + p.encode() for p in parts)
        digest = hashlib.blake2b(message, digest_size=PREFIX_KEY_BYTES, person=b"headwater-prefix")
        return PrefixKey(digest.digest())


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian uint32, the form that is hashed and stored."""
    packed = array("I", tokens)
    if packed.itemsize != 4:  # pragma: no cover - no supported platform
        return b"".join(t.to_bytes(4, "little") for t in tokens)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def chain_key(parent: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
    """The key of the block holding ``tokens`` that follows ``parent``."""
    digest = hashlib.blake2b(parent + token_bytes(tokens), digest_size=PREFIX_KEY_BYTES)
    return PrefixKey(digest.digest())


def block_keys(
    root: PrefixKey, tokens: Sequence[int], block_tokens: int
) -> Iterator[tuple[PrefixKey, tuple[int, ...]]]:
    """Keys and token contents of the full blocks of ``tokens``, first to last, lazily.

    >>> root = CacheIdentity("m", "l").root_key()
    >>> [len(content) for _, content in block_keys(root, range(70), 32)]
    [32, 32]
    """
    key = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        content = tuple(tokens[start : start + block_tokens])
        key = chain_key(key, content)
        yield key, content


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks needed to hold ``num_tokens``."""
    return -(-num_tokens // block_tokens)
