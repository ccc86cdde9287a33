"""Output constraints: what may follow what, what is refused, and what it may cost."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_grammars import AB, VOCAB, accepts, allowed, byte_compiler, ending, matches
from recipe_models import smollm2_source

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.core.ports import Matcher
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.constraints import CacheLimits, GrammarCompiler
from headwater.recipe.grammar_checks import MAX_DEPTH, MAX_PATTERN_CHARS, MAX_SCHEMA_CHARS
from headwater.recipe.grammar_terms import JSON_WHITESPACE
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_byte import IM_END_ID, IM_START_ID
from headwater.recipe.tokenizer_load import load_tokenizer


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return byte_compiler()


def written(matcher: Matcher, seed: int, num_tokens: int) -> tuple[bytes, bool]:
    """What a model with no idea writes in ``num_tokens``, and whether it is whole."""
    draw = random.Random(seed)
    ids: list[int] = []
    while len(ids) < num_tokens and not matcher.must_stop:
        token_id = draw.choice(sorted(allowed(matcher)))
        if token_id == IM_END_ID:
            break
        assert matcher.accept(token_id)
        ids.append(token_id)
    return bytes(ids), matcher.is_complete


# What a constraint lets through


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint("json_object"), '{"a": [1, {"b": null}]}', "[1]"),
        (Constraint("json_object"), "{}", '"text"'),
        (Constraint("json_schema", AB), '{"a": "\\u00e9 é", "b": "x"}', '{"a": "q", "b": "z"}'),
        (Constraint("json_schema", AB), '{\n  "a": "q",\n  "b": "yy"\n}', '{"b": "x", "a": "q"}'),
        (Constraint("json_schema", AB), '{"a":"q","b":"x"}', '{"a": 3, "b": "x"}'),
        (Constraint("json_schema", "true"), "[]", "nil"),
        (Constraint("regex", r"^\d{3}/[a-z]+$"), "123/abc", "12/abc"),
        (Constraint("regex", r"a\/b"), "a/b", "ab"),
        (Constraint("lark", 'start: "<b>" TEXT "</b>"\nTEXT: /[^<]+/'), "<b>hi</b>", "<b></b>"),
        (Constraint("lark", 'start: /[a-z]{2}/ ("," /[a-z]{2}/)*'), "ab,cd", "ab,c,"),
    ],
)
def test_an_output_is_taken_exactly_if_it_is_what_was_asked_for(
    compiler: GrammarCompiler, constraint: Constraint, good: str, bad: str
) -> None:
    assert matches(compiler, constraint, good)
    assert not matches(compiler, constraint, bad)


def test_nothing_but_the_end_follows_the_closing_brace(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Constraint("json_schema", AB))()
    assert accepts(matcher, '{"a": "q", "b": "x"')
    assert ending(matcher) == "no"
    assert accepts(matcher, "}")
    assert ending(matcher) == "must"
    assert allowed(matcher) == {IM_END_ID}, "and to ask for it does no harm (F05)"


def test_an_output_that_could_go_on_may_also_end(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Constraint("regex", "a+"))()
    assert allowed(matcher) == {ord("a")}
    assert matcher.accept(ord("a"))
    assert allowed(matcher) == {ord("a"), IM_END_ID}
    assert ending(matcher) == "may"


def test_a25_blanks_in_json_are_bounded_at_every_place(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Constraint("json_schema", AB))()
    for part in ["{", '"a"', ":", '"q"', ",", '"b"', ":", '"x"']:
        assert accepts(matcher, part)
        num_blanks = 0
        while blanks := allowed(matcher) & set(b" \n\t\r"):
            assert matcher.accept(max(blanks) if num_blanks else min(blanks))
            num_blanks += 1
        assert num_blanks <= 17, JSON_WHITESPACE
    assert accepts(matcher, "}")
    assert matcher.must_stop


@pytest.mark.parametrize("seed", range(20))
def test_a25_a_model_with_no_idea_closes_the_object_or_is_cut(
    compiler: GrammarCompiler, seed: int
) -> None:
    text, is_whole = written(compiler.compile(Constraint("json_schema", AB))(), seed, 200)
    if is_whole:
        assert set(json.loads(text)) == {"a", "b"}
        assert text.endswith(b"}")
    else:
        assert len(text) == 200


def test_a_wrong_token_changes_nothing(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Constraint("regex", "ab"))()
    assert not matcher.accept(ord("x"))
    assert not matcher.accept(IM_START_ID)
    assert accepts(matcher, "ab")


def test_f05_rolled_back_drafts_leave_no_trace(compiler: GrammarCompiler) -> None:
    constraint = Constraint("json_schema", AB)
    matcher, other = compiler.compile(constraint)(), compiler.compile(constraint)()
    assert accepts(matcher, '{"a": "q", "b": "x"')
    before = matcher.allowed_bits()
    assert accepts(matcher, "}")
    assert not matcher.accept(ord("}")), "a draft runs past the end: it is cut there"
    matcher.rollback(1)
    assert matcher.allowed_bits() == before
    assert ending(matcher) == "no"
    matcher.rollback(len('{"a": "q", "b": "x"'))
    assert matcher.allowed_bits() == other.allowed_bits()
    with pytest.raises(ValueError, match="roll back"):
        matcher.rollback(1)


def test_forks_and_outputs_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    start = compiler.compile(Constraint("regex", "(ab|cd)x"))
    one, two = start(), start()
    assert accepts(one, "a")
    fork = one.fork()
    assert accepts(two, "cdx")
    assert accepts(fork, "bx")
    assert accepts(one, "bx")
    assert allowed(start()) == {ord("a"), ord("c")}


def test_the_mask_covers_the_vocabulary_in_whole_words(compiler: GrammarCompiler) -> None:
    assert len(compiler.compile(Constraint("json_object"))().allowed_bits()) == 4 * 10


def test_a_model_without_an_end_id_is_constrained_too() -> None:
    tokenizer = load_tokenizer(TokenizerSource(kind="byte", vocab_size=320))
    compiler = GrammarCompiler(lambda: (tokenizer, frozenset()))
    matcher = compiler.compile(Constraint("regex", "ab?"))()
    assert accepts(matcher, "a")
    assert allowed(matcher) == {ord("b")}
    assert ending(matcher) == "may"
    assert accepts(matcher, "b")
    assert ending(matcher) == "must"
    assert not any(matcher.allowed_bits())


# Random schemas, random models


def _object(properties: dict[str, Mapping[str, object]]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


LEAVES: st.SearchStrategy[dict[str, object]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "integer", "minimum": -5, "maximum": 1200}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.text(max_size=4) | st.integers(-9, 9), min_size=1, max_size=3),
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(_object),
        st.builds(
            lambda items, low, more: {
                "type": "array", "items": items, "minItems": low, "maxItems": low + more,
            },
            inner, st.integers(0, 2), st.integers(0, 2),
        ),
    ),
    max_leaves=6,
)  # fmt: skip


def fits(value: object, schema: Mapping[str, object]) -> bool:
    """A validator for exactly the keywords above, written against the specification."""
    if "enum" in schema:
        options = schema["enum"]
        assert isinstance(options, list)
        return any(type(value) is type(option) and value == option for option in options)
    match schema["type"], value:
        case "boolean", bool():
            return True
        case "null", None:
            return True
        case "integer", int() if not isinstance(value, bool):
            return -5 <= value <= 1200
        case "string", str():
            limit = schema["maxLength"]
            assert isinstance(limit, int)
            return len(value) <= limit
        case "array", list():
            low, high, items = schema["minItems"], schema["maxItems"], schema["items"]
            assert isinstance(low, int)
            assert isinstance(high, int)
            assert isinstance(items, dict)
            return low <= len(value) <= high and all(fits(item, items) for item in value)
        case "object", dict():
            properties = schema["properties"]
            assert isinstance(properties, dict)
            return list(value) == list(properties) and all(
                fits(value[name], properties[name]) for name in properties
            )
        case _:
            return False


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whatever_a_model_writes_under_a_schema_is_valid_under_it(
    compiler: GrammarCompiler, schema: dict[str, object], seed: int
) -> None:
    matcher = compiler.compile(Constraint("json_schema", json.dumps(schema)))()
    text, is_whole = written(matcher, seed, 3000)
    assert is_whole
    assert fits(json.loads(text), schema), text


# What is refused


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("constraint", "code", "says"),
    [
        (Constraint("regex", "+a"), "invalid_regex", "repetition"),
        (Constraint("regex", "((("), "invalid_regex", "unclosed group"),
        (Constraint("regex", "(?<=a)b"), "invalid_regex", "look-around"),
        (Constraint("regex", "a(?=b)"), "invalid_regex", "look-around"),
        (Constraint("regex", ""), "invalid_regex", "empty"),
        (Constraint("regex", "(" * 10_000 + "a" + ")" * 10_000), "invalid_regex", ""),
        (Constraint("regex", "a|" * MAX_PATTERN_CHARS), "invalid_regex", "characters"),
        (Constraint("regex", "\ud800"), "invalid_regex", "not valid"),
        (Constraint("regex", r"[^\x00-\U0010ffff]"), "invalid_regex", "nothing can"),
        (Constraint("json_schema", '{"type": "objec'), "invalid_json_schema", "not valid JSON"),
        (Constraint("json_schema", "[]"), "invalid_json_schema", "must be an object"),
        (Constraint("json_schema", "false"), "invalid_json_schema", "must be an object"),
        (Constraint("json_schema", '{"type": "objekt"}'), "invalid_json_schema", "objekt"),
        (Constraint("json_schema", '{"properties": 3}'), "invalid_json_schema", "properties"),
        (Constraint("json_schema", '{"not": {}}'), "invalid_json_schema", '"not"'),
        (Constraint("json_schema", '{"pattern": "((("}'), "invalid_json_schema", "unclosed"),
        (Constraint("json_schema", '{"$ref": "http://a/b"}'), "invalid_json_schema", "a/b"),
        (Constraint("json_schema", '{"$ref": "#/nowhere"}'), "invalid_json_schema", "nowhere"),
        (Constraint("json_schema", '{"minimum": NaN}'), "invalid_json_schema", "NaN"),
        (Constraint("json_schema", '{"const": "\\ud800"}'), "invalid_json_schema", ""),
        (Constraint("json_schema", nested(MAX_DEPTH)), "invalid_json_schema", "nested deeper"),
        (Constraint("json_schema", nested(10_000)), "invalid_json_schema", "nested deeper"),
        (
            Constraint("json_schema", json.dumps({"enum": ["x" * MAX_SCHEMA_CHARS]})),
            "invalid_json_schema",
            "characters",
        ),
        (
            Constraint("json_schema", '{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'),
            "invalid_json_schema",
            "nothing can",
        ),
        (Constraint("lark", "start"), "invalid_grammar", ""),
        (Constraint("lark", "start: missing"), "invalid_grammar", "missing"),
        (Constraint("lark", " "), "invalid_grammar", "empty"),
        (Constraint("lark", "start: " + "(" * 9_000 + '"a"' + ")" * 9_000), "invalid_grammar", ""),
    ],
)  # fmt: skip
def test_i03_what_cannot_be_used_is_a_clear_refusal_and_the_next_one_works(
    compiler: GrammarCompiler, constraint: Constraint, code: str, says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.check(constraint)
    assert caught.value.code == code
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert matches(compiler, Constraint("regex", "ab"), "ab")


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "integer", "multipleOf": 99999999}',
        '{"type": "number", "multipleOf": 0.30000000000000004}',
        '{"allOf": [{"multipleOf": 97}, {"multipleOf": 101}, {"multipleOf": 103}]}',
    ],
)
def test_i03_multiples_that_would_take_all_memory_are_refused(
    compiler: GrammarCompiler, schema: str
) -> None:
    with pytest.raises(InvalidRequest, match="multipleOf"):
        compiler.check(Constraint("json_schema", schema))


def test_i03_many_patterns_that_must_hold_together_are_refused(compiler: GrammarCompiler) -> None:
    patterns = [{"pattern": f"^.*a.{{{index}}}$"} for index in range(30)]
    with pytest.raises(InvalidRequest, match="30 patterns"):
        compiler.check(Constraint("json_schema", json.dumps({"allOf": patterns})))
    apart = {"type": "array", "prefixItems": [{"type": "string", **p} for p in patterns]}
    compiler.check(Constraint("json_schema", json.dumps(apart)))


@pytest.mark.parametrize("multiple", [5, 100_000, 0.01, 12.5])
def test_usual_multiples_are_kept_to(compiler: GrammarCompiler, multiple: float) -> None:
    schema = {"type": "number", "multipleOf": multiple}
    assert matches(compiler, Constraint("json_schema", json.dumps(schema)), "300000")
    assert not matches(compiler, Constraint("json_schema", json.dumps(schema)), "0.003")


@pytest.mark.parametrize(
    "grammar",
    [
        "start: <|im_start|>",
        f"start: <[{IM_START_ID}]>",
        "start: <[*]>",
        "start: @answer",
        'start: %json {"multipleOf": 99999999}',
        'start: "a"\n}\nother: "b"',
        'start: "a" /* " */ <[257]> // "',
        'start: "}" x{1,2}\nx: "{" }',
    ],
)
def test_a_callers_grammar_cannot_name_tokens_or_leave_its_place(
    compiler: GrammarCompiler, grammar: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.check(Constraint("lark", grammar))
    assert caught.value.code == "invalid_grammar"


@given(
    st.lists(
        st.sampled_from(
            [
                '"',
                "/",
                "\\",
                "#",
                "//",
                "<[257]>",
                "<|im_start|>",
                "\n",
                "a",
                " ",
                "|",
                "[",
                "(",
                ")",
            ]
        ),
        max_size=14,
    ).map("".join)
)
@settings(max_examples=150, deadline=None)
def test_whatever_a_callers_grammar_says_it_never_gets_a_control_id(
    compiler: GrammarCompiler, body: str
) -> None:
    try:
        matcher = compiler.compile(Constraint("lark", f"start: {body}"))()
    except InvalidRequest:
        return
    for _ in range(4):
        ids = allowed(matcher)
        assert not ids & (set(range(256, VOCAB)) - {IM_END_ID})
        if not ids or matcher.must_stop:
            return
        assert matcher.accept(min(ids))


def test_a_schemas_own_compiler_options_have_no_effect(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "array",
        "x-guidance": {"whitespace_pattern": "x*", "item_separator": ";", "lenient": True},
    }
    assert matches(compiler, Constraint("json_schema", json.dumps(schema)), "[1, 2]")
    assert not matches(compiler, Constraint("json_schema", json.dumps(schema)), "[1;2]")


def test_a_constraint_that_turns_out_too_complex_is_told_not_passed_for_an_end(
    compiler: GrammarCompiler,
) -> None:
    matcher = compiler.compile(Constraint("regex", "(a|b)*a(a|b){24}"))()
    draw = random.Random(5)

    def write() -> None:
        for _ in range(400_000):
            matcher.allowed_bits()
            assert matcher.accept(draw.choice(b"ab"))

    with pytest.raises(InvalidRequest) as caught:
        write()
    assert caught.value.code == "constraint_too_complex"


# The cache


def test_j09_the_cache_is_bounded_by_number_and_size_and_keeps_what_is_used() -> None:
    source = TokenizerSource(kind="byte", vocab_size=VOCAB)
    compiler = GrammarCompiler.from_source(
        source, limits=CacheLimits(max_grammars=3, max_source_chars=100)
    )
    kept = Constraint("regex", "kept")
    for index in range(10):
        compiler.compile(kept)
        compiler.compile(Constraint("regex", f"a{index}"))
        assert compiler.num_cached_grammars <= 3
    assert compiler.num_cached_grammars == 3
    matcher = compiler.compile(Constraint("regex", "b" * 300))()
    assert compiler.num_cached_grammars == 0, "too large to keep, and good all the same"
    assert accepts(matcher, "b" * 300)
    with pytest.raises(InvalidRequest):
        compiler.check(Constraint("regex", "((("))
    assert compiler.num_cached_grammars == 0


def test_equal_constraints_are_compiled_once_and_the_tokenizer_is_loaded_late() -> None:
    tokenizer = load_tokenizer(TokenizerSource(kind="byte", vocab_size=VOCAB))
    num_loads = 0

    def load() -> tuple[Tokenizer, frozenset[int]]:
        nonlocal num_loads
        num_loads += 1
        return tokenizer, frozenset({IM_END_ID})

    compiler = GrammarCompiler(load)
    assert num_loads == 0
    for _ in range(3):
        compiler.check(Constraint("json_object"))
    assert (num_loads, compiler.num_cached_grammars) == (1, 1)


# A real vocabulary


def test_on_a_real_vocabulary_masks_hold_every_usual_spelling() -> None:
    source = smollm2_source()
    compiler = GrammarCompiler.from_source(source)
    tokenizer = load_tokenizer(source)
    text = '{"a": "Tokyo is in Japan — 東京 😀", "b": "yy"}'
    matcher = compiler.compile(Constraint("json_schema", AB))()
    for token_id in tokenizer.encode_text(text):
        bits = matcher.allowed_bits()
        assert bits[token_id // 8] >> token_id % 8 & 1
        for control_id in range(17):  # SmolLM2's special tokens
            is_end = control_id in source.end_token_ids
            assert is_end or not bits[control_id // 8] >> control_id % 8 & 1
        assert matcher.accept(token_id)
    assert matcher.must_stop
