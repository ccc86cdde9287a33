"""What the scheduler keeps about one choice of one request, and the rows made from it.

Turns a sequence into StepRows and a row's result into reports; takes and frees
nothing, decides nothing. Only ``scheduler`` uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from headwater.core.blocks import BlockId, blocks_for
from headwater.core.cache import CacheReport, MissReason, Tier
from headwater.core.errors import EngineFault, InvalidRequest
from headwater.core.fleet import Resume
from headwater.core.ports import Matcher, MatcherFactory, StoredPrefix
from headwater.core.randomness import derived_seed
from headwater.core.request import (
    FinishReason,
    PromptReport,
    Request,
    SampledToken,
    SamplingParams,
    SequenceOutput,
)
from headwater.core.sequence import Decoding, Loading, Prefilling, Sequence, Waiting
from headwater.core.step import RowResult, SampleSpec, SequenceId, StepRow
from headwater.decode.plan import RunningCandidate
from headwater.decode.stopping import StopRule
from headwater.kv.hit_plan import HitPlan
from headwater.kv.manager import Lease
from headwater.kv.prefix_index import PrefixEntry
from headwater.kv.probe import Probe
from headwater.prefill.plan import PrefillCandidate, ServiceOrder

_NO_IDS: frozenset[int] = frozenset()
_NO_WAY_ON = "the output constraint leaves no token that could follow"


@dataclass(slots=True, eq=False)
class ChoiceGroup:
    """The unfinished choices of one request.

    One of them, the leader, computes the prompt; the ``siblings`` wait until it
    is published and then start with hits on all of it but the last token.
    """

    request: Request
    choices: dict[int, Choice] = field(default_factory=dict)  # by index
    siblings: deque[Choice] = field(default_factory=deque)
    is_prompt_counted: bool = False  # by kv; once per request
    compiling: Future[MatcherFactory] | None = None  # nobody starts before it is done
    late_start: int | None = None  # of all choices: see ``core.request.late_start``

    @classmethod
    def of(
        cls,
        request: Request,
        resume: Seq[Resume],
        *,
        first_number: int,
        context_tokens: int,
        late_start: int | None = None,
    ) -> ChoiceGroup:
        """All choices as siblings, with numbers of their own; or those of ``resume``, which go
        on from where they were. Raises InvalidRequest when nothing is left of one."""
        committed = {each.index: each.tokens for each in resume}
        if len(committed) != len(resume) or not committed.keys() <= set(range(request.num_choices)):
            raise InvalidRequest("choices to resume are not the request's own, each one once")
        if any(committed.values()):
            # Its report was told before the first token of it was.
            request = replace(request, num_prompt_logprobs=None)
        group = cls(request, is_prompt_counted=any(committed.values()), late_start=late_start)
        for number, index in enumerate(committed or range(request.num_choices), first_number):
            choice = Choice.of(
                group,
                index,
                sequence_id=SequenceId(number),
                arrival=number,
                context_tokens=context_tokens,
                committed=committed.get(index, ()),
            )
            if resume and choice.stop.is_full(choice.sequence.num_output_tokens):
                raise InvalidRequest(f"nothing is left to generate of choice {index}")
            group.choices[index] = choice
            group.siblings.append(choice)
        return group


@dataclass(slots=True)
class HitSearch:
    """What a waiting choice knows of its KV beyond the device."""

    stored: StoredPrefix | None = None
    reason: MissReason | None = None  # why the tiers are not used (any more)
    is_from_peer: bool = False  # ``stored`` is on its way from another worker: no look, no doubt
    is_slow: bool = False  # at the last plan, computing was predicted to be faster than loading
    # Loaded before a load ended early: the device has it now, but that is not where it lay.
    early_tokens: dict[Tier, int] = field(default_factory=dict)
    load_s: float = 0.0

    def give_up(self, reason: MissReason) -> None:
        """From now on the device alone must do."""
        self.stored, self.reason = None, reason


@dataclass(slots=True, eq=False)
class Choice:
    """A sequence and what goes with it for its whole life."""

    sequence: Sequence
    group: ChoiceGroup
    params: SamplingParams  # with the choice's own seed
    stop: StopRule
    probe: Probe | None = None  # the last look while waiting; the next one starts from it
    hit: HitPlan | None = None  # made of it, and of what the tiers hold
    search: HitSearch = field(default_factory=HitSearch)
    window_start: int = 0  # of its rows, while it holds blocks
    replay_end: int = 0  # tokens before it that are computed are replayed
    num_written: int = 0  # tokens whose KV is in its blocks, whatever its state says
    tail: PrefixEntry | None = None  # published at the end of the input, not kept yet
    cache: CacheReport | None = None  # the prompt's hit, once it is settled
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
        committed: tuple[int, ...] = (),
    ) -> Choice:
        """``committed`` output tokens were told already, by a worker that is lost."""
        request = group.request
        seed = derived_seed(request.sampling.seed, index)
        return cls(
            sequence=Sequence(
                sequence_id=sequence_id,
                request=request,
                index=index,
                seed=seed,
                arrival=arrival,
                tokens=[*request.prompt_tokens, *committed],
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
            case (
                Waiting(num_preemptions=n)
                | Loading(num_preemptions=n)
                | Prefilling(num_preemptions=n)
            ):
                return n == 0
            case _:
                return False

    @property
    def num_left_tokens(self) -> int:
        """Tokens to compute before its next output, as far as is known."""
        sequence = self.sequence
        match sequence.state:
            case Waiting() | Loading() if self.hit is not None:
                return sequence.num_tokens - self.hit.computed_from
            case Waiting() if sequence.index and not self.is_leader and self.probe is None:
                # The rest comes from the choice that computes the prompt.
                late_start = self.group.late_start
                return sequence.num_tokens - late_start if late_start is not None else 1
            case _:
                return sequence.num_tokens - sequence.num_computed

    def running_candidate(self, num_held_blocks: int, block_tokens: int) -> RunningCandidate:
        """As ``decode`` sees it, while it holds blocks."""
        sequence = self.sequence
        is_decoding = isinstance(sequence.state, Decoding)
        num_needed = blocks_for(sequence.num_tokens, block_tokens) if is_decoding else 0
        return RunningCandidate(
            sequence.sequence_id,
            sequence.request.priority,
            sequence.arrival,
            max(num_needed - num_held_blocks, 0),
            is_decoding,
        )

    def prefill_candidate(self) -> PrefillCandidate:
        """As ``prefill`` sees it, while it is in prefill."""
        sequence = self.sequence
        num_computed = sequence.num_computed
        return PrefillCandidate(
            sequence.sequence_id,
            self.order,
            sequence.num_tokens - num_computed,
            num_computed,
            self.group.late_start,
        )

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

    @property
    def reports_early(self) -> bool:
        """Whether the report is whole as soon as the hit is settled."""
        return self.sequence.request.num_prompt_logprobs is None

    # Blocks

    def take_lease(self, lease: Lease) -> None:
        """It holds blocks now, and the hit is in them."""
        self.window_start = lease.window_start
        self.replay_end = lease.num_hit_tokens if lease.num_replayed_tokens else 0
        self.num_written = lease.num_hit_tokens
        self.probe = self.hit = None

    def give_blocks_back(self) -> None:
        self.num_computed_before = self.sequence.num_computed
        self.window_start = self.replay_end = self.num_written = 0
        self.search = HitSearch()
        self.tail = None

    # The output constraint

    def begin_matching(self, matcher: Matcher) -> str | None:
        """Take ``matcher`` for the whole output; what is wrong if no token can follow what
        there is of it."""
        self.matcher = matcher
        if not all(matcher.accept(token) for token in self.sequence.output_tokens):
            return "the output constraint does not allow the output so far"
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
            window_start=self.window_start,
            late_start=self.group.late_start or 0,
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
            window_start=self.window_start,
            num_replayed=max(min(end, self.replay_end) - start, 0),
            late_start=self.group.late_start or 0,
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

    def output(
        self,
        tokens: tuple[SampledToken, ...] = (),
        *,
        finish: FinishReason | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        """What is told next, with the prompt's report if that is still to be told."""
        return SequenceOutput(
            request_id=self.sequence.request.request_id,
            index=self.sequence.index,
            tokens=tokens,
            prompt=self._take_prompt_report(),
            finish=finish,
            stop_token_id=stop_token_id,
            error=error,
        )

    def _take_prompt_report(self) -> PromptReport | None:
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
            cache=self.cache,
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
