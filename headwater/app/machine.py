"""How many cores this process may really use.

Standard library only: the answer is needed before torch is imported, to size
its threads. A container's CPU quota counts, since threads beyond it are stopped
for whole scheduling periods.
"""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """The least of the cores of this process's affinity and its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    quota = _quota_cores(cgroup)
    return num_cores if quota is None else max(1, min(num_cores, int(quota)))


def _quota_cores(cgroup: Path) -> float | None:
    try:
        # Version 2 has both numbers in one file; version 1 has a file each.
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() and int(period) else None
