"""How many bytes a device can still give: the base of the default KV size.

Knows where operating systems say it; decides nothing. Called when an engine is
built and by the doctor command.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Memory that can be allocated on ``device`` now without taking it from others."""
    if device.type == "cpu":
        return host_available_bytes()
    free_bytes, _ = torch.accelerator.get_memory_info(device)
    return free_bytes


def host_available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """The least of what the machine and this process's control group can give."""
    return min([_machine_bytes(meminfo), *_cgroup_bytes(cgroup)])


def _machine_bytes(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    # Not Linux: nothing portable says what is free, so half of what there is.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_bytes(cgroup: Path) -> list[int]:
    """Limit minus use of each memory limit that is set, cgroup v2 and v1."""
    found = []
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (cgroup / limit_name).read_text().strip()
            used = (cgroup / used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():  # v2 says "max" for no limit
            found.append(max(int(limit) - int(used), 0))
    return found
