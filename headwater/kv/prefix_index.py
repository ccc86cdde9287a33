"""Which block holds the KV of which prefix.

Entries form a forest: an entry's parent is the entry of the block before it, or
the root of its cache identity. A key only finds a candidate; it is a hit when
the tokens are equal *and* its parent is the very entry that was hit before it.
By induction the whole prefix is then equal, whatever the hash does.

A *tail* is an entry of fewer tokens than a block: its block may still be written
beyond them, so it is named by those tokens alone and nothing follows it.

The index is closed under parents: an entry in it has all its ancestors in it.
Knows no sequences and no block states; ``manager`` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from headwater.core.blocks import BlockId, CacheIdentity, PrefixKey, chain_key
from headwater.core.errors import AuditError
from headwater.core.fleet import KVEvents
from headwater.kv.key_changes import KeyChanges

HashBlock = Callable[[PrefixKey, Sequence[int]], PrefixKey]


@dataclass(frozen=True, slots=True)
class PrefixRoot:
    """The parent of first blocks under one identity; compared by value."""

    identity: CacheIdentity
    key: PrefixKey

    @classmethod
    def of(cls, identity: CacheIdentity) -> PrefixRoot:
        return cls(identity, identity.root_key())


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One published block; compared by object, so a re-published block is another entry.

    ``block`` and ``has_window`` change together, and only in ``PrefixIndex.move``: to a
    block with the same KV and the window part as well.
    """

    key: PrefixKey
    parent: PrefixRoot | PrefixEntry
    tokens: tuple[int, ...]
    block: BlockId
    row: int  # place in the block table: the number of its ancestors
    has_window: bool  # window layers' KV is valid too; True for models without any

    @property
    def root(self) -> PrefixRoot:
        """O(row)."""
        parent = self.parent
        while isinstance(parent, PrefixEntry):
            parent = parent.parent
        return parent


PrefixParent = PrefixRoot | PrefixEntry


class PrefixIndex:
    """At most one entry per key and per block. Operations are O(1) besides the hash."""

    def __init__(self, hash_block: HashBlock = chain_key) -> None:
        self._hash_block = hash_block
        self._by_key: dict[PrefixKey, PrefixEntry] = {}
        self._by_block: dict[BlockId, PrefixEntry] = {}
        # In order of use, the newest last. Roots are parents too: a first block can fork.
        self._children: dict[PrefixParent, dict[PrefixEntry, None]] = {}
        self._version = 0
        self._changes: KeyChanges | None = None  # from the first time that somebody asks
        self._changes_tokens = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[PrefixEntry]:
        return iter(self._by_key.values())

    def __contains__(self, entry: PrefixEntry) -> bool:
        return self._by_key.get(entry.key) is entry

    @property
    def version(self) -> int:
        """Changes whenever the answer to a look may."""
        return self._version

    def take_changes(self, block_tokens: int) -> KVEvents | None:
        """Which keys of full blocks came and went since the last call; all, the first time."""
        if self._changes is None:
            keys = (entry.key for entry in self if len(entry.tokens) == block_tokens)
            self._changes, self._changes_tokens = KeyChanges(keys), block_tokens
        return self._changes.take()

    def get(self, key: PrefixKey) -> PrefixEntry | None:
        """What has this key, whatever its tokens are."""
        return self._by_key.get(key)

    def find(self, parent: PrefixParent, tokens: tuple[int, ...]) -> PrefixEntry | None:
        """The entry for ``tokens`` right after ``parent``, confirmed by content."""
        entry = self._by_key.get(self._hash_block(parent.key, tokens))
        if entry is None or entry.parent != parent or entry.tokens != tokens:
            return None
        return entry

    def children(self, parent: PrefixParent, limit: int) -> Iterator[PrefixEntry]:
        """Up to ``limit`` entries right after ``parent``, the last used first."""
        return islice(reversed(self._children.get(parent, {})), limit)

    def entry_of(self, block: BlockId) -> PrefixEntry | None:
        return self._by_block.get(block)

    def add(
        self, parent: PrefixParent, tokens: tuple[int, ...], block: BlockId, *, has_window: bool
    ) -> PrefixEntry | None:
        """Publish ``block``, or give the entry that is already there for the same prefix.

        A tail that ``block`` was published as gives way. None when the key belongs to
        another prefix (a hash collision) or when ``parent`` left the index: the block
        cannot be published now.
        """
        key = self._hash_block(parent.key, tokens)
        entry = self._by_key.get(key)
        if entry is not None:
            return entry if entry.parent == parent and entry.tokens == tokens else None
        row = 0
        if isinstance(parent, PrefixEntry):
            if parent not in self:
                return None
            row = parent.row + 1
        self._vacate(block)
        entry = PrefixEntry(key, parent, tokens, block, row, has_window)
        self._by_key[key] = entry
        self._by_block[block] = entry
        self._children.setdefault(parent, {})[entry] = None
        self._version += 1
        self._note(entry, is_there=True)
        return entry

    def move(self, entry: PrefixEntry, block: BlockId) -> BlockId:
        """Let ``block``, which has the window part, stand for ``entry``; gives the old one."""
        self._vacate(block)
        old = entry.block
        del self._by_block[old]
        self._by_block[block] = entry
        entry.block = block
        entry.has_window = True
        self._version += 1
        return old

    def use(self, entry: PrefixEntry) -> None:
        """``entry`` is the newest of its siblings now."""
        siblings = self._children[entry.parent]
        del siblings[entry]
        siblings[entry] = None
        self._version += 1

    def remove(self, entry: PrefixEntry) -> list[PrefixEntry]:
        """Drop ``entry`` and its descendants; gives all that were dropped, ``entry`` first.

        O(dropped): each drop pays back one add.
        """
        siblings = self._children[entry.parent]
        del siblings[entry]
        if not siblings:
            del self._children[entry.parent]
        dropped = [entry]
        for gone in dropped:  # grows while it is walked
            del self._by_key[gone.key]
            del self._by_block[gone.block]
            self._note(gone, is_there=False)
            dropped.extend(self._children.pop(gone, ()))
        self._version += 1
        return dropped

    def _note(self, entry: PrefixEntry, *, is_there: bool) -> None:
        if self._changes is not None and len(entry.tokens) == self._changes_tokens:
            self._changes.note(entry.key, is_there=is_there)

    def _vacate(self, block: BlockId) -> None:
        tail = self._by_block.get(block)
        if tail is not None and self.remove(tail) != [tail]:
            raise AuditError(f"kv: block {block} is published, and more hangs on it")
