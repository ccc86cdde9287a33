"""Which block holds the KV of which prefix.

Entries form a forest: an entry's parent is the entry of the block before it, or
the root of its cache identity. A key only finds a candidate; it is a hit when
the tokens are equal *and* its parent is the very entry that was hit before it.
By induction the whole prefix is then equal, whatever the hash does.

The index is closed under parents: an entry in it has all its ancestors in it.
Knows no sequences and no block states; ``manager`` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headwater.core.blocks import BlockId, CacheIdentity, PrefixKey, chain_key

HashBlock = Callable[[PrefixKey, Sequence[int]], PrefixKey]


@dataclass(frozen=True, slots=True)
class PrefixRoot:
    """The parent of first blocks under one identity; compared by value."""

    identity: CacheIdentity
    key: PrefixKey

    @classmethod
    def of(cls, identity: CacheIdentity) -> PrefixRoot:
        return cls(identity, identity.root_key())


@dataclass(frozen=True, slots=True, eq=False)
class PrefixEntry:
    """One published block; compared by object, so a re-published block is another entry."""

    key: PrefixKey
    parent: PrefixRoot | PrefixEntry
    tokens: tuple[int, ...]
    block: BlockId


PrefixParent = PrefixRoot | PrefixEntry


class PrefixIndex:
    """At most one entry per key and per block. Operations are O(1) besides the hash."""

    def __init__(self, hash_block: HashBlock = chain_key) -> None:
        self._hash_block = hash_block
        self._by_key: dict[PrefixKey, PrefixEntry] = {}
        self._by_block: dict[BlockId, PrefixEntry] = {}
        self._children: dict[PrefixEntry, set[PrefixEntry]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[PrefixEntry]:
        return iter(self._by_key.values())

    def __contains__(self, entry: PrefixEntry) -> bool:
        return self._by_key.get(entry.key) is entry

    def find(self, parent: PrefixParent, tokens: tuple[int, ...]) -> PrefixEntry | None:
        """The entry for ``tokens`` right after ``parent``, confirmed by content."""
        entry = self._by_key.get(self._hash_block(parent.key, tokens))
        if entry is None or entry.parent != parent or entry.tokens != tokens:
            return None
        return entry

    def add(
        self, parent: PrefixParent, tokens: tuple[int, ...], block: BlockId
    ) -> PrefixEntry | None:
        """Publish ``block``, or give the entry that is already there for the same prefix.

        None when the key belongs to another prefix (a hash collision) or when
        ``parent`` left the index: the block cannot be published now.
        """
        key = self._hash_block(parent.key, tokens)
        entry = self._by_key.get(key)
        if entry is not None:
            return entry if entry.parent == parent and entry.tokens == tokens else None
        if isinstance(parent, PrefixEntry) and parent not in self:
            return None
        entry = PrefixEntry(key, parent, tokens, block)
        self._by_key[key] = entry
        self._by_block[block] = entry
        if isinstance(parent, PrefixEntry):
            self._children.setdefault(parent, set()).add(entry)
        return entry

    def entry_of(self, block: BlockId) -> PrefixEntry | None:
        return self._by_block.get(block)

    def remove(self, entry: PrefixEntry) -> list[PrefixEntry]:
        """Drop ``entry`` and its descendants; gives all that were dropped, ``entry`` first.

        O(dropped): each drop pays back one add.
        """
        if isinstance(entry.parent, PrefixEntry):
            siblings = self._children[entry.parent]
            siblings.discard(entry)
            if not siblings:
                del self._children[entry.parent]
        dropped = [entry]
        for gone in dropped:  # grows while it is walked
            del self._by_key[gone.key]
            del self._by_block[gone.block]
            dropped.extend(self._children.pop(gone, ()))
        return dropped
