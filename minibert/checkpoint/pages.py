"""Memory of mapped files that is in use only because somebody looked: the pages can be read again when wanted."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

MAPS = Path("/proc/self/maps")
DONT_NEED = 4  # MADV_DONTNEED, https://man7.org/linux/man-pages/man2/madvise.2.html


def let_go(tensors: Iterable[Tensor]) -> int:
    """Lets go of the pages of those tensors that are mapped from a file; how many bytes that were.

    Their values stay what the file says, so this is for tensors that nobody has changed since they were loaded. Tensors
    in memory of their own are left alone. Does nothing on other systems than Linux.
    """
    if sys.platform != "linux":
        return 0
    ranges = _file_mappings()
    libc = ctypes.CDLL(None)
    freed = 0
    for tensor in tensors:
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        if any(low <= start and end <= high for low, high in ranges):
            first, last = -(-start // mmap.PAGESIZE), end // mmap.PAGESIZE  # whole pages, which others do not share
            if first < last:
                size = (last - first) * mmap.PAGESIZE
                libc.madvise(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(size), DONT_NEED)
                freed += size
    return freed


def _file_mappings() -> list[tuple[int, int]]:
    """Addresses at which files are mapped."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    ranges = []
    for line in lines:
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        if inode != "0" and path and path[0].startswith("/"):
            low, high = addresses.split("-")
            ranges.append((int(low, 16), int(high, 16)))
    return ranges
