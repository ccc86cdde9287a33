"""Pieces of a Lark grammar in llguidance's dialect: what a recipe builds a turn from.

    term(Constraint("regex", "[a-z]+"))   /[a-z]+/
    control(151668)                       <[151668]>
    literal('say "hi"')                   "say \\"hi\\""

What callers supply is checked here and can only ever stand for text: a term is
one closed expression, and none of it can name a control id. Knows no tokenizer;
called by recipes and by ``constraints``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from headwater.core.constraint import Constraint
from headwater.recipe.grammar_checks import check_lark, check_pattern, invalid, parse_schema
from headwater.recipe.messages import Json

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# At most one of these between two tokens of JSON: a model that likes blanks more than
# content could fill its whole output with them (A25). Enough for usual indentation.
JSON_WHITESPACE: Final = r"(\n[ ]{0,16}|[ ])"

# Each takes about 100 bytes, and a string's bounded length about ten for each character.
MAX_LEXER_STATES: Final = 100_000

TEXT: Final = r"/(.|\n)*/"  # any text, no control id

_JSON_STYLE: Final[dict[str, Json]] = {
    "whitespace_pattern": JSON_WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "json_allow_general_unicode_escapes": True,  # many models write \u00e9, and may
}


def literal(text: str) -> str:
    """Exactly ``text``, which must hold no control characters but newlines and tabs."""
    return json.dumps(text, ensure_ascii=False)


def control(token_id: int) -> str:
    """Exactly the control id ``token_id``."""
    return f"<[{token_id}]>"


def term(constraint: Constraint) -> str:
    """An expression for what ``constraint`` allows.

    Raises InvalidRequest for what ``grammar_checks`` refuses. The rest of what can be
    wrong with it is found when the whole grammar is compiled.
    """
    match constraint.kind:
        case "json_object":
            return json_term({"type": "object"})
        case "json_schema":
            return json_term(parse_schema(constraint.source))
        case "regex":
            return pattern_term(constraint.source)
        case "lark":
            check_lark(constraint.source)
            return _nested(constraint.source)
        case "turn":
            return _nested(constraint.source)


def json_term(schema: dict[str, Json], *, is_lenient: bool = False) -> str:
    """A JSON value that ``schema`` (checked by ``parse_schema``) allows.

    ``is_lenient`` leaves out keywords that cannot be enforced, instead of refusing them.
    """
    # Ours last: the caller's own key of this name has no effect, at any depth.
    style: dict[str, Json] = {**_JSON_STYLE, "lenient": is_lenient, "coerce_one_of": is_lenient}
    return "%json " + json.dumps({**schema, "x-guidance": style})


def object_term(schema: dict[str, Json]) -> str:
    """An object that ``schema`` allows, as far as that can be enforced: keywords that
    cannot be are left out, and if the schema is of no use at all, any object will do."""
    # Many schemas of tools leave the type out.
    wanted = json_term({"type": "object", **schema}, is_lenient=True)
    return json_term({"type": "object"}) if problem_of(f"start: {wanted}") else wanted


def problem_of(grammar: str) -> str:
    """What the compiler says against ``grammar``, as one line; empty if nothing."""
    from llguidance import LLMatcher

    try:
        said = LLMatcher.validate_grammar(grammar, limits=parser_limits())
    except ValueError as error:  # not Unicode
        said = str(error)
    return said.partition("\n")[0]


def parser_limits() -> LLParserLimits:
    """What one grammar may cost to compile, and each of its masks."""
    from llguidance import LLParserLimits

    # Error texts would otherwise quote the output so far.
    return LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)


def pattern_term(pattern: str) -> str:
    """Text that the regular expression ``pattern`` matches as a whole.

    ``\\d`` means 0 to 9, as in JSON Schema, not every script's digits.
    """
    check_pattern(pattern)
    from llguidance import regex_to_lark

    try:
        return f"/{regex_to_lark(pattern, 'd')}/"
    except ValueError as error:  # not Unicode
        raise invalid(f"the regular expression is not valid: {error}", "invalid_regex") from None


def _nested(grammar: str) -> str:
    # Its names are its own: it cannot meet a rule of the grammar around it.
    return f"%lark {{\n{grammar}\n}}"
