"""A loaded model does not hold in memory what is in its file, and loses nothing by that."""

from __future__ import annotations

import subprocess
import sys
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minibert.checkpoint import pages
from minibert.checkpoint.pages import let_go

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is mapped where")

CODE = """
import sys, torch
from minibert.checkpoint.pages import let_go
from safetensors.torch import load_file
def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1])
tensors = load_file(sys.argv[1])
total = sum(tensor.sum().item() for tensor in tensors.values())
before = resident()
freed = let_go(tensors.values())
after = resident()
print(before - after, freed, total == sum(tensor.sum().item() for tensor in tensors.values()))
"""


@linux
def test_memory_of_mapped_tensors_is_given_back_and_their_values_stay(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({f"weight{number}": torch.randn(1000, 5001) for number in range(4)}, file)
    told = subprocess.run([sys.executable, "-c", CODE, str(file)], capture_output=True, text=True, check=True)
    kilobytes, freed, same = told.stdout.split()
    assert int(kilobytes) > 70_000
    assert 79_000_000 < int(freed) <= 80_016_000
    assert same == "True"


@linux
def test_small_tensors_and_parts_of_pages_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"small": torch.arange(7.0), "large": torch.arange(100_003.0)}, file)
    tensors = load_file(file)
    assert let_go([tensors["small"]]) == 0
    part = tensors["large"][3:]
    start, end = part.data_ptr(), part.data_ptr() + part.nbytes
    assert start % PAGESIZE != 0  # so that its first page is not all its own
    assert let_go([part]) == (end // PAGESIZE - start // PAGESIZE - 1) * PAGESIZE
    assert torch.equal(tensors["large"], torch.arange(100_003.0))
    assert torch.equal(tensors["small"], torch.arange(7.0))


def test_tensors_in_memory_of_their_own_are_left_alone() -> None:
    tensor = torch.arange(10_000_000)
    assert let_go([tensor, torch.empty(0)]) == 0
    assert torch.equal(tensor, torch.arange(10_000_000))


def test_where_nothing_is_known_nothing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "MAPS", tmp_path / "none")
    assert let_go([torch.ones(100_000)]) == 0
    monkeypatch.setattr(sys, "platform", "darwin")
    assert let_go([torch.ones(100_000)]) == 0
