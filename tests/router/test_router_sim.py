"""Fleets on a simulated clock: what the policies come to together."""

from __future__ import annotations

from random import Random

import pytest
from router_sim import Job, Sim, percentile, sim_info, sim_request

from headwater.core.fleet import Role
from headwater.router.dispatch import Ask, DispatchConfig

SPLIT = [Role.PREFILL, Role.DECODE]


def long_and_short(sim: Sim) -> tuple[list[Job], list[Job]]:
    """Ten prompts of 6,000 tokens at once, then twenty of 200 within two seconds."""
    longs = [
        sim.arrive(sim_request(f"long{n}", range(n, n + 6000), num_output=20), 0.0)
        for n in range(10)
    ]
    shorts = [
        sim.arrive(
            sim_request(f"short{n}", range(10_000 * n, 10_000 * n + 200), num_output=20),
            0.5 + 0.1 * n,
        )
        for n in range(20)
    ]
    sim.run()
    return longs, shorts


@pytest.mark.parametrize("roles", [[Role.BOTH], SPLIT])
def test_e01_short_prompts_do_not_wait_for_the_long_ones_and_those_hardly_notice(
    roles: list[Role],
) -> None:
    longs_before, shorts_before = long_and_short(Sim([Role.BOTH], is_fcfs=True))
    longs, shorts = long_and_short(Sim(roles))
    before_s = percentile([job.ttft_s for job in shorts_before], 0.95)
    assert percentile([job.ttft_s for job in shorts], 0.95) <= 0.2 * before_s
    assert max(job.took_s for job in longs) <= 1.3 * max(job.took_s for job in longs_before)
    assert sum(job.took_s for job in longs) <= 1.3 * sum(job.took_s for job in longs_before)


def test_e01_a_flood_of_short_prompts_does_not_starve_a_long_one() -> None:
    sim = Sim([Role.BOTH])
    random = Random(1)
    at_s = 0.0
    for number in range(3000):  # more than the worker can compute
        at_s += random.expovariate(1 / 0.06)
        start = 300 * number
        sim.arrive(sim_request(f"short{number}", range(start, start + 200)), at_s)
    long = sim.arrive(sim_request("long", range(6000)), 10.0)
    sim.run(until_s=200.0)
    alone = Sim([Role.BOTH])
    alone_s = alone.arrive(sim_request("long", range(6000)), 0.0)
    alone.run()
    assert long.done_s is not None, "it starves"
    assert long.took_s < 12 * alone_s.took_s


def test_a_long_prompt_that_needs_half_the_pool_gets_it_in_the_end() -> None:
    sim = Sim([Role.BOTH], info=sim_info(num_blocks=400))
    for number in range(600):
        start = 300 * number
        sim.arrive(
            sim_request(f"short{number}", range(start, start + 200), num_output=100), 0.3 * number
        )
    long = sim.arrive(sim_request("long", range(7000), num_output=5), 5.0)
    sim.run()
    assert long.took_s < 90.0


def test_a_prompt_that_only_a_lost_worker_could_hold_keeps_nobody_waiting() -> None:
    sim = Sim([Role.BOTH, Role.BOTH], info=sim_info(num_blocks=100))
    sim.dispatcher.leave("both-1")
    big = sim_request("big", range(5000))
    sim.dispatcher.add(Ask(key="big", request=big, num_choices=1), 0.0)
    sim.dispatcher.add_again(Ask(key="big#2", request=big, num_choices=1))
    small = sim.arrive(sim_request("small", range(100)), 100.0)
    sim.run()
    assert small.took_s < 1.0
    sim.dispatcher.join("both-1", Role.BOTH, sim_info(num_blocks=1000), 101.0)
    placed = [sim.dispatcher.next(101.0), sim.dispatcher.next(105.0)]
    assert [p.key for p in placed if p is not None] == ["big#2"], "one is ahead of the other"


def test_one_tenants_burst_leaves_another_tenant_its_turn() -> None:
    def ttft_s(*, tenant: str) -> float:
        sim = Sim([Role.BOTH])
        for number in range(200):
            start = 300 * number
            sim.arrive(
                sim_request(f"burst{number}", range(start, start + 200), tenant="noisy"), 0.0
            )
        job = sim.arrive(sim_request("single", range(200), tenant=tenant), 1.0)
        sim.run()
        return job.ttft_s

    assert ttft_s(tenant="quiet") <= 0.2 * ttft_s(tenant="noisy")


@pytest.mark.parametrize("gap_s", [0.0, 1.0])
def test_e08_a_prefix_that_all_share_does_not_bring_all_to_one_worker(gap_s: float) -> None:
    sim = Sim([Role.BOTH] * 4, keeps_kv=True)
    system = tuple(range(1000, 1512))
    for number in range(200):
        own = tuple(range(20_000 + 100 * number, 20_000 + 100 * number + 100))
        sim.arrive(sim_request(f"user{number}", system + own, num_output=10), gap_s * number)
    sim.run()
    counts = [worker.num_jobs for worker in sim.workers.values()]
    assert max(counts) <= 1.5 * sum(counts) / 4, counts
    placements = [job.placement for job in sim.jobs.values() if job.placement is not None]
    num_hits = sum(placement.num_hit_tokens == 512 for placement in placements)
    assert num_hits >= 180, "and yet nearly all of them find it"


def test_one_conversation_stays_where_its_prefix_is() -> None:
    sim = Sim([Role.BOTH] * 4, keeps_kv=True)
    for turn in range(8):
        tokens = tuple(range(3000 + 200 * turn))
        sim.arrive(sim_request(f"turn{turn}", tokens, num_output=20), 10.0 * turn)
    sim.run()
    places = {job.placement.decode_id for job in sim.jobs.values() if job.placement is not None}
    assert len(places) == 1


def test_e08_a_restarted_worker_is_not_sent_what_it_no_longer_holds() -> None:
    sim = Sim([Role.BOTH, Role.BOTH], keeps_kv=True)
    first = sim.arrive(sim_request("first", range(3000)), 0.0)
    sim.run()
    assert first.placement is not None
    lost = first.placement.decode_id
    sim.dispatcher.leave(lost)
    sim.workers[lost].keys.clear()
    sim.dispatcher.join(lost, Role.BOTH, sim.info, sim.now_s)
    again = sim.arrive(sim_request("again", range(3000)), sim.now_s + 1.0)
    sim.run()
    assert again.placement is not None
    assert again.placement.num_hit_tokens == 0


def test_decode_workers_share_the_sequences_evenly() -> None:
    sim = Sim([Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE])
    for number in range(90):
        start = 300 * number
        sim.arrive(sim_request(f"r{number}", range(start, start + 64), num_output=200), 0.0)
    sim.run(until_s=6.0)
    counts = [len(sim.workers[f"decode-{n}"].decoding) for n in range(3)]
    assert sum(counts) > 60
    assert max(counts) - min(counts) <= 3


def test_a_full_decode_pool_lets_nobody_in_and_loses_nobody() -> None:
    sim = Sim(SPLIT, info=sim_info(num_blocks=64))
    for number in range(40):
        start = 300 * number
        sim.arrive(sim_request(f"r{number}", range(start, start + 256), num_output=64), 0.0)
    most = 0
    for second in range(400):
        sim.run(until_s=float(second))
        used = sum(
            -(-(job.request.num_prompt_tokens + job.num_output) // 32)
            for job in sim.workers["decode-0"].decoding
        )
        most = max(most, used)
    sim.run()
    assert 32 < most <= 64


def test_a_worker_is_never_given_more_sequences_than_it_runs_and_a_few() -> None:
    config = DispatchConfig(max_running_sequences=4, ahead_sequences=2)
    sim = Sim([Role.BOTH], config=config)
    for number in range(50):
        start = 300 * number
        sim.arrive(sim_request(f"r{number}", range(start, start + 32), num_output=50), 0.0)
    most = 0
    for tick in range(200):
        sim.run(until_s=tick / 10)
        most = max(most, sim.dispatcher.books["both-0"].num_active)
    sim.run()
    assert most == 6
