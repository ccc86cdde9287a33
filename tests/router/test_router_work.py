"""What of a prompt whom is predicted to compute, with and without decoder replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_sim import COST, sim_info, sim_request
from router_workers import LOAD

from headwater.core.blocks import CacheIdentity, block_keys
from headwater.core.control import StepTiming
from headwater.core.errors import InvalidChange
from headwater.core.fleet import Holding, KVEvents, Role, handed_tokens
from headwater.core.request import ModelInfo, Request, late_start
from headwater.router.dispatch import Ask, DispatchConfig, Dispatcher, Placement
from headwater.router.fleet_policy import phase_seconds
from headwater.router.work_policy import PromptWork

PLAIN = sim_info(num_blocks=400)  # of 32 tokens
REPLAY = replace(PLAIN, window_tokens=128, alignment=2, decoder_replay_tokens=140)
LATE_COST = replace(COST, late_token_s=5e-4)


def prompt(num_tokens: int, name: str = "a", first: int = 0) -> Request:
    return sim_request(name, range(first, first + num_tokens), num_output=32)


def work_of(num_tokens: int, info: ModelInfo, num_resumed_tokens: int = 0) -> PromptWork:
    return PromptWork.of(prompt(num_tokens), num_resumed_tokens, info)


@pytest.mark.parametrize(
    ("num_tokens", "num_handed"), [(1, 0), (140, 0), (141, 0), (142, 2), (143, 2), (1000, 860)]
)
def test_what_late_layers_compute_of_a_prompt_is_not_handed_over(
    num_tokens: int, num_handed: int
) -> None:
    assert handed_tokens(prompt(num_tokens), 140, 2) == num_handed
    assert handed_tokens(prompt(num_tokens), None, 2) == num_tokens - 1


def test_a_prompt_whose_every_hidden_state_is_read_is_not_handed_over() -> None:
    asked = replace(prompt(1000), num_prompt_logprobs=0)
    assert handed_tokens(asked, 140, 2) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 2000), st.integers(0, 300), st.integers(0, 2000), st.booleans(),
)  # fmt: skip
def test_the_parts_of_a_prompt_are_the_whole_and_a_hit_saves_no_late_token(
    num_prompt: int, num_resumed: int, num_hit: int, has_replay: bool
) -> None:
    info = REPLAY if has_replay else PLAIN
    work = work_of(num_prompt, info, num_resumed)
    num_hit = min(num_hit, num_prompt - 1)
    alone = work.alone(num_hit)
    assert 1 <= alone.num_tokens <= num_prompt + num_resumed
    if work.num_handed:
        given_away = work.prefill(0)
        assert given_away.num_tokens == work.num_handed
        assert given_away.num_late_tokens == 0
        assert 1 <= work.prefill(num_hit).num_tokens <= given_away.num_tokens
    if not has_replay:
        assert alone.num_tokens == num_prompt + num_resumed - num_hit
        assert work.decode().num_tokens == alone.num_late_tokens == 0
        return
    late = late_start(prompt(num_prompt), REPLAY.decoder_replay_tokens)
    assert late is not None
    num_late = num_prompt + num_resumed - late
    assert alone.num_late_tokens == work.decode().num_late_tokens == num_late
    assert work.prefill(0).num_tokens + work.decode().num_tokens >= num_prompt + num_resumed
    assert work.decode().num_tokens - num_late < REPLAY.alignment


# Placing


class Desk:
    """A split fleet whose prompts are computed with decoder replay."""

    def __init__(self, *roles: Role, info: ModelInfo = REPLAY) -> None:
        self.dispatcher = Dispatcher(info, DispatchConfig())
        self.info = info
        for number, role in enumerate(roles or (Role.PREFILL, Role.DECODE)):
            self.dispatcher.join(f"w{number}", role, info, 0.0)
            self.dispatcher.told(f"w{number}", replace(LOAD, cost=LATE_COST))

    def place(self, request: Request, now_s: float = 0.0) -> Placement | None:
        ask = Ask(key=str(request.request_id), request=request, num_choices=request.num_choices)
        self.dispatcher.add(ask, now_s)
        return self.dispatcher.next(now_s)

    def holds(self, worker_id: str, request: Request, num_blocks: int) -> None:
        root = CacheIdentity(self.info.fingerprint, self.info.layout).root_key()
        keys = [key for key, _ in block_keys(root, request.prompt_tokens, self.info.block_tokens)]
        self.dispatcher.learned(worker_id, KVEvents(added=tuple(keys[:num_blocks])))


def test_each_side_is_booked_for_what_it_computes_and_decode_only_once_it_can() -> None:
    desk = Desk()
    assert desk.place(prompt(1000))
    prefill, decode = (desk.dispatcher.books[name] for name in ("w0", "w1"))
    assert prefill.queue_s == pytest.approx(LATE_COST.predict_s(work_of(1000, REPLAY).prefill(0)))
    assert decode.queue_s == 0.0, "nobody waits behind what cannot be computed yet"
    rest_s = LATE_COST.predict_s(work_of(1000, REPLAY).decode())
    assert decode.recent_s == pytest.approx(rest_s)
    desk.dispatcher.computed("w0", 860)
    assert prefill.queue_s == pytest.approx(0.0)
    desk.dispatcher.arrived("w1", "a")
    assert decode.queue_s == pytest.approx(rest_s)
    desk.dispatcher.arrived("w1", "a")
    desk.dispatcher.computed("w1", 70)
    assert decode.queue_s == pytest.approx(rest_s / 2)
    assert desk.dispatcher.shared_queue_s == pytest.approx(0.0), "it is for nobody else"
    desk.dispatcher.prefilled("w1", "a")
    assert decode.queue_s == 0.0
    desk.dispatcher.audit({("w0", "a"), ("w1", "a")}, set())


def test_what_is_over_before_it_arrived_is_not_lined_up_again() -> None:
    desk = Desk()
    assert desk.place(prompt(1000))
    desk.dispatcher.prefilled("w1", "a")
    desk.dispatcher.arrived("w1", "a")
    assert desk.dispatcher.books["w1"].queue_s == 0.0
    desk.dispatcher.ended("w1", "a")
    desk.dispatcher.arrived("w1", "a")
    assert desk.dispatcher.books["w1"].queue_s == 0.0


def test_without_replay_the_decode_side_has_no_prompt_to_compute() -> None:
    desk = Desk(info=PLAIN)
    assert desk.place(prompt(1000))
    desk.dispatcher.arrived("w1", "a")
    assert desk.dispatcher.books["w1"].queue_s == desk.dispatcher.books["w1"].recent_s == 0.0


@pytest.mark.parametrize(("num_tokens", "is_split"), [(100, False), (170, False), (172, True)])
def test_a_prompt_of_which_less_than_a_block_would_be_handed_over_goes_straight_to_decode(
    num_tokens: int, is_split: bool
) -> None:
    placement = Desk().place(prompt(num_tokens))
    assert placement is not None
    assert placement.decode_id == "w1"
    assert (placement.prefill_id is not None) == is_split


def test_a_decode_worker_that_holds_all_up_to_the_late_layers_computes_the_rest_alone() -> None:
    desk, request = Desk(), prompt(1000)
    desk.holds("w1", request, 26)  # 832 of the 860 tokens that would be handed over
    placement = desk.place(request)
    assert placement is not None
    assert placement.prefill_id is None
    assert desk.dispatcher.books["w1"].queue_s == pytest.approx(
        LATE_COST.predict_s(work_of(1000, REPLAY).alone(832))
    )


def test_a_hit_does_not_save_the_tokens_that_late_layers_compute_again() -> None:
    desk, request = Desk(Role.BOTH), prompt(1000)
    desk.holds("w0", request, 31)
    assert desk.place(request)
    replayed = LATE_COST.predict_s(work_of(1000, REPLAY).alone(0)) - LATE_COST.predict_s(
        replace(work_of(1000, REPLAY), num_tokens=860).alone(0)
    )
    assert desk.dispatcher.books["w0"].queue_s > replayed
    desk.dispatcher.computed("w0", 140)
    assert desk.dispatcher.books["w0"].queue_s == pytest.approx(0.0)


def test_the_bucket_is_chosen_by_miss_tokens_and_weighed_by_what_is_computed() -> None:
    desk, request = Desk(Role.BOTH), prompt(4200)
    desk.holds("w0", request, 131)
    ask = Ask(key="a", request=request, num_choices=1)
    desk.dispatcher.add(ask, 0.0)
    assert ask.bucket == 0
    work = PromptWork.of(request, 0, REPLAY)
    assert desk.dispatcher.queue_s == pytest.approx(LATE_COST.predict_s(work.alone(131 * 32)))


def test_a_split_is_asked_of_the_prefill_workers_for_their_part_alone() -> None:
    desk = Desk()
    for name in "bcd":  # so that the next one has to wait
        desk.place(prompt(3000, name, first=10_000 * ord(name)))
    queued_s = desk.dispatcher.queue_s
    request = prompt(1000)
    desk.dispatcher.add(Ask(key="a", request=request, num_choices=1), 0.0)
    assert desk.dispatcher.queue_s - queued_s == pytest.approx(
        LATE_COST.predict_s(PromptWork.of(request, 0, REPLAY).prefill(0))
    )


# What a worker holds


def test_a_worker_with_the_early_part_alone_never_becomes_anything_else() -> None:
    dispatcher = Dispatcher(REPLAY, DispatchConfig())
    dispatcher.join("w0", Role.PREFILL, REPLAY, 0.0, holds=Holding.EARLY)
    for acting in (Role.DECODE, Role.BOTH):
        with pytest.raises(InvalidChange, match=f"early part of the model cannot become {acting}"):
            dispatcher.act_as("w0", acting, 1.0)
    assert dispatcher.books["w0"].acting is Role.PREFILL


def test_what_a_decode_worker_computes_of_a_prompt_is_its_own_phase() -> None:
    timing = StepTiming(
        plan_s=0.0, forward_s=1.0, sample_s=0.0, apply_s=0.0,
        num_prefill_tokens=150, num_decode_tokens=50,
    )  # fmt: skip
    assert phase_seconds(timing, Role.BOTH) == (0.75, 0.25)
    assert phase_seconds(timing, Role.PREFILL) == (0.75, 0.25)
    assert phase_seconds(timing, Role.DECODE) == (0.0, 1.0)
