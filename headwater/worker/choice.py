"""What the scheduler keeps about one choice of one request, and the rows made from it.

Turns a sequence into StepRows and a row's result into reports; takes and frees
nothing, decides nothing. Only ``scheduler`` uses it.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from headwater.core.blocks import BlockId
from headwater.core.errors import EngineFault, InvalidRequest
from headwater.core.ports import Matcher, MatcherFactory
from headwater.core.randomness import derived_seed
from headwater.core.request import PromptReport, Request, SampledToken, SamplingParams
from headwater.core.sequence import Prefilling, Sequence, Waiting
from headwater.core.step import RowResult, SampleSpec, SequenceId, StepRow
from headwater.decode.stopping import StopRule
from headwater.kv.manager import Probe
from headwater.prefill.plan import ServiceOrder

_NO_IDS: frozenset[int] = frozenset()
_NO_WAY_ON = "the output constraint leaves no token that could follow"


@dataclass(slots=True, eq=False)
class ChoiceGroup:
    """The unfinished choices of one request.

    One of them, the leader, computes the prompt; the ``siblings`` wait until it
    is published and then start with hits on all its full blocks. Nothing is
    copied: shared blocks are whole and never written again.
    """

    request: Request
    choices: dict[int, Choice] = field(default_factory=dict)  # by index
    siblings: deque[Choice] = field(default_factory=deque)
    is_prompt_counted: bool = False  # by kv; once per request
    compiling: Future[MatcherFactory] | None = None  # nobody starts before it is done


@dataclass(slots=True, eq=False)
class Choice:
    """A sequence and what goes with it for its whole life."""

    sequence: Sequence
    group: ChoiceGroup
    params: SamplingParams  # with the choice's own seed
    stop: StopRule
    probe: Probe | None = None  # the last look while waiting; the next one starts from it
    abort_asked: bool = False  # while in a running step; obeyed when that is applied
    is_leader: bool = False  # computes the prompt for its request
    reports_prompt: bool = False  # it was the one whose admission counted the prompt
    num_computed_before: int = 0  # at the last preemption
    prompt_logprobs: list[SampledToken] = field(default_factory=list)
    # With a constraint. Both belong to the output, not to its KV: a preemption keeps them.
    matcher: Matcher | None = None
    allowed_bits: bytes | None = None  # of the next token

    @classmethod
    def of(
        cls,
        group: ChoiceGroup,
        index: int,
        *,
        sequence_id: SequenceId,
        arrival: int,
        context_tokens: int,
    ) -> Choice:
        request = group.request
        seed = derived_seed(request.sampling.seed, index)
        return cls(
            sequence=Sequence(
                sequence_id=sequence_id,
                request=request,
                index=index,
                seed=seed,
                arrival=arrival,
                tokens=list(request.prompt_tokens),
            ),
            group=group,
            params=replace(request.sampling, seed=seed),
            stop=StopRule.of(
                request.stop,
                num_prompt_tokens=request.num_prompt_tokens,
                context_tokens=context_tokens,
            ),
        )

    @property
    def sequence_id(self) -> SequenceId:
        return self.sequence.sequence_id

    @property
    def order(self) -> ServiceOrder:
        """Its place among those that wait or are in prefill."""
        sequence = self.sequence
        return ServiceOrder(sequence.request.priority, self.is_new, sequence.arrival)

    @property
    def is_new(self) -> bool:
        match self.sequence.state:
            case Waiting(num_preemptions=n) | Prefilling(num_preemptions=n):
                return n == 0
            case _:
                return False

    # Prompt logprobs: token i + 1 is scored where token i is computed, so
    # what is not scored yet must be computed here and cannot be a hit.

    @property
    def wants_prompt_scores(self) -> bool:
        request = self.sequence.request
        return (
            self.is_leader
            and request.num_prompt_logprobs is not None
            and len(self.prompt_logprobs) < request.num_prompt_tokens - 1
        )

    @property
    def max_hit_tokens(self) -> int | None:
        return len(self.prompt_logprobs) if self.wants_prompt_scores else None

    # The output constraint

    def begin_matching(self, matcher: Matcher) -> str | None:
        """Take ``matcher`` for the whole output; what is wrong if no token can begin it."""
        self.matcher = matcher
        return self._look_ahead() or (_NO_WAY_ON if self.is_matched else None)

    def match(self, token_id: int) -> str | None:
        """Go on with a committed token; what is wrong if none can follow it."""
        if self.matcher is None:
            return None
        if not self.matcher.accept(token_id):
            return f"the output constraint does not allow token {token_id}, which was chosen"
        return self._look_ahead()

    @property
    def is_matched(self) -> bool:
        """Whether the output is a whole one: the constraint has nothing more to come."""
        return self.matcher is not None and self.allowed_bits is None

    def _look_ahead(self) -> str | None:
        """Set ``allowed_bits`` to what may come next. They stay None at the end: nobody
        asks for a mask there (F05)."""
        matcher = self.matcher
        self.allowed_bits = None
        if matcher is None or matcher.must_stop:
            return None
        try:
            bits = matcher.allowed_bits()
        except InvalidRequest as error:
            return str(error)
        banned = self.stop.banned_ids(self.sequence.num_output_tokens)
        ignored = (
            self.sequence.request.stop.end_token_ids
            if self.sequence.request.stop.ignore_end
            else _NO_IDS
        )
        if banned or ignored:
            bits = _without(bits, banned | ignored)
        if bits != bytes(len(bits)):
            self.allowed_bits = bits
            return None
        return None if matcher.is_complete else _NO_WAY_ON

    # Rows

    def decode_row(self, block_table: tuple[BlockId, ...]) -> StepRow:
        """The newest token alone: its KV is written, the next one is chosen."""
        tokens = self.sequence.tokens
        return StepRow(
            sequence_id=self.sequence.sequence_id,
            start=len(tokens) - 1,
            tokens=(tokens[-1],),
            block_table=block_table,
            sample=self._sample_spec(),
        )

    def chunk_row(self, num_tokens: int, block_table: tuple[BlockId, ...]) -> StepRow:
        """Tokens [num_computed, num_computed + num_tokens), cut to what there is."""
        sequence = self.sequence
        start = sequence.num_computed
        end = min(start + num_tokens, sequence.num_tokens)
        is_last = end == sequence.num_tokens
        scores = self.wants_prompt_scores
        return StepRow(
            sequence_id=sequence.sequence_id,
            start=start,
            tokens=tuple(sequence.tokens[start:end]),
            block_table=block_table,
            sample=self._sample_spec() if is_last and self.stop.max_output_tokens else None,
            num_prompt_logprobs=sequence.request.num_prompt_logprobs if scores else None,
            # Unscored prompt means no output yet, so this never reaches past the prompt.
            next_tokens=tuple(sequence.tokens[start + 1 : end + 1]) if scores else (),
        )

    def _sample_spec(self) -> SampleSpec:
        sequence, params = self.sequence, self.params
        repetition = params.repetition_penalty != 1.0
        output = repetition or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        return SampleSpec(
            params=params,
            position=len(sequence.tokens),
            # Copies grow with the sequence; only a penalty is worth them.
            prompt_tokens=sequence.request.prompt_tokens if repetition else (),
            output_tokens=sequence.output_tokens if output else (),
            banned_ids=self.stop.banned_ids(sequence.num_output_tokens),
            allowed_bits=self.allowed_bits,
        )

    # Results

    def keep_prompt_scores(self, row: StepRow, result: RowResult) -> None:
        """Add the row's scores; a recomputed part (after preemption) is kept once."""
        if row.next_tokens:
            self.prompt_logprobs.extend(
                result.prompt_logprobs[len(self.prompt_logprobs) - row.start :]
            )

    def take_prompt_report(self) -> PromptReport | None:
        """The report, the first time that it is asked for after admission."""
        if not self.reports_prompt:
            return None
        self.reports_prompt = False
        request = self.sequence.request
        num_hit_tokens = self.sequence.num_prompt_hit_tokens or 0
        is_scored = request.num_prompt_logprobs is not None and not self.wants_prompt_scores
        return PromptReport(
            num_hit_tokens=num_hit_tokens,
            num_miss_tokens=request.num_prompt_tokens - num_hit_tokens,
            logprobs=tuple(self.prompt_logprobs) if is_scored else None,
        )


def check_result(row: StepRow, result: RowResult) -> None:
    """Raises EngineFault unless ``result`` is an answer to ``row``."""
    is_whole = (result.token is None) == (row.sample is None) and len(
        result.prompt_logprobs
    ) == len(row.next_tokens)
    if result.sequence_id != row.sequence_id or not (is_whole or result.error):
        raise EngineFault(
            f"the engine's result for sequence {result.sequence_id} does not answer "
            f"the row of sequence {row.sequence_id}"
        )


def _without(bits: bytes, ids: frozenset[int]) -> bytes:
    """``bits`` (as of ``ports.Matcher``) less ``ids``."""
    left = bytearray(bits)
    for token_id in ids:
        if 0 <= token_id < 8 * len(left):
            left[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(left)
