"""What rooms need from each other, as protocols. ``app`` hands the parts in.

One contract suite per port runs over every implementation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headwater.core.constraint import Constraint
from headwater.core.control import FromWorker, StepTiming, ToWorker, WorkerLoad
from headwater.core.request import ModelInfo, Request, SequenceOutput
from headwater.core.step import StepPlan, StepResult


class Clock(Protocol):
    """Monotonic seconds. Policies take one instead of reading the time."""

    def now_s(self) -> float: ...


class Engine(Protocol):
    """One device, one step. Needed by ``worker``, provided by ``engine``."""

    @property
    def info(self) -> ModelInfo: ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute ``plan``; results in the plan's order. Raises EngineFault; then the
        KV of the plan's rows from ``row.start`` on is undefined, everything else is intact."""
        ...


class Matcher(Protocol):
    """How far one output has come in its grammar, and what may follow.

    Needed by ``worker``, provided by ``recipe``. The same object for the whole life of
    an output, preemptions included; used from one thread at a time.
    """

    def allowed_bits(self) -> bytes:
        """The ids that may come next: bit ``i % 8`` of byte ``i // 8`` is id i, in whole
        32-bit words. End ids are among them where the output may stop. Raises
        InvalidRequest when the grammar needs more work here than its limits allow."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on with ``token_id``. False, with nothing changed, if it may not come next."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the output may stop here."""
        ...

    @property
    def must_stop(self) -> bool:
        """Whether nothing but an end id may follow."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` accepted ones: drafts that the model did not take."""
        ...

    def fork(self) -> Matcher:
        """An independent matcher at the same place."""
        ...


MatcherFactory = Callable[[], Matcher]  # a matcher at the start of its grammar


class ConstraintCompiler(Protocol):
    """Makes matchers of constraints. May take long: never called on a step's thread."""

    def compile(self, constraint: Constraint) -> MatcherFactory:
        """Raises InvalidRequest saying what is wrong with the schema, regex or grammar."""
        ...

    @property
    def num_cached_grammars(self) -> int: ...


class WorkerPort(Protocol):
    """The worker's end of its channel to the front."""

    def receive(self, timeout_s: float) -> Sequence[ToWorker]:
        """All messages that are there; waits up to ``timeout_s`` for the first. 0 never waits."""
        ...

    def send(self, message: FromWorker) -> None:
        """Never blocks for long: the front drains as fast as it can."""
        ...


class WorkerChannel(Protocol):
    """The front's end of the channel to one worker."""

    async def send(self, message: ToWorker) -> None:
        """Raises WorkerLost when the worker is gone."""
        ...

    def messages(self) -> AsyncIterator[FromWorker]:
        """Messages in order; raises WorkerLost at once when the worker dies. One reader."""
        ...

    async def close(self) -> None:
        """End the worker and release the channel; safe to call twice."""
        ...


class WorkerLauncher(Protocol):
    """Starts workers for ``router``: local processes, threads in tests, a cluster later."""

    async def launch(self) -> WorkerChannel:
        """A channel to a fresh worker, whose first message will be Hello.

        Raises WorkerLost when none could be started."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """``ready`` is the truth about taking a request now; ``reason`` says why not."""

    ready: bool
    reason: str
    num_in_flight: int  # requests accepted and not finished
    num_worker_restarts: int
    load: WorkerLoad | None
    step_totals: StepTiming  # of all steps since the front started


class Generator(Protocol):
    """Where ``api`` sends requests; provided by ``router``."""

    @property
    def info(self) -> ModelInfo | None:
        """What is served; None until a worker said Hello."""
        ...

    def status(self) -> ServiceStatus: ...

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """Outputs of all choices as they are committed, ending after the last finish.

        Raises Overloaded, NotReady or PromptTooLong at the first ``anext``, at once:
        a refusal never waits for work. Raises WorkerLost if the worker dies under it. Closing the
        iterator (``aclose``) aborts whatever has not finished.
        """
        ...

    async def abort_choice(self, request: Request, index: int) -> None:
        """End one choice early (its stop string was seen); the others go on."""
        ...
