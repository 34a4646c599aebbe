"""The GPU benchmark checks numbers before it times anything; here with a tiny model, on whatever there is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from minibert import BertConfig, BertForTokenClassification
from minibert.engine.graphs import GraphedEncoder
from minibert.model.encoder import BertEncoder

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs_from_end_to_end() -> None:
    command = [sys.executable, str(SCRIPT), "--small", "--rounds", "2"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    assert {"transformers fp32 sdpa", "minibert fp32"} <= found["differences"].keys()
    assert 0 < found["differences"]["minibert fp32"] < 1e-5
    assert list(found["seconds"]) == ["lat32", "b32x128", "mixed, batches of 16", "mixed, 300 tokens"]
    assert all(len(of) == 2 for peers in found["seconds"].values() for of in peers.values())
    assert found["wrong"] == []
    assert 0 < found["losses_apart"] < 1e-5
    assert {name: len(took) for name, took in found["training"].items()} == {"transformers": 9, "minibert": 9}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    told = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert told.stderr == "bench_gpu needs a GPU; with --small it can be tried without\n"


def test_no_time_left_is_said_and_nothing_fails() -> None:
    command = [sys.executable, str(SCRIPT), "--small", "--minutes", "0"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "no time left" in told.stdout


@pytest.mark.parametrize(
    ("differences", "loss", "wrong"),
    [
        ({"minibert fp32": 1e-6}, 0.001, []),
        ({"minibert fp32": 2e-4}, 0.0, ["minibert fp32: 2.00e-04 from float32, more than 1.00e-04"]),
        ({"minibert fp32": float("nan")}, 0.0, ["minibert fp32: nan from float32, more than 1.00e-04"]),
        ({"transformers bf16 sdpa": 0.01, "minibert bf16": 0.014}, 0.0, []),
        (
            {"transformers bf16 sdpa": 0.01, "minibert bf16": 0.016},
            0.0,
            ["minibert bf16: 1.60e-02 from float32, more than 1.50e-02"],
        ),
    ],
)
def test_numbers_that_are_off_are_named(
    script: ModuleType, differences: dict[str, float], loss: float, wrong: list[str]
) -> None:
    assert script.faults(differences, loss) == wrong


def test_losses_are_compared_step_by_step(script: ModuleType) -> None:
    losses = {"minibert": [2.0, 1.0, 0.5], "transformers": [2.0, 1.25, 0.5]}
    assert script.losses_apart(losses) == 0.2
    assert script.faults({}, script.losses_apart(losses)) == ["training: a loss is 20.00% from that of transformers"]


def test_layers_without_graphs_are_launched_one_by_one(script: ModuleType) -> None:
    model = BertForTokenClassification(BertConfig(**script.SMALL))
    model.bert.encoder = GraphedEncoder(model.bert.encoder)
    assert type(script.without_graphs(model).bert.encoder) is BertEncoder
