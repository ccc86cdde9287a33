"""An ideal prefix cache: keeps every prompt for ever and hits to the last common token.

What it misses, nobody could have hit; so what it would hit if a habit were gone is the
habit's whole price. To the piece, which is 4 to 16 tokens. Used by ``advice`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from headwater.recipe.advice_units import Unit, common_pieces, num_tokens_of

MAX_COMPARED: Final = 256  # of the ways on from one place, the newest


@dataclass(slots=True)
class _Node:
    """One way on: ``unit``, after all that leads here."""

    unit: Unit | None = None
    ways: dict[bytes, _Node] = field(default_factory=dict)


class IdealCache:
    """Prompts as units, in a tree: prompts with a common beginning share its nodes."""

    def __init__(self) -> None:
        self._root = _Node()

    def look_and_keep(self, units: Sequence[Unit]) -> int:
        """Hit tokens of a prompt, which is kept from now on."""
        node, num_hit_tokens, depth = self._root, 0, 0
        while depth < len(units) and (way := node.ways.get(units[depth].key)) is not None:
            num_hit_tokens += units[depth].num_tokens
            node = way
            depth += 1
        if depth < len(units):
            num_hit_tokens += _begun_tokens(node, units[depth])
        for unit in units[depth:]:
            way = node.ways[unit.key] = _Node(unit)
            node = way
        # The last token is always computed: its logits start the answer.
        num_tokens = sum(unit.num_tokens for unit in units)
        return min(num_hit_tokens, max(0, num_tokens - 1))


def _begun_tokens(node: _Node, unit: Unit) -> int:
    """Tokens that ``unit`` shares with the nearest of the ways on from ``node``."""
    pieces = unit.pieces
    best = 0
    for way in islice(reversed(node.ways.values()), MAX_COMPARED):
        if way.unit is not None:
            best = max(best, common_pieces(pieces, way.unit.pieces))
    return num_tokens_of(pieces[:best])
