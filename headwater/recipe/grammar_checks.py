"""What a caller's schema, regex or grammar may hold, before a compiler sees it. Pure.

The compiler is quick and refuses most nonsense by itself; refused here is what
it would take too long over, what would run out of memory, and what a caller
must not say: control ids, and text that would end the grammar that it is put in.
Knows no compiler and no model; called by ``grammar_terms``.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from math import lcm

from headwater.core.errors import InvalidRequest
from headwater.recipe.messages import Json

# Compile time grows faster than the text: at these sizes the worst texts that were
# found take one to two seconds, and a usual one about a millisecond.
MAX_SCHEMA_CHARS = 131_072
MAX_PATTERN_CHARS = 65_536
MAX_DEPTH = 64  # the compiler's own limit is 128, less what a turn wraps around it

# A number's multiple is found by an automaton with a state for each remainder, and two
# conditions on one number multiply theirs: 99,999 takes 1.5 s, 999,999 all memory.
MAX_MULTIPLE = 10_000

# Whether n patterns can hold together is found in 2**n steps: 15 take 20 ms, 20 take 2 s.
MAX_JOINED_PATTERNS = 12

# Two of these in one schema must hold together.
_CONDITIONS = frozenset({"$ref", "pattern", "anyOf", "oneOf", "patternProperties"})

_IN_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
# How Lark text falls into tokens, as far as it matters: comments, strings, regexes.
_IN_LARK = re.compile(
    r'(?P<comment>(?://|\#)[^\n]*)|(?P<string>"(?:\\.|[^"\\])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)|(?P<other>.)",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"%(\w+)")
_CALLERS_DIRECTIVES = frozenset({"ignore", "import"})


def invalid(message: str, code: str) -> InvalidRequest:
    """The refusal of a constraint; whoever knows the field's name adds it."""
    return InvalidRequest(message, code=code)


def check_schema_text(text: str) -> None:
    """Raises InvalidRequest if ``text`` is too long or too deep, before anything parses it."""
    if len(text) > MAX_SCHEMA_CHARS:
        raise invalid(
            f"the JSON schema has {len(text)} characters; at most {MAX_SCHEMA_CHARS} are allowed",
            "invalid_json_schema",
        )
    depth = 0
    for match in _IN_JSON.finditer(text):
        if match[0] in "[{":
            depth += 1
        elif match[0] in "]}":
            depth -= 1
        if depth > MAX_DEPTH:
            raise invalid(
                f"the JSON schema is nested deeper than {MAX_DEPTH} levels", "invalid_json_schema"
            )


def parse_schema(text: str) -> dict[str, Json]:
    """The schema that ``text`` holds, with ``true`` spelt ``{}``.

    Raises InvalidRequest when it is no JSON object, or holds numbers or patterns that
    would take too long together.
    """
    check_schema_text(text)
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise invalid(
            f"the JSON schema is not valid JSON: {error}", "invalid_json_schema"
        ) from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise invalid("the JSON schema must be an object", "invalid_json_schema")
    _check_costs(schema)
    return schema


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _check_costs(schema: dict[str, Json]) -> None:
    # Which conditions meet on one value is not followed: any of them may.
    multiples: list[int] = []
    patterns: set[str] = set()
    is_joining = False
    pending: list[Json] = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, dict):
            pending.extend(node.values())
            multiple, pattern = node.get("multipleOf"), node.get("pattern")
            if isinstance(multiple, int | float) and not isinstance(multiple, bool):
                digits = Decimal(str(multiple)).normalize().as_tuple().digits
                multiples.append(int("".join(map(str, digits[:20]))) or 1)
            if isinstance(pattern, str):
                patterns.add(pattern)
            is_joining = is_joining or "allOf" in node or len(node.keys() & _CONDITIONS) > 1
    if lcm(*multiples) > MAX_MULTIPLE or sum(multiples) > 2 * MAX_MULTIPLE:
        raise invalid(
            "multipleOf: the numbers of this schema are too large to be enforced "
            f"(least common multiple without trailing zeros above {MAX_MULTIPLE})",
            "invalid_json_schema",
        )
    if is_joining and len(patterns) > MAX_JOINED_PATTERNS:
        raise invalid(
            f"the JSON schema has {len(patterns)} patterns, and some of them must hold together; "
            f"at most {MAX_JOINED_PATTERNS} are allowed then",
            "invalid_json_schema",
        )


def check_pattern(pattern: str) -> None:
    """Raises InvalidRequest for a regex that is too long."""
    _check_length(pattern, "regular expression", "invalid_regex")


def check_lark(grammar: str) -> None:
    """Raises InvalidRequest for a caller's Lark grammar that is too long, names tokens or
    other grammars, embeds a schema, or has a bracket that would close what is around it.

    A text that falls into other tokens here than in the compiler is no valid Lark there.
    """
    _check_length(grammar, "grammar", "invalid_grammar")
    depth = 0
    for match in _IN_LARK.finditer(grammar):
        match match["other"]:
            case "{":
                depth += 1
            case "}":
                depth -= 1
            case "<":
                raise invalid(
                    "the grammar names a token (<...>); write the text in quotes instead",
                    "invalid_grammar",
                )
            case "@":
                raise invalid("the grammar refers to another one (@...)", "invalid_grammar")
            case "%":
                directive = _DIRECTIVE.match(grammar, match.start())
                if directive is None or directive[1] not in _CALLERS_DIRECTIVES:
                    raise invalid(
                        f"the grammar uses {directive[0] if directive else '%'}; "
                        "only %ignore and %import are allowed",
                        "invalid_grammar",
                    )
        if depth < 0:
            break
    if depth != 0:
        raise invalid("the grammar has a { or } without its other half", "invalid_grammar")


def _check_length(text: str, what: str, code: str) -> None:
    if len(text) > MAX_PATTERN_CHARS:
        raise invalid(
            f"the {what} has {len(text)} characters; at most {MAX_PATTERN_CHARS} are allowed", code
        )
    if not text.strip():
        raise invalid(f"the {what} is empty", code)
