"""Memory that is freed and wanted again a moment later stays with the process."""

from __future__ import annotations

import ctypes
import os
import sys

# https://man7.org/linux/man-pages/man3/mallopt.3.html
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM, MMAP = 128 << 20, 32 << 20  # bytes; 32 MB is the most that glibc takes
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Lets glibc, for the whole process, keep up to 128 MB that were freed; whether it did.

    Else the results of one layer, tens of megabytes, go back to the system and come again page by page: with eight
    texts of 128 tokens in int8 that took a seventh of the time (EPYC, 2 threads). Variables that say otherwise stand.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return all([mallopt(M_MMAP_THRESHOLD, MMAP), mallopt(M_TRIM_THRESHOLD, TRIM)])
