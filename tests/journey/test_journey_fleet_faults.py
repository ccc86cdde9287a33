"""A fleet under load whose workers are killed, stopped and cut off: nobody's answer suffers.

A short, seeded run; `bench/fleet.py --faults 200` does hundreds of rounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from journey_fleet import Verdict
from journey_fleet_faults import (
    SHORT_RUN,
    Driver,
    Harm,
    Standing,
    can_cut,
    files_in_shared_memory,
    fleet,
    leftovers,
    make_questions,
)


@pytest.mark.timeout(240)  # on a machine that does nothing else it takes some 40 s
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_faults_of_every_worker_in_every_phase_cost_no_answer_and_leave_nothing_d01_d03_d05_d08(
    tmp_path: Path,
) -> None:
    questions, expected = make_questions(tmp_path / "single", 7, 40)
    before = files_in_shared_memory()
    with fleet(tmp_path) as made:
        driver = Driver(made, questions, expected, seed=7)
        start = Standing.of(made.served.process.pid)
        for fault in SHORT_RUN:
            if fault.harm is not Harm.CUT or can_cut():
                driver.round(fault)
        made.served.wait_until("all workers again", lambda: made.is_complete)
        end = Standing.of(made.served.process.pid)
        log = made.served.log.read_text()
    tally = driver.tally
    assert not tally.failures, "\n".join(tally.failures[:5])
    assert tally.num_harmed == tally.num_rounds
    assert tally.verdicts[Verdict.RIGHT] > 0.9 * tally.verdicts.total(), tally.verdicts
    assert "Traceback" not in log
    assert leftovers(made, before) == []
    # A few threads of a pool may have been made; one for each fault would be more.
    assert end.num_threads <= start.num_threads + 6, (start, end)
    assert end.num_files <= start.num_files + 10, (start, end)
