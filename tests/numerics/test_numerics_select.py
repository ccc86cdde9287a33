"""The right implementation for a device and mode, or an error that says what to change."""

from __future__ import annotations

import pytest
import torch

from headwater.core.errors import ConfigError
from headwater.numerics.cpu import CpuOps
from headwater.numerics.ops import WeightFormat
from headwater.numerics.probe import best_time_s, machine_limits
from headwater.numerics.reference import ReferenceOps
from headwater.numerics.select import describe_devices, select_ops


def test_a_cpu_gets_the_fast_path_or_the_reference() -> None:
    fast = select_ops("cpu", "fast", WeightFormat.INT8, 1)
    assert isinstance(fast, CpuOps)
    assert fast.num_threads == 1
    fast.close()
    reference = select_ops("cpu", "reference", WeightFormat.FP32, 1)
    assert isinstance(reference, ReferenceOps)
    assert reference.act_dtype == torch.float32
    assert fast.kernels().keys() & reference.kernels().keys()


@pytest.mark.parametrize(
    ("device", "mode", "weight_format", "threads", "message"),
    [
        ("tpu", "fast", WeightFormat.BF16, 1, "device must be one of auto, cpu, cuda"),
        ("cpu", "quick", WeightFormat.BF16, 1, "mode must be one of fast, reference"),
        ("cpu", "fast", WeightFormat.FP32, 1, "choose weights 'bf16' or 'int8'"),
        ("cpu", "fast", WeightFormat.BF16, 0, "threads must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_had_is_a_config_error_that_says_what_to_change(
    device: str, mode: str, weight_format: WeightFormat, threads: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        select_ops(device, mode, weight_format, threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        select_ops("cuda")


def test_the_cpu_is_described_last_with_facts_for_a_person() -> None:
    name, facts = describe_devices()[-1]
    assert name == "cpu"
    assert int(facts["cores"]) >= 1
    assert all(facts.values())


def test_limits_are_positive_and_leave_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.numerics.probe._GEMM_SIZE", 64)
    monkeypatch.setattr("headwater.numerics.probe._READ_BYTES", 1 << 16)
    monkeypatch.setattr("headwater.numerics.probe._TRY_S", 0.0)
    before = torch.get_num_threads()
    limits = machine_limits(1)
    assert torch.get_num_threads() == before
    assert min(limits.read_gb_per_s, limits.gemm_bf16_gflop_per_s, limits.gemm_int8_gop_per_s) > 0
    assert best_time_s(lambda: None, 0.0) >= 0
