"""One generation: its tokens, and its state as a type.

    Waiting --------Admitted--------> Prefilling --Computed*--> Decoding --Committed*--> Finished
     ^ ^ |                              ^  |                       |
     | | +--Reserved--> Loading --------+  |                       |
     | +----LoadEnded------+    Admitted   |                       |
     +------Preempted------+---------------+-----------------------+

    tokens   = prompt ++ output
    computed = [0, num_computed) have KV in the sequence's blocks
    waiting:    num_computed == 0, holds no blocks
    loading:    num_computed == 0, holds blocks for all its tokens; a hit is on its way into them
    prefilling: num_computed < num_tokens            (also after preemption: output is recomputed)
    decoding:   num_computed == num_tokens - 1       (the newest token's KV comes with its own step)

The last token is always computed, never taken from a cache: its logits choose
the next token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headwater.core.errors import InvalidChange
from headwater.core.request import FinishReason, Request
from headwater.core.step import SequenceId


@dataclass(frozen=True, slots=True)
class Waiting:
    """In a queue, without blocks. ``preempted_count`` orders it before new work."""

    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Loading:
    """Holds blocks; KV from another tier is on its way into some of them."""

    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Prefilling:
    num_computed: int
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Decoding:
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason


State = Waiting | Loading | Prefilling | Decoding | Finished


@dataclass(frozen=True, slots=True)
class Admitted:
    """Blocks are there and the first ``num_hit_tokens`` hold KV. The last
    ``num_replayed_tokens`` of those are computed once more, for their window KV."""

    num_hit_tokens: int
    num_replayed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks were taken; part of the hit has yet to be loaded into them."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The load came to nothing and the blocks were given up: it waits as before."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A prefill chunk ran: KV now covers [0, num_computed)."""

    num_computed: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A token was chosen for position ``len(tokens)``."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """Blocks were taken away; everything is computed again later."""


@dataclass(frozen=True, slots=True)
class Ended:
    reason: FinishReason


Change = Admitted | Reserved | LoadEnded | Computed | Committed | Preempted | Ended


@dataclass(slots=True)
class Sequence:
    """One choice of one request. Change it only through :meth:`advance`."""

    sequence_id: SequenceId
    request: Request
    index: int
    seed: int
    arrival: int  # order of submission, unique per worker: the tie-break of every queue
    tokens: list[int]
    state: State = field(default_factory=Waiting)
    # What the caller is told about the prompt; set at the first admission only,
    # so that a preempted sequence reports its first hit (hit + miss = prompt, once).
    num_prompt_hit_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def output_tokens(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.request.num_prompt_tokens :])

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is in this sequence's blocks."""
        match self.state:
            case Prefilling(num_computed=n):
                return n
            case Decoding():
                return self.num_tokens - 1
            case _:
                return 0

    def advance(self, change: Change) -> None:
        """Apply ``change``; raises InvalidChange naming state and change if it does not fit."""
        match self.state, change:
            case (
                (Waiting(num_preemptions=p) | Loading(num_preemptions=p)),
                Admitted(num_hit_tokens=hit, num_replayed_tokens=replayed),
            ) if 0 <= replayed <= hit < self.num_tokens:
                if self.num_prompt_hit_tokens is None:
                    self.num_prompt_hit_tokens = hit
                self.state = Prefilling(hit - replayed, p)
            case Waiting(num_preemptions=p), Reserved():
                self.state = Loading(p)
            case Loading(num_preemptions=p), LoadEnded():
                self.state = Waiting(p)
            case Prefilling(num_computed=old), Computed(num_computed=new) if (
                old < new <= self.num_tokens
            ):
                self.state = replace(self.state, num_computed=new)
            case (Prefilling(num_computed=n, num_preemptions=p), Committed(token_id=token)) if (
                n == self.num_tokens
            ):
                self.tokens.append(token)
                self.state = Decoding(p)
            case Decoding(), Committed(token_id=token):
                self.tokens.append(token)
            case (
                (
                    Loading(num_preemptions=p)
                    | Prefilling(num_preemptions=p)
                    | Decoding(num_preemptions=p)
                ),
                Preempted(),
            ):
                self.state = Waiting(p + 1)
            case ((Waiting() | Loading() | Prefilling() | Decoding()), Ended(reason=reason)):
                self.state = Finished(reason)
            case _:
                raise InvalidChange(
                    f"sequence {self.sequence_id}: {self.state} has no change {change}"
                )
