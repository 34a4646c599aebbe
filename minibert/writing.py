"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file under another name, makes sure it is on the disk, and only then gives it its own.

    Whatever stops it in between, a file that had the name before is still there and whole.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it; safetensors would leave a file to its owner only
        write(temporary)
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
