"""Looking for a prompt on the device: its full blocks, and the block that goes on longest.

Changes nothing. Full blocks are found by key, one hash each, up to the first miss. What
follows them is found by comparing tokens with the newest blocks after the last hit, since
a fork in the middle of a block has no key. Only ``manager`` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.blocks import CacheIdentity
from headwater.kv.prefix_index import PrefixEntry, PrefixIndex, PrefixParent, PrefixRoot

# What is compared per look: prompts that share no more than a system prompt hang on one block.
MAX_COMPARED_CHILDREN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a look found. A promise of nothing: until ``admit`` any of it may be evicted.

    ``hits`` are the prompt's published full blocks, first to last. The first
    ``num_tail_tokens`` of ``tail`` (a full block that forks off, or a published tail)
    continue them. ``differs``: what is published goes on there with another token.
    """

    root: PrefixRoot
    num_tokens: int
    limit_tokens: int
    hits: tuple[PrefixEntry, ...]
    num_hit_tokens: int  # of the full blocks
    tail: PrefixEntry | None = None
    num_tail_tokens: int = 0
    differs: bool = False
    version: int = 0  # of the index that was looked at

    @property
    def identity(self) -> CacheIdentity:
        return self.root.identity


def look(
    index: PrefixIndex,
    tokens: Sequence[int],
    root: PrefixRoot,
    *,
    block_tokens: int,
    limit_tokens: int,
    earlier: Probe | None,
) -> Probe:
    """What ``index`` has of ``tokens[:limit_tokens]``. O(blocks of the prompt), and O(1)
    where ``earlier``, a look for the same tokens, saw the same index."""
    hits: list[PrefixEntry] = []
    if earlier is not None:
        is_same = (earlier.num_tokens, earlier.limit_tokens) == (len(tokens), limit_tokens)
        if is_same and earlier.version == index.version:
            return earlier
        hits = list(earlier.hits[: limit_tokens // block_tokens])
        drop_stale(index, hits)
    parent: PrefixParent = hits[-1] if hits else root
    while (end := (len(hits) + 1) * block_tokens) <= limit_tokens:
        entry = index.find(parent, tuple(tokens[end - block_tokens : end]))
        if entry is None:
            break
        hits.append(entry)
        parent = entry

    start = len(hits) * block_tokens
    rest = tuple(tokens[start : min(start + block_tokens, limit_tokens)])
    tail, num_tail_tokens = None, 0
    if rest:
        tail, num_tail_tokens = _find_tail(
            index, parent, tuple(tokens[start : start + block_tokens]), rest
        )
    if tail is not None:
        goes_on = len(tail.tokens) > num_tail_tokens
    else:  # of a prompt's very first token it says nothing that others begin with another one
        goes_on = bool(hits) and next(index.children(parent, 1), None) is not None
    return Probe(
        root=root,
        num_tokens=len(tokens),
        limit_tokens=limit_tokens,
        hits=tuple(hits),
        num_hit_tokens=start,
        tail=tail,
        num_tail_tokens=num_tail_tokens,
        differs=goes_on and num_tail_tokens < len(rest),
        version=index.version,
    )


def drop_stale(index: PrefixIndex, chain: list[PrefixEntry]) -> None:
    """Cut ``chain`` to what is still indexed. The index keeps every ancestor of an
    entry, so only the last ones can be stale."""
    while chain and chain[-1] not in index:
        chain.pop()


def _find_tail(
    index: PrefixIndex, parent: PrefixParent, row: tuple[int, ...], rest: tuple[int, ...]
) -> tuple[PrefixEntry | None, int]:
    """The block after ``parent`` that shares most of ``rest``, with window KV rather than not.

    ``row`` is what the prompt has there in all. Where ``rest`` is only a part of it, because
    the last token is always a miss, the very same prompt may have been published.
    """
    best, num_best = None, 0
    if rest != row and (same := index.find(parent, row)) is not None:
        if same.has_window:
            return same, len(rest)
        best, num_best = same, len(rest)
    for entry in index.children(parent, MAX_COMPARED_CHILDREN):
        num = num_common(entry.tokens, rest)
        if num > num_best or (
            best is not None and num == num_best and entry.has_window > best.has_window
        ):
            best, num_best = entry, num
            if num == len(rest) and entry.has_window:
                break
    return best, num_best


def num_common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many first tokens both have."""
    num = 0
    for a, b in zip(some, others, strict=False):
        if a != b:
            break
        num += 1
    return num
