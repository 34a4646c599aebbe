"""A peer in a process of its own, because thread pools of several runtimes in one process get into each other's way.

Measured on two cores of an EPYC: 32 tokens in int8 took 17 ms beside CTranslate2 and OpenVINO, 9 ms alone.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from minibert.bench.peers import PEERS, Logits, Run, Setting
from minibert.bench.processes import megabytes
from minibert.bench.workloads import Workload
from minibert.errors import MinibertError
from minibert.quiet import quiet

TURN = 0.3  # seconds that a turn takes at least: what is shorter is done again, and once before the clock runs


class NotInstalledError(Exception):
    """The peer's package is not there."""


class Worker:
    """The process of one peer, asleep between its turns.

    Raises:
        NotInstalledError: the peer's package is not installed.
        MinibertError: the peer failed, now or at a turn.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name, setting), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def logits(self, workload: Workload) -> Logits:
        """(real tokens, labels) float32, of all batches; warms up, too."""
        logits: Logits = self._answer("logits", workload)
        return logits

    def turn(self, workload: Workload) -> tuple[float, float]:
        """Seconds for all batches, and the most megabytes that the process held so far."""
        seconds, megabytes = self._answer("turn", workload)
        return seconds, megabytes

    def close(self) -> None:
        """Ends the process."""
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()

    def _answer(self, *task: Any) -> Any:
        try:
            if task:
                self.pipe.send(task)
            kind, what = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise MinibertError(f"{self.name}: its process ended with status {self.process.exitcode}") from None
        if kind == "missing":
            raise NotInstalledError(what)
        if kind == "failed":
            raise MinibertError(f"{self.name} failed:\n{what}")
        return what


def _serve(pipe: Connection, name: str, setting: Setting) -> None:
    torch.set_num_threads(setting.threads)
    try:
        with quiet():
            run = PEERS[name](setting)
        pipe.send(("ready", None))
        while True:
            task, workload = pipe.recv()
            pipe.send(("done", _logits(run, workload) if task == "logits" else _turn(run, workload)))
    except ImportError as error:
        pipe.send(("missing", f"{error.name or error} is not installed"))
    except EOFError:  # the other side is done with us
        return
    except Exception:  # noqa: BLE001  # whatever it was, the other side says so
        pipe.send(("failed", traceback.format_exc()))


def _logits(run: Run, workload: Workload) -> Logits:
    return np.concatenate([run(batch)[batch.mask.astype(bool)] for batch in workload.batches])


def _turn(run: Run, workload: Workload) -> tuple[float, float]:
    def once() -> None:
        for batch in workload.batches:
            run(batch)

    return timed_turn(once), megabytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def timed_turn(once: Callable[[], object]) -> float:
    """Seconds that it takes to do it, by a machine that is awake and has been doing just that: the median of a turn."""
    start = time.perf_counter()
    once()
    first = time.perf_counter() - start
    if first > TURN:
        return first
    times: list[float] = []
    while sum(times) < TURN:
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
