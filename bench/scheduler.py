"""What planning and applying a step costs, without any engine.

    python -m bench.scheduler

Decode steps with 16 and 256 sequences of 1k tokens each, and admission of 1k-token
prompts with and without hits. Microseconds per step, best and median of the
run; compare them with the forward pass of the same step, not with other machines.
"""

from __future__ import annotations

import statistics
import time

from headwater.core.blocks import CacheIdentity
from headwater.core.request import Request, RequestId, SampledToken, SamplingParams, StopParams
from headwater.core.step import RowResult, StepPlan, StepResult
from headwater.kv.manager import KVGroup, KVManager
from headwater.worker.limits import SchedulerConfig
from headwater.worker.scheduler import Scheduler

BLOCK_TOKENS = 32
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 200


def answer(plan: StepPlan) -> StepResult:
    token = SampledToken(7)
    return StepResult(
        tuple(RowResult(row.sequence_id, token if row.sample else None) for row in plan.rows)
    )


def make_scheduler(num_sequences: int) -> Scheduler:
    num_blocks = num_sequences * (PROMPT_TOKENS + OUTPUT_TOKENS + BLOCK_TOKENS) // BLOCK_TOKENS
    return Scheduler(
        KVManager(KVGroup(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)),
        SchedulerConfig(
            context_tokens=8192,
            # All prompts start in the first step, so that every later one is pure decode.
            max_step_tokens=num_sequences * PROMPT_TOKENS,
            max_running_sequences=num_sequences,
            reserve_blocks_per_sequence=0,
        ),
        lambda tenant: CacheIdentity("model", "layout", tenant),
    )


def submit(scheduler: Scheduler, name: str, first_token: int) -> None:
    scheduler.submit(
        Request(
            request_id=RequestId(name),
            prompt_tokens=(first_token, *range(1, PROMPT_TOKENS)),
            sampling=SamplingParams(),
            stop=StopParams(max_output_tokens=OUTPUT_TOKENS, end_token_ids=frozenset({2})),
        )
    )


def timed_step(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds of plan and of apply."""
    start_s = time.perf_counter()
    plan = scheduler.plan()
    planned_s = time.perf_counter()
    if plan is None:
        raise SystemExit("no step to plan")
    result = answer(plan)
    ran_s = time.perf_counter()
    scheduler.apply(plan, result)
    return planned_s - start_s, time.perf_counter() - ran_s


def report(name: str, steps: list[tuple[float, float]]) -> None:
    plan_us, apply_us = ([seconds * 1e6 for seconds in part] for part in zip(*steps, strict=True))
    both_us = [p + a for p, a in zip(plan_us, apply_us, strict=True)]
    plan, apply, both = map(statistics.median, (plan_us, apply_us, both_us))
    print(
        f"{name:34} plan {plan:6.0f}  apply {apply:6.0f}  both {both:6.0f}"
        f"  best {min(both_us):6.0f}  us/step"
    )


def bench_decode(num_sequences: int) -> None:
    scheduler = make_scheduler(num_sequences)
    for number in range(num_sequences):
        submit(scheduler, f"r{number}", number + 1)
    timed_step(scheduler)
    report(
        f"decode, {num_sequences} x {PROMPT_TOKENS}+ tokens",
        [timed_step(scheduler) for _ in range(OUTPUT_TOKENS - 2)],
    )


def bench_admission(*, is_hit: bool) -> None:
    scheduler = make_scheduler(64)
    steps = []
    for number in range(64):
        submit(scheduler, f"r{number}", 1 if is_hit else number + 1)
        steps.append(timed_step(scheduler))
    report(f"start a {PROMPT_TOKENS}-token prompt, {'hit' if is_hit else 'miss'}", steps[1:])


def main() -> None:
    for num_sequences in (16, 256):
        bench_decode(num_sequences)
    for is_hit in (False, True):
        bench_admission(is_hit=is_hit)


if __name__ == "__main__":
    main()
