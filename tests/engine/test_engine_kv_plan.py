"""KV sizing: who decides, what is refused, and that one full context always fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import ConfigError
from headwater.engine.kv_plan import GIB, KVLimits, KVPlan, plan_kv
from headwater.engine.memory import available_bytes, host_available_bytes

TOKEN_BYTES = 1024


def planned(limits: KVLimits, *, context: int = 8192, available: int = 64 * GIB) -> KVPlan:
    return plan_kv(
        limits,
        bytes_per_token=TOKEN_BYTES,
        model_context_tokens=context,
        available_bytes=available,
    )


def test_num_blocks_and_kv_bytes_are_taken_as_said() -> None:
    assert planned(KVLimits(num_blocks=300)).num_blocks == 300
    plan = planned(KVLimits(kv_bytes=300 * 32 * TOKEN_BYTES + 5))
    assert plan.num_blocks == 300
    assert plan.kv_bytes == 300 * 32 * TOKEN_BYTES


def test_by_default_the_least_of_share_cap_and_need_decides() -> None:
    by_share = planned(KVLimits(), available=GIB)
    assert by_share.kv_bytes == GIB // 4
    assert "25% of 1.0 GiB" in by_share.reason
    by_cap = planned(KVLimits(max_running=10_000))
    assert by_cap.kv_bytes == 4 * GIB
    by_need = planned(KVLimits(max_running=2))
    assert by_need.num_tokens == 2 * 8192
    uncapped = planned(KVLimits(max_running=10_000, default_cap_bytes=None))
    assert uncapped.kv_bytes == 16 * GIB


def test_a_context_nobody_asked_for_is_lowered_and_the_reason_says_so() -> None:
    plan = planned(KVLimits(num_blocks=100))
    assert plan.context_tokens == 3200
    assert "context lowered from 8192 to 3200" in plan.reason


def test_a_context_asked_for_must_fit() -> None:
    with pytest.raises(ConfigError, match=r"holds 3200 tokens, .* 4096"):
        planned(KVLimits(num_blocks=100, context_tokens=4096))
    assert planned(KVLimits(num_blocks=128, context_tokens=4096)).context_tokens == 4096
    with pytest.raises(ConfigError, match="the model's own context is 8192"):
        planned(KVLimits(context_tokens=10_000))


def test_kv_beyond_free_memory_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="only 1073741824 are free"):
        planned(KVLimits(kv_bytes=2 * GIB), available=GIB)


def test_kv_too_small_for_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="too small"):
        planned(KVLimits(kv_bytes=40 * TOKEN_BYTES))
    with pytest.raises(ConfigError, match="too small"):
        planned(KVLimits(), available=1000)


@pytest.mark.parametrize(
    "bad",
    [
        {"kv_bytes": 1, "num_blocks": 1},
        {"kv_bytes": 0},
        {"num_blocks": -1},
        {"block_tokens": 0},
        {"context_tokens": 0},
        {"max_running": 0},
        {"memory_share": 0.0},
        {"memory_share": 1.5},
    ],
)
def test_limits_out_of_range_name_the_setting(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="engine"):
        KVLimits(**bad)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    num_blocks=st.one_of(st.none(), st.integers(1, 5000)),
    context=st.integers(16, 40_000),
    available=st.integers(0, 8 * GIB),
    max_running=st.integers(1, 100),
)
def test_a_plan_holds_one_whole_context_within_memory(
    num_blocks: int | None, context: int, available: int, max_running: int
) -> None:
    limits = KVLimits(num_blocks=num_blocks, max_running=max_running)
    try:
        plan = planned(limits, context=context, available=available)
    except ConfigError:
        return
    assert 0 < plan.context_tokens <= min(plan.num_tokens, context)
    assert plan.kv_bytes == plan.num_tokens * TOKEN_BYTES <= available


def test_free_memory_is_the_least_of_machine_and_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n")
    cgroup = tmp_path / "cgroup"
    assert host_available_bytes(meminfo, cgroup) == 4000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.current").write_text("1000\n")
    (cgroup / "memory.max").write_text("max\n")
    assert host_available_bytes(meminfo, cgroup) == 4000 * 1024
    (cgroup / "memory.max").write_text("5000\n")
    assert host_available_bytes(meminfo, cgroup) == 4000
    (cgroup / "memory.current").write_text("6000\n")
    assert host_available_bytes(meminfo, cgroup) == 0


def test_without_meminfo_half_the_machine_is_assumed(tmp_path: Path) -> None:
    assert host_available_bytes(tmp_path / "none", tmp_path) > 0
    assert available_bytes(torch.device("cpu")) > 0
