"""Files that take the place of older ones all at once or not at all, whatever stops the process in between."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from minibert.errors import CheckpointError, first_line

try:
    import fcntl
except ImportError:  # Windows: without locks, only saves that run at the same time can disturb each other
    fcntl = None  # type: ignore[assignment]

STAGING = ".minibert-saving-"  # a folder per save in progress
COMMITTED = ".minibert-saved"  # the folder of a finished save, while its files move to their places
REMOVED = ".removed"  # ends the name of a mark in it: the file of that name is not part of the new state

Write = Callable[[str, Callable[[Path], object]], None]


@contextmanager
def replacing(folder: Path, superseded: Callable[[], Collection[str]] = frozenset) -> Iterator[Write]:
    """Gives a function `write(name, fill)`; what it has written becomes the folder's content at the end.

    The files are made in a folder of their own and synced to the disk. Its renaming to `COMMITTED` is the one moment
    at which the old state ends and the new one begins; then they move to their places. If the process dies before,
    nothing has changed; if it dies while they move, `file_in` and the next `replacing` take the rest from there.

    Args:
        folder: made if there is none. Other files in it stay.
        superseded: called at that moment, gives the names of files that go unless they were written.

    Raises:
        CheckpointError: the folder cannot be written to, or the disk is full.
    """
    staging = folder / f"{STAGING}{secrets.token_hex(8)}"
    with _explained(folder), ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            _remove_abandoned(folder)
            staging.mkdir()
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
            stack.enter_context(locked(staging))  # says that it is not abandoned
        yield lambda name, fill: _write(staging / name, fill)
        with locked(folder):
            _move(folder)
            for name in set(superseded()) - {path.name for path in staging.iterdir()}:
                (staging / f"{name}{REMOVED}").touch()
            _sync(staging)
            staging.replace(folder / COMMITTED)
            _sync(folder)
            _move(folder)


def file_in(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder that `replacing` may have been stopped in; None if there is none.

    Raises:
        OSError: the folder cannot be read, or the name is a link that leads nowhere or around.
    """
    committed = folder / COMMITTED
    if (committed / f"{name}{REMOVED}").exists():
        return None
    path = next((path for path in (committed / name, folder / name) if os.path.lexists(path)), None)
    if path is None:
        return None
    try:
        return path if stat.S_ISREG(path.stat().st_mode) else None
    except FileNotFoundError:  # as when a folder of the Hub's cache is copied without what its links lead to
        raise FileNotFoundError(errno.ENOENT, "a link to a file that is not there", str(path)) from None


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise CheckpointError(f"{folder}: cannot be written to ({reason}); what was there is still whole") from error


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Keeps other processes and threads out of a folder: all of them, or with `shared` those that want it alone.

    The lock ends with the process, and leaves nothing behind. On file systems without locks it does nothing.
    """
    handle = _lock(folder, shared=shared, wait=True)
    try:
        yield
    finally:
        _unlock(handle)


def _lock(folder: Path, *, shared: bool, wait: bool) -> int | None:
    if fcntl is None:
        return None
    handle = None
    try:
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if handle is not None:
            os.close(handle)
        return None
    return handle


def _unlock(handle: int | None) -> None:
    if handle is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child may hold the handle still
        os.close(handle)


def _write(path: Path, fill: Callable[[Path], object]) -> None:
    path.touch()
    mode = path.stat().st_mode  # as the user's umask has it; safetensors would leave a file to its owner only
    fill(path)
    path.chmod(mode)
    _sync(path)


def _sync(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(folder: Path) -> None:
    """Moves what has been committed to its place. Can be stopped anywhere, and begun again."""
    committed = folder / COMMITTED
    if committed.is_symlink() or not committed.is_dir():  # a link would move files of somewhere else
        return
    for path in sorted(committed.iterdir()):
        if path.name.endswith(REMOVED):
            (folder / path.name.removesuffix(REMOVED)).unlink(missing_ok=True)
            path.unlink()
        else:
            path.replace(folder / path.name)
    _sync(folder)
    committed.rmdir()


def _remove_abandoned(folder: Path) -> None:
    """Removes what saves have left that died before they had committed anything."""
    for path in folder.glob(f"{STAGING}*"):
        handle = _lock(path, shared=False, wait=False)
        if handle is not None:  # else it is in use, or there is no way to know
            shutil.rmtree(path, ignore_errors=True)
            _unlock(handle)
