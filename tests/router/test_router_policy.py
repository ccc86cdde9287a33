"""Admission is pure: limits and what is in flight in, one decision out."""

from __future__ import annotations

import pytest

from headwater.core.errors import ConfigError
from headwater.core.request import ModelInfo, Request, RequestId, SamplingParams, StopParams
from headwater.router.policy import (
    Accept,
    AdmissionLimits,
    InFlight,
    RefuseBusy,
    RefuseSize,
    decide_admission,
)

LIMITS = AdmissionLimits(max_running_sequences=4, max_waiting_sequences=8, max_waiting_tokens=1000)
IDLE = InFlight(num_sequences=0, num_waiting_tokens=0)


def info(context_tokens: int = 2048, num_blocks: int = 1000) -> ModelInfo:
    return ModelInfo(
        model_id="m", family="llama", fingerprint="f", vocab_size=9,
        context_tokens=context_tokens, block_tokens=16, num_blocks=num_blocks,
        kv_bytes_per_token=4, weights_format="bf16", weights_bytes=1, numerics="reference",
        device="cpu",
    )  # fmt: skip


def request(num_prompt_tokens: int, num_choices: int = 1, max_output_tokens: int = 8) -> Request:
    return Request(
        request_id=RequestId("r"),
        prompt_tokens=tuple(range(num_prompt_tokens)),
        num_choices=num_choices,
        sampling=SamplingParams(),
        stop=StopParams(max_output_tokens=max_output_tokens),
    )


def test_e05_the_queue_has_a_hard_cap_in_sequences() -> None:
    full = InFlight(num_sequences=12, num_waiting_tokens=0)
    assert isinstance(decide_admission(request(10), IDLE, LIMITS, info()), Accept)
    refusal = decide_admission(request(10), full, LIMITS, info())
    assert isinstance(refusal, RefuseBusy)
    assert "12 of 12" in refusal.message


def test_e05_choices_count_each() -> None:
    nearly_full = InFlight(num_sequences=9, num_waiting_tokens=0)
    assert isinstance(decide_admission(request(10, 3), nearly_full, LIMITS, info()), Accept)
    assert isinstance(decide_admission(request(10, 4), nearly_full, LIMITS, info()), RefuseBusy)


def test_e05_waiting_prompt_tokens_have_a_cap_of_their_own() -> None:
    waiting = InFlight(num_sequences=1, num_waiting_tokens=600)
    assert isinstance(decide_admission(request(400), waiting, LIMITS, info()), Accept)
    assert isinstance(decide_admission(request(401), waiting, LIMITS, info()), RefuseBusy)


def test_a_request_larger_than_the_queue_enters_when_nothing_else_is_in_flight() -> None:
    assert isinstance(decide_admission(request(1500, 20), IDLE, LIMITS, info()), Accept)


def test_retry_after_grows_with_the_depth_of_the_queue() -> None:
    deep = AdmissionLimits(max_running_sequences=4, max_waiting_sequences=96)
    shallow_refusal = decide_admission(
        request(1), InFlight(num_sequences=12, num_waiting_tokens=0), LIMITS, info()
    )
    deep_refusal = decide_admission(
        request(1), InFlight(num_sequences=100, num_waiting_tokens=0), deep, info()
    )
    assert isinstance(shallow_refusal, RefuseBusy)
    assert isinstance(deep_refusal, RefuseBusy)
    assert 1 <= shallow_refusal.retry_after_s < deep_refusal.retry_after_s


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_output_tokens", "fits"),
    [(2047, 8, True), (2048, 8, False), (2048, 0, True), (2049, 0, False), (5000, 8, False)],
)
def test_a06_a_prompt_that_leaves_no_room_is_refused_with_the_limit(
    num_prompt_tokens: int, max_output_tokens: int, fits: bool
) -> None:
    decision = decide_admission(
        request(num_prompt_tokens, max_output_tokens=max_output_tokens), IDLE, LIMITS, info()
    )
    if fits:
        assert isinstance(decision, Accept)
    else:
        assert decision == RefuseSize(2048)


def test_a_prompt_that_can_never_fit_the_pool_is_refused_not_queued_for_ever() -> None:
    small_pool = info(num_blocks=10)  # 160 tokens
    assert decide_admission(request(160), IDLE, LIMITS, small_pool) == RefuseSize(160)
    assert isinstance(decide_admission(request(159), IDLE, LIMITS, small_pool), Accept)


def test_limits_are_checked_once_whole() -> None:
    with pytest.raises(ConfigError, match=r"router\.max_running_sequences"):
        AdmissionLimits(max_running_sequences=0)
    with pytest.raises(ConfigError, match=r"router\.max_waiting_sequences"):
        AdmissionLimits(max_waiting_sequences=-1)


def test_running_places_count_for_each_worker_that_decodes() -> None:
    two = InFlight(num_sequences=12, num_waiting_tokens=0, num_decode_workers=2)
    full = InFlight(num_sequences=16, num_waiting_tokens=0, num_decode_workers=2)
    assert isinstance(decide_admission(request(10), two, LIMITS, info()), Accept)
    assert isinstance(decide_admission(request(10), full, LIMITS, info()), RefuseBusy)


def test_e05_the_predicted_queue_has_a_cap_and_the_refusal_says_when_to_come_back() -> None:
    limits = AdmissionLimits(max_queue_s=20.0)
    for queue_s, fits in ((20.0, True), (50.0, False)):
        in_flight = InFlight(num_sequences=3, num_waiting_tokens=0, queue_s=queue_s)
        decision = decide_admission(request(10), in_flight, limits, info())
        assert isinstance(decision, Accept) == fits
    assert isinstance(decision, RefuseBusy)
    assert decision.retry_after_s == 30.0
    with pytest.raises(ConfigError, match="max_queue_s"):
        AdmissionLimits(max_queue_s=0.0)
