"""The scheduler with output constraints: who waits, what is masked, and when an output ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

import pytest
from worker_scripted_engine import VOCAB, Driver, make_request

from headwater.core.blocks import CacheIdentity
from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.core.ports import Matcher, MatcherFactory
from headwater.core.request import FinishReason, Request
from headwater.core.step import RowResult, StepPlan, StepResult
from headwater.kv.manager import KVGroup, KVManager
from headwater.worker.compiling import CompileQueue
from headwater.worker.limits import SchedulerConfig
from headwater.worker.scheduler import Scheduler

END = 49

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class PathMatcher:
    """Outputs are the paths of digits in ``source``: "12|13" allows 1 then 2 or 3.

    "*" allows any number of 7s, "!" is a place where the grammar gives up, "-" a dead end.
    """

    paths: list[str]
    done: list[int] = field(default_factory=list)

    def _next(self) -> set[str]:
        text = "".join(map(str, self.done))
        found = set()
        for path in self.paths:
            if "*" in path:
                head = path.partition("*")[0]
                if text.startswith(head) and set(text[len(head) :]) <= {"7"}:
                    found |= {"7", ""}
                elif head.startswith(text):
                    found.add(head[len(text)])
            elif path.startswith(text):
                found.add(path[len(text) : len(text) + 1])
        return found

    def allowed_bits(self) -> bytes:
        marks = self._next()
        assert not self.must_stop, "asked for a mask after the end"
        if "!" in marks:
            raise InvalidRequest("too much work", code="constraint_too_complex")
        ids = {int(mark) for mark in marks if mark.isdigit()} | ({END} if "" in marks else set())
        return sum(1 << token_id for token_id in ids).to_bytes(8, "little")

    def accept(self, token_id: int) -> bool:
        if token_id != END and str(token_id) not in self._next():
            return False
        if token_id != END:
            self.done.append(token_id)
        return True

    @property
    def is_complete(self) -> bool:
        return "" in self._next()

    @property
    def must_stop(self) -> bool:
        return self._next() == {""}

    def rollback(self, num_tokens: int) -> None:
        del self.done[len(self.done) - num_tokens :]

    def fork(self) -> Matcher:
        return PathMatcher(self.paths, list(self.done))


class PathCompiler:
    def __init__(self) -> None:
        self.num_compiled = 0

    def compile(self, constraint: Constraint) -> MatcherFactory:
        self.num_compiled += 1
        if constraint.source == "bad":
            raise InvalidRequest("that is no grammar", code="invalid_grammar")
        return lambda: PathMatcher(constraint.source.split("|"))

    @property
    def num_cached_grammars(self) -> int:
        return self.num_compiled


class ManualExecutor(Executor):
    """Work waits until the test lets it go."""

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self._held: list[Callable[[], None]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except InvalidRequest as error:
                    future.set_exception(error)

        self._held.append(work)
        if not self._waits:
            self.let_go()
        return future

    def let_go(self) -> None:
        for work in self._held:
            work()
        self._held.clear()


class MaskedEngine:
    """Wraps the scripted engine: the lowest allowed id, unless ``pick`` wants another."""

    def __init__(self, driver: Driver) -> None:
        self._inner = driver.engine
        self.masks: list[set[int] | None] = []

    def run(self, plan: StepPlan) -> StepResult:
        result = self._inner.run(plan)
        rows = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            sample, token = row.sample, row_result.token
            if sample is not None and token is not None:
                bits = sample.allowed_bits
                ids = None if bits is None else _ids(bits)
                self.masks.append(ids)
                if ids is not None:
                    free = sorted(ids - sample.banned_ids)
                    assert free, "a step was planned for a row that has no way on"
                    row_result = RowResult(row.sequence_id, replace(token, token_id=free[0]))
            rows.append(row_result)
        return StepResult(tuple(rows))


def _ids(bits: bytes) -> set[int]:
    number = int.from_bytes(bits, "little")
    return {token_id for token_id in range(VOCAB) if number >> token_id & 1}


class ConstrainedDriver(Driver):
    """A Driver whose scheduler compiles, and whose engine keeps to the masks."""

    def __init__(self, *, waits: bool = False, num_blocks: int = 64) -> None:
        self.executor = ManualExecutor(waits=waits)
        self.compiler = PathCompiler()
        super().__init__(
            Scheduler(
                KVManager(KVGroup(num_blocks=num_blocks, block_tokens=4)),
                SchedulerConfig(
                    context_tokens=256, max_step_tokens=64, max_mixed_prefill_tokens=16,
                    max_running_sequences=8,
                ),
                lambda tenant: CacheIdentity("model", "layout", tenant),
                CompileQueue(self.compiler, self.executor),
            )
        )  # fmt: skip
        self.masked = MaskedEngine(self)

    def step(self) -> bool:
        self.collect(self.scheduler.take_ready())
        plan = self.scheduler.plan()
        self.collect(self.scheduler.take_reports())
        if plan is None:
            return False
        self.plans.append(plan)
        self.collect(self.scheduler.apply(plan, self.masked.run(plan)))
        self.scheduler.audit()
        return True


def bound(name: str, source: str, **params: object) -> Request:
    request = make_request(
        name,
        [1, 2, 3, 4, 5],
        **{"max_output_tokens": 8, "end_token_ids": frozenset({END}), **params},  # type: ignore[arg-type]
    )
    return replace(request, constraint=Constraint("lark", source))


def test_the_output_follows_its_grammar_and_ends_with_it_at_once() -> None:
    driver = ConstrainedDriver()
    driver.submit(bound("a", "123|145"))
    driver.run()
    assert driver.ids["a", 0] == [1, 2, 3]
    finish = driver.finishes["a", 0]
    assert (finish.finish, finish.stop_token_id) == (FinishReason.STOP, None)
    assert driver.masked.masks == [{1}, {2, 4}, {3}]
    assert len(driver.plans) == 3, "no step for an end id that says nothing new"


def test_an_output_that_could_go_on_ends_with_the_models_own_end_id() -> None:
    driver = ConstrainedDriver()
    driver.submit(bound("a", "1*", max_output_tokens=4))
    driver.run()
    assert driver.ids["a", 0] == [1, 7, 7, 7]
    assert driver.reason("a") is FinishReason.LENGTH
    assert driver.masked.masks[1:] == [{7, END}] * 3


def test_a_grammar_that_is_complete_with_the_last_token_is_a_stop_not_a_length() -> None:
    driver = ConstrainedDriver()
    driver.submit(bound("a", "123", max_output_tokens=3), bound("b", "1234", max_output_tokens=3))
    driver.run()
    assert driver.reason("a") is FinishReason.STOP
    assert driver.reason("b") is FinishReason.LENGTH


def test_others_go_on_while_a_constraint_is_compiled() -> None:
    driver = ConstrainedDriver(waits=True)
    driver.submit(bound("slow", "12"), make_request("quick", [1, 2, 3], 4))
    while driver.step():
        pass
    assert driver.reason("quick") is FinishReason.LENGTH
    assert "slow" not in {name for name, _ in driver.ids}
    scheduler = driver.scheduler
    assert scheduler.is_awaiting
    assert not scheduler.has_work, "the loop may wait instead of spinning"
    assert scheduler.load().num_waiting == 1
    scheduler.audit()
    driver.executor.let_go()
    driver.run()
    assert driver.ids["slow", 0] == [1, 2]
    assert not scheduler.is_awaiting


@pytest.mark.parametrize("waits", [False, True])
def test_i03_a_grammar_that_passed_the_front_and_is_refused_here_fails_every_choice_alone(
    waits: bool,
) -> None:
    driver = ConstrainedDriver(waits=waits)
    driver.submit(bound("bad", "bad", n=2), bound("good", "12"))
    driver.executor.let_go()
    driver.run()
    for index in range(2):
        finish = driver.finishes["bad", index]
        assert (finish.finish, finish.error) == (FinishReason.FAILED, "that is no grammar")
    assert driver.ids["good", 0] == [1, 2]


def test_every_choice_has_a_matcher_of_its_own() -> None:
    driver = ConstrainedDriver()
    driver.submit(bound("a", "12345", n=3))
    driver.run()
    assert [driver.ids["a", index] for index in range(3)] == [[1, 2, 3, 4, 5]] * 3
    assert driver.compiler.num_compiled == 1


def test_a_preempted_output_goes_on_where_its_grammar_was() -> None:
    path = "1234567012345670"
    driver = ConstrainedDriver(num_blocks=9)
    requests = [bound(name, path, max_output_tokens=20) for name in "abc"]
    driver.submit(*(replace(r, prompt_tokens=(i,) * 5) for i, r in enumerate(requests)))
    driver.run()
    assert driver.scheduler.load().num_preemptions > 0
    for name in "abc":
        assert driver.ids[name, 0] == [int(digit) for digit in path]
        assert driver.reason(name) is FinishReason.STOP


@pytest.mark.parametrize("when", ["compiling", "waiting", "running"])
def test_an_abort_at_any_moment_leaves_nothing(when: str) -> None:
    driver = ConstrainedDriver(waits=when == "compiling")
    driver.submit(bound("a", "12345670", n=2), bound("b", "12"))
    if when == "running":
        driver.step()
        driver.step()
    driver.abort("a", 1)
    driver.abort("a")
    assert driver.reason("a", 0) is FinishReason.ABORTED
    assert driver.reason("a", 1) is FinishReason.ABORTED
    driver.executor.let_go()
    driver.run()
    assert driver.ids["b", 0] == [1, 2]
    assert not driver.scheduler.is_awaiting


def test_f05_nobody_is_asked_for_a_mask_after_the_end() -> None:
    driver = ConstrainedDriver()
    driver.submit(*(bound(str(i), "1|12|7*", max_output_tokens=i) for i in range(1, 6)))
    driver.run()  # PathMatcher asserts it


@pytest.mark.parametrize(("source", "says"), [("1!", "too much work"), ("1-", "no token")])
def test_a_grammar_that_gives_up_midway_fails_its_own_output_with_a_reason(
    source: str, says: str
) -> None:
    driver = ConstrainedDriver()
    driver.submit(bound("a", source), bound("b", "12"))
    driver.run()
    assert driver.reason("a") is FinishReason.FAILED
    assert says in (driver.finishes["a", 0].error or "")
    assert driver.ids["a", 0] == [1], "what was committed is told"
    assert driver.ids["b", 0] == [1, 2]


@pytest.mark.parametrize("source", ["-", "!"])
def test_a_grammar_without_a_beginning_fails_before_any_step(source: str) -> None:
    driver = ConstrainedDriver()
    driver.submit(bound("a", source))
    driver.run()
    assert driver.reason("a") is FinishReason.FAILED
    assert not driver.plans


def test_a_token_outside_the_grammar_fails_the_output_instead_of_breaking_it() -> None:
    driver = ConstrainedDriver()
    driver.submit(bound("a", "123"))
    scheduler = driver.scheduler
    scheduler.take_ready()
    plan = scheduler.plan()
    assert plan is not None
    result = driver.engine.run(plan)  # an engine that does not know masks
    (row,) = result.rows
    assert row.token is not None
    wrong = RowResult(row.sequence_id, replace(row.token, token_id=9))
    driver.collect(scheduler.apply(plan, StepResult((wrong,))))
    assert driver.reason("a") is FinishReason.FAILED
    assert "does not allow" in (driver.finishes["a", 0].error or "")


def test_min_tokens_holds_an_output_that_could_go_on_and_not_one_that_cannot() -> None:
    driver = ConstrainedDriver()
    driver.submit(
        bound("long", "1*", min_output_tokens=3, max_output_tokens=5),
        bound("short", "12", min_output_tokens=6),
    )
    driver.run()
    assert driver.ids["short", 0] == [1, 2]
    assert driver.reason("short") is FinishReason.STOP
    assert len(driver.ids["long", 0]) >= 3


def test_ignore_end_takes_the_end_ids_away_until_nothing_else_is_left() -> None:
    driver = ConstrainedDriver()
    driver.submit(
        bound("open", "1*", ignore_end=True, max_output_tokens=4),
        bound("closed", "12|12", ignore_end=True),
    )
    driver.run()
    assert driver.ids["open", 0] == [1, 7, 7, 7]
    assert all(END not in (mask or ()) for mask in driver.masked.masks)
    assert driver.reason("closed") is FinishReason.STOP


def test_a_worker_without_a_compiler_refuses_constraints() -> None:
    scheduler = Scheduler(
        KVManager(KVGroup(num_blocks=4, block_tokens=4)),
        SchedulerConfig(context_tokens=64),
        lambda tenant: CacheIdentity("model", "layout", tenant),
    )
    with pytest.raises(InvalidRequest, match="constraints"):
        scheduler.submit(bound("a", "1"))
    assert not scheduler.has_work
    scheduler.audit()


def test_j09_a_worker_says_how_many_grammars_it_keeps() -> None:
    driver = ConstrainedDriver()
    assert driver.scheduler.load().num_cached_grammars == 0
    driver.submit(bound("a", "12"))
    driver.run()
    assert driver.scheduler.load().num_cached_grammars == 1
