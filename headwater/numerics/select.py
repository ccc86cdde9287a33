"""Choose an implementation by device and mode; describe the machine for ``doctor``.

The only file of the package that names a vendor. Everything it cannot give is a
ConfigError that says what to change. Called by ``app``.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from headwater.core.errors import ConfigError
from headwater.numerics.cpu import CpuOps
from headwater.numerics.cpu_intrinsics import HOST_FEATURES, LANES
from headwater.numerics.ops import Ops, WeightFormat
from headwater.numerics.reference import ReferenceOps

DEVICES = ("auto", "cpu", "cuda")
MODES = ("fast", "reference")

# Instruction sets worth naming, as the compiler spells them, and as people do.
_INSTRUCTION_SETS = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
    "neon": "neon",
    "bf16": "bf16",
    "i8mm": "i8mm",
    "sve": "sve",
}


def select_ops(
    device: str = "auto",
    mode: str = "fast",
    weight_format: WeightFormat = WeightFormat.BF16,
    num_threads: int = 1,
) -> Ops:
    """The implementation for ``device`` (auto, cpu, cuda) and ``mode`` (fast, reference).

    ``num_threads`` is for a CPU. Raises ConfigError for an unknown word and for what
    this machine or that mode cannot do.
    """
    if device not in DEVICES:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}; got {device!r}")
    if mode not in MODES:
        raise ConfigError(f"numerics mode must be one of {', '.join(MODES)}; got {mode!r}")
    if num_threads < 1:
        raise ConfigError(f"threads must be at least 1, got {num_threads}")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError(
            "device is 'cuda', but this torch sees no CUDA device; use device 'cpu' or 'auto', "
            "or install a CUDA build of torch and its driver"
        )
    if device == "cuda" or (device == "auto" and has_cuda):
        act_dtype = torch.bfloat16 if mode == "fast" else torch.float32
        return ReferenceOps("cuda", act_dtype)
    if mode == "reference":
        return ReferenceOps("cpu", torch.float32, num_threads)
    if weight_format is WeightFormat.FP32:
        raise ConfigError(
            "fp32 weights need reference numerics on a CPU; choose weights 'bf16' or 'int8', "
            "or numerics 'reference'"
        )
    return CpuOps(num_threads)


def describe_devices() -> list[tuple[str, dict[str, str]]]:
    """Every device that could serve, best first, with facts for a person to read."""
    devices = [(f"cuda:{i}", _describe_cuda(i)) for i in range(torch.cuda.device_count())]
    return [*devices, ("cpu", _describe_cpu())]


def _describe_cuda(index: int) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return {
        "model": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": f"{free_bytes / 2**30:.1f} GiB free of {total_bytes / 2**30:.1f} GiB",
        "kernels": "torch, bfloat16",
    }


def _describe_cpu() -> dict[str, str]:
    found = [name for feature, name in _INSTRUCTION_SETS.items() if feature in HOST_FEATURES]
    return {
        "model": _cpu_model(),
        "cores": str(os.cpu_count()),
        "instruction sets": ", ".join(found) or "baseline",
        "memory": _memory(),
        "vector lanes": f"{LANES} x float32",
        "gemm library": "oneDNN" if torch.backends.mkldnn.is_available() else "torch built-in",
        "threads": "own team for kernels, OpenMP under torch",
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor() or platform.machine()


def _memory() -> str:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return "unknown"
    kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if not {"MemAvailable", "MemTotal"} <= kib.keys():
        return "unknown"
    return f"{kib['MemAvailable'] / 2**20:.1f} GiB free of {kib['MemTotal'] / 2**20:.1f} GiB"
