"""Whether a JSON Schema's value may be a string, and which: formats spell strings apart.

Reads only what decides that (type, enum, const, references, alternatives) and
takes anything else as "may be anything". Used where a grammar must choose a form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headwater.recipe.messages import Json

DEFINITIONS: Final = ("$defs", "definitions")
_ALTERNATIVES: Final = ("anyOf", "oneOf")
_MAX_DEPTH: Final = 8  # references may go round in circles


@dataclass(frozen=True, slots=True)
class PossibleValues:
    """``texts`` are the only strings, if they are listed; else ``any_text`` says whether
    some string fits. ``other``: something that is no string may fit."""

    texts: tuple[str, ...] = ()
    any_text: bool = False
    other: bool = False


ANYTHING: Final = PossibleValues(any_text=True, other=True)


def possible_values(schema: Mapping[str, Json]) -> PossibleValues:
    """What ``schema`` lets a value be.

    >>> possible_values({"type": "string"})
    PossibleValues(texts=(), any_text=True, other=False)
    >>> possible_values({"enum": ["a", 1]})
    PossibleValues(texts=('a',), any_text=False, other=True)
    """
    return _possible(dict(schema), schema, _MAX_DEPTH)


def _possible(schema: Json, root: Mapping[str, Json], depth: int) -> PossibleValues:
    if not isinstance(schema, dict) or depth == 0:
        return ANYTHING
    if "const" in schema:
        return _listed([schema["const"]])
    if isinstance(listed := schema.get("enum"), list):
        return _listed(listed)
    if isinstance(reference := schema.get("$ref"), str):
        return _possible(_referenced(reference, root), root, depth - 1)
    for key in _ALTERNATIVES:
        if isinstance(branches := schema.get(key), list):
            return _any_of([_possible(branch, root, depth - 1) for branch in branches])
    types = schema.get("type")
    if isinstance(types, str):
        types = [types]
    if not isinstance(types, list):
        return ANYTHING
    return PossibleValues(any_text="string" in types, other=any(t != "string" for t in types))


def _listed(values: list[Json]) -> PossibleValues:
    texts = tuple(value for value in values if isinstance(value, str))
    return PossibleValues(texts=texts, other=len(texts) < len(values))


def _any_of(branches: list[PossibleValues]) -> PossibleValues:
    any_text = any(branch.any_text for branch in branches)
    texts = tuple(text for branch in branches for text in branch.texts)
    return PossibleValues(
        texts=() if any_text else texts,
        any_text=any_text,
        other=any(branch.other for branch in branches),
    )


def _referenced(reference: str, root: Mapping[str, Json]) -> Json:
    """The definition that ``#/$defs/name`` names; None if it is another kind of reference."""
    for key in DEFINITIONS:
        definitions = root.get(key)
        prefix = f"#/{key}/"
        if reference.startswith(prefix) and isinstance(definitions, dict):
            return definitions.get(reference.removeprefix(prefix))
    return None
