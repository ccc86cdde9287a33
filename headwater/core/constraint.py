"""What an output must look like, as a value that can cross a process boundary.

``api`` reads it from a request, a recipe wraps it into a grammar of the whole
turn (reasoning and tool-call markup included), the worker compiles it off its
step loop and masks logits with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ConstraintKind = Literal["json_object", "json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """``source`` is a JSON Schema, a regular expression or a Lark grammar, as text;
    empty for ``json_object``. Equal values may share one compiled grammar."""

    kind: ConstraintKind
    source: str = ""
