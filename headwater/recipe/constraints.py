"""Compiles output constraints for one model, and follows an output through them.

    Constraint --compile--> prototype, in a bounded cache --fork--> one matcher per output

Knows the model's vocabulary and llguidance, which does the work: an Earley parser
over derivatives of regular expressions, and a walk of the vocabulary's trie for
each mask. Does not know logits, sequences or HTTP. The front checks a request's
constraint here in a parse thread; a worker compiles it again in a helper thread
and its scheduler asks the matchers. llguidance is imported at first use.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.core.ports import MatcherFactory
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.grammar_checks import MAX_SCHEMA_CHARS, invalid
from headwater.recipe.grammar_terms import parser_limits, term
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_byte import IM_END_ID
from headwater.recipe.tokenizer_load import load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, TokenizerWrapper

# A turn holds the schemas of all tools that may be called.
MAX_TURN_CHARS = 4 * MAX_SCHEMA_CHARS

MAX_ERROR_CHARS = 300
# Where in our own wrapping of the caller's text; only a grammar has lines to point at.
_PLACE = re.compile(r"at \d+\(\d+\): (?:failed to compile JSON schema: )?")
_PICTURE = re.compile(r"[\^\s]*$|\d+ \|")  # "3 | the source's third line", and a mark below it
_CODES = {
    "json_object": "invalid_json_schema",
    "json_schema": "invalid_json_schema",
    "regex": "invalid_regex",
    "lark": "invalid_grammar",
    "turn": "invalid_grammar",
}
_NAMES = {
    "json_object": "JSON schema",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "lark": "grammar",
    "turn": "schema or grammar",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Of compiled grammars. ``max_source_chars`` counts the constraints' sources."""

    max_grammars: int = 64
    max_source_chars: int = 4_194_304


class GrammarCompiler:
    """``core.ports.ConstraintCompiler`` for one model. Threads may share it."""

    def __init__(
        self,
        load: Callable[[], tuple[Tokenizer, frozenset[int]]],
        *,
        limits: CacheLimits | None = None,
    ) -> None:
        """``load`` gives the tokenizer and the ids that end a turn; it is called once, when
        the first constraint comes."""
        self._load = load
        self._limits = limits or CacheLimits()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, _Prototype] = OrderedDict()
        self._num_source_chars = 0

    @classmethod
    def from_source(
        cls, source: TokenizerSource, *, limits: CacheLimits | None = None
    ) -> GrammarCompiler:
        """As a worker has it: the tokenizer is not built before it is needed."""

        def load() -> tuple[Tokenizer, frozenset[int]]:
            end_ids = source.end_token_ids
            if source.kind == "byte":
                end_ids = end_ids or frozenset({IM_END_ID})
            return load_tokenizer(source), end_ids

        return cls(load, limits=limits)

    @property
    def num_cached_grammars(self) -> int:
        return len(self._compiled)

    def compile(self, constraint: Constraint) -> MatcherFactory:
        """See ``core.ports.ConstraintCompiler``. About a millisecond for a usual schema."""
        with self._lock:
            prototype = self._compiled.get(constraint)
            if prototype is not None:
                self._compiled.move_to_end(constraint)
                return prototype.fork
            vocabulary = self._vocabulary
        # Outside the lock: a slow grammar delays nobody who has another.
        prototype = vocabulary.compile(constraint)
        with self._lock:
            if constraint not in self._compiled:
                self._compiled[constraint] = prototype
                self._num_source_chars += len(constraint.source)
            while len(self._compiled) > self._limits.max_grammars or (
                self._num_source_chars > self._limits.max_source_chars and self._compiled
            ):
                dropped, _ = self._compiled.popitem(last=False)
                self._num_source_chars -= len(dropped.source)
        return prototype.fork

    def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest if ``constraint`` cannot be compiled; the caller knows the
        name of the field that it came in."""
        self.compile(constraint)

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        tokenizer, end_ids = self._load()
        return _Vocabulary(tokenizer, end_ids)


class _Vocabulary:
    """The model's tokens in llguidance's form: a trie of bytes, 15 to 200 ms to build."""

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int]) -> None:
        from llguidance import LLTokenizer

        self._num_ids = tokenizer.vocab_size
        control_ids = [i for i in range(self._num_ids) if tokenizer.is_control(i)]
        ends = sorted(i for i in end_ids if 0 <= i < self._num_ids)
        # A model that has no end id still needs one for the library to count with; it
        # lies behind the vocabulary, where no mask reaches.
        words = _TokenizerWords(tokenizer, control_ids, ends or [self._num_ids])
        self._library = LLTokenizer(
            # Documented as "must have these attributes", typed as one class that has more.
            cast("TokenizerWrapper", words),
            n_vocab=len(words.tokens),
            eos_token=ends or [self._num_ids],
            slices=LLTokenizer.json_slices(),
        )
        self._num_mask_bytes = 4 * -(-self._num_ids // 32)
        self._callers_ids = _bits(set(range(self._num_ids)) - set(control_ids) | set(ends))

    def compile(self, constraint: Constraint) -> _Prototype:
        from llguidance import LLMatcher

        if len(constraint.source) > MAX_TURN_CHARS:
            raise invalid(
                f"schemas and grammars of this request have {len(constraint.source)} characters "
                f"together; at most {MAX_TURN_CHARS} are allowed",
                _CODES[constraint.kind],
            )
        grammar = constraint.source if constraint.kind == "turn" else f"start: {term(constraint)}\n"
        try:
            start = LLMatcher(self._library, grammar, log_level=0, limits=parser_limits())
        except ValueError as error:  # not Unicode
            raise _refusal(constraint, str(error)) from None
        # Some troubles show only now: and the first mask fills the lexer that all outputs share.
        if not start.is_error():
            start.compute_bitmask()
        if start.is_error():
            raise _refusal(constraint, start.get_error())
        if start.is_stopped() and not start.is_accepting():
            raise _refusal(constraint, "NoExtension")
        matcher = GrammarMatcher(
            start,
            num_mask_bytes=self._num_mask_bytes,
            # A second line behind ``check_lark``: whatever a caller's grammar says, it gets
            # no control id.
            permitted=self._callers_ids if constraint.kind == "lark" else None,
        )
        return _Prototype(matcher)


class _TokenizerWords:
    """What LLTokenizer reads of a tokenizer: its attributes' names are the library's."""

    def __init__(self, tokenizer: Tokenizer, control_ids: list[int], ends: list[int]) -> None:
        self._tokenizer = tokenizer
        self.is_tokenizer_wrapper = True
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        num_words = max(tokenizer.vocab_size, ends[-1] + 1)
        self.tokens = [tokenizer.token_bytes(i) for i in range(num_words)]
        self.special_token_ids = sorted({*control_ids, *ends})

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode_text(text)


@dataclass(frozen=True, slots=True)
class _Prototype:
    """A matcher at the start of its grammar, which is only ever copied."""

    matcher: GrammarMatcher

    def fork(self) -> GrammarMatcher:
        return self.matcher.fork()


class GrammarMatcher:
    """``core.ports.Matcher`` over llguidance's. A copy costs microseconds."""

    def __init__(
        self, matcher: LLMatcher, *, num_mask_bytes: int, permitted: int | None = None
    ) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes
        self._permitted = permitted

    def allowed_bits(self) -> bytes:
        bits = self._matcher.compute_bitmask()
        # After an error the library's masks say "end", which would pass for an answer.
        if self._matcher.is_error():
            raise invalid(
                "the output constraint takes too much work to enforce at this point of the "
                f"output; make it simpler ({_one_line(self._matcher.get_error())})",
                "constraint_too_complex",
            )
        bits = bits[: self._num_mask_bytes]
        if self._permitted is None:
            return bits
        permitted = int.from_bytes(bits, "little") & self._permitted
        return permitted.to_bytes(self._num_mask_bytes, "little")

    def accept(self, token_id: int) -> bool:
        # Not consume_token: that one does not forgive a wrong id.
        return self._matcher.try_consume_tokens([token_id]) == 1

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def must_stop(self) -> bool:
        return self._matcher.is_stopped()

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise ValueError(f"cannot roll back {num_tokens} tokens")

    def fork(self) -> GrammarMatcher:
        return GrammarMatcher(
            self._matcher.deep_copy(),
            num_mask_bytes=self._num_mask_bytes,
            permitted=self._permitted,
        )


def _refusal(constraint: Constraint, message: str) -> InvalidRequest:
    said = _one_line(message)
    if said.startswith("NoExtension"):  # the library's name for a dead end
        said = "nothing can ever match it"
    if constraint.kind != "lark":
        said = _PLACE.sub("", said, count=1)
    return invalid(
        f"the {_NAMES[constraint.kind]} cannot be used: {said}",
        _CODES[constraint.kind],
    )


def _one_line(message: str) -> str:
    """The library's words, less its pictures of the source and its internals."""
    lines = [line.strip() for line in message.partition("\n<")[0].splitlines()]
    said = " ".join(line for line in lines if not _PICTURE.match(line))
    return said if len(said) <= MAX_ERROR_CHARS else said[:MAX_ERROR_CHARS] + "..."


def _bits(ids: set[int]) -> int:
    mask = bytearray(max(ids, default=0) // 8 + 1)
    for token_id in ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(mask, "little")
