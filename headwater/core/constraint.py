"""What an output must look like, as a value that can cross a process boundary.

``api`` reads it from a request, a recipe wraps it into a grammar of the whole
turn (reasoning and tool-call markup included), the worker compiles it off its
step loop and masks logits with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# ``turn`` is made by recipes only: callers ask for the other four.
ConstraintKind = Literal["json_object", "json_schema", "regex", "lark", "turn"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """``source`` is a JSON Schema, a regular expression or a Lark grammar, as text; empty
    for ``json_object``. A ``turn`` is a Lark grammar too, one that may name control ids.
    Equal values may share one compiled grammar."""

    kind: ConstraintKind
    source: str = ""
