"""Memory that layers free stays with the process, unless somebody said otherwise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from minibert import BertConfig, BertModel, engine, optimize
from minibert.engine import memory
from minibert.engine.memory import VARIABLES, keep_freed_memory

FAULTS = """
import resource, sys, torch
from minibert.engine.memory import keep_freed_memory
kept = keep_freed_memory()
def work():
    for _ in range(5):
        for megabytes in (9, 12, 30, 12):
            torch.empty(megabytes * 250_000).zero_()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks for pages of Linux")
def test_results_that_come_again_and_again_take_no_new_pages() -> None:
    def told(**more: str) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | more
        command = [sys.executable, "-c", FAULTS]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    kept, faults = told()
    if kept == "False":
        pytest.skip("another C library")
    assert int(faults) < 1000
    kept, faults = told(MALLOC_MMAP_THRESHOLD_="100000")  # the user's word stands
    assert kept == "False"
    assert int(faults) > 10_000


def test_it_is_part_of_optimizing_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(engine, "keep_freed_memory", lambda: called.append(True))
    optimize(BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)))
    assert called == [True]


@pytest.mark.parametrize("missing", ["platform", "symbol", "library"])
def test_elsewhere_nothing_is_done(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def library(_: None) -> object:
        if missing == "library":
            raise OSError
        return object()

    monkeypatch.setattr(memory.sys, "platform", "darwin" if missing == "platform" else "linux")
    monkeypatch.setattr(ctypes, "CDLL", library)
    assert keep_freed_memory() is False
