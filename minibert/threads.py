"""How many CPU threads a process should take: what the machine, the container and the other workers leave it."""

from __future__ import annotations

import os
from pathlib import Path

from minibert.errors import MinibertError

TOPOLOGY = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")
# Who starts several processes of one program says how many: torchrun, then gunicorn and uvicorn.
WORKERS = ("LOCAL_WORLD_SIZE", "WEB_CONCURRENCY")


def default_threads(workers: int | None = None) -> int:
    """`OMP_NUM_THREADS` if it is set; else the physical cores that this process may use, divided among the workers.

    A second thread on a core shares its arithmetic units and gains nothing; two workers that take all cores each wait
    for one another.

    Args:
        workers: processes like this one on the machine; default what `LOCAL_WORLD_SIZE` or `WEB_CONCURRENCY` say, or 1.

    Raises:
        MinibertError: workers that are none, or a variable that is no number.
    """
    wished = _number("OMP_NUM_THREADS")
    if wished is not None:
        return wished
    if workers is None:
        workers = next((number for name in WORKERS if (number := _number(name)) is not None), 1)
    if workers < 1:
        raise MinibertError(f"workers: expected at least 1, got {workers}")
    return max(1, usable_cores() // workers)


def usable_cores() -> int:
    """Physical cores among the processors that this process may run on; no more than its container gets time on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    allowed = affinity(0) if affinity else set(range(os.cpu_count() or 1))
    cores = {_siblings(processor) for processor in allowed}
    quota = _quota()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "").split(",")[0].strip()  # OpenMP takes a list, for nested regions
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise MinibertError(f"{variable}: expected a number of at least 1, got {os.environ[variable]!r}")
    return int(text)


def _siblings(processor: int) -> str:
    """The processors of one core, as the kernel writes them."""
    try:
        return (TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)


def _quota() -> float | None:
    """Processors' worth of time that the container gets; None without a limit."""
    try:
        granted, period = (CGROUP / "cpu.max").read_text().split()  # version 2
    except (OSError, ValueError):
        try:
            granted = (CGROUP / "cpu" / "cpu.cfs_quota_us").read_text().strip()  # version 1
            period = (CGROUP / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if granted in ("max", "-1") else int(granted) / int(period)
