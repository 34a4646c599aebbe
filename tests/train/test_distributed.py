"""The recipe unchanged on several processes: the same parameters as on one, whatever makes up the batch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from minibert import BertForTokenClassification
from minibert.cli import main
from tagger import write_checkpoint

SENTENCES = (
    "张B三I在O",
    "李B四I",
    "北O京O",
    "我O喜O欢O",
    "上O海O医O院O很O好O",
    "今O天O",
    "张B和O李B",
    "好O",
)  # of uneven length
RECIPE = """
[model]
name_or_path = "base"
labels = ["O", "B-PER", "I-PER"]
[data]
train = "train.txt"
validation = "train.txt"
test = "train.txt"
split_mode = "characters"
[training]
output_dir = "out"
epochs = 1
learning_rate = 5e-3
warmup_ratio = 0.0
adam_epsilon = 1e-4  # a gradient of nothing but rounding errors would else make a whole step
report_to = []
"""
LAUNCHERS = {
    "torchrun": "-m torch.distributed.run --standalone --nproc_per_node 2",
    "accelerate": "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --main_process_port {port}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint without dropout, eight sentences, and a run with all of them in one step."""
    folder = tmp_path_factory.mktemp("distributed")
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    write_checkpoint(folder / "base", initializer_range=0.05, **no_dropout)
    tags = {"B": "B-PER", "I": "I-PER", "O": "O"}
    lines = ["\n".join(f"{a} {tags[b]}" for a, b in zip(s[::2], s[1::2], strict=True)) for s in SENTENCES]
    (folder / "train.txt").write_text("\n\n".join(lines), encoding="utf-8")
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    run(folder, "whole", batch_size=8)
    return folder


def arguments(folder: Path, name: str, **options: Any) -> list[str]:
    settings = [f"--set=training.{key}={value}" for key, value in {"output_dir": name, **options}.items()]
    return ["train", str(folder / "recipe.toml"), *settings]


def run(folder: Path, name: str, **options: Any) -> None:
    done = CliRunner().invoke(main, arguments(folder, name, **options))
    assert done.exit_code == 0, done.output


def launch(folder: Path, launcher: str, name: str, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *LAUNCHERS[launcher].format(port=port).split(), "-m", "minibert.cli"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *arguments(folder, name, **options), *more],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the launched processes, too
            raise
    assert process.returncode == 0, errors[-3000:]
    return subprocess.CompletedProcess(command, 0, output, errors)


def weights(folder: Path) -> torch.Tensor:
    model = BertForTokenClassification.from_pretrained(folder)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_accumulated_batches_make_the_step_of_one(folder: Path) -> None:
    run(folder, "accumulated", batch_size=2, gradient_accumulation_steps=4)
    torch.testing.assert_close(weights(folder / "accumulated"), weights(folder / "whole"), atol=1e-6, rtol=0)
    assert (weights(folder / "whole") - weights(folder / "base")[: len(weights(folder / "whole"))]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("torchrun", {"batch_size": 4}),
        ("torchrun", {"batch_size": 2, "gradient_accumulation_steps": 2}),
        ("accelerate", {"batch_size": 4}),
    ],
)
def test_two_processes_make_the_step_of_one(launcher: str, options: dict[str, Any], folder: Path) -> None:
    name = f"{launcher}-{options['batch_size']}"
    done = launch(folder, launcher, name, **options)
    torch.testing.assert_close(weights(folder / name), weights(folder / "whole"), atol=1e-6, rtol=0)
    figures, whole = (json.loads((folder / n / "training.json").read_text()) for n in (name, "whole"))
    assert figures["processes"] == 2
    assert figures["scores"] == whole["scores"]
    assert figures["history"][0]["loss"] == pytest.approx(whole["history"][0]["loss"], abs=1e-5)
    evaluated = [next(entry for entry in of["history"] if "eval_f1" in entry) for of in (figures, whole)]
    assert evaluated[0]["eval_f1"] == evaluated[1]["eval_f1"]
    assert done.stdout == f"{folder / name}\n"  # one of the processes speaks
    assert done.stderr.count("epoch 1 of 1: ") == 1


def test_a_run_on_two_processes_goes_on_where_it_was(folder: Path) -> None:
    options = {"epochs": 2, "max_tokens_per_batch": 12, "r_drop": 0.5, "adversarial": "fgm"}
    launch(folder, "torchrun", "two", **options)
    last = max((folder / "two" / "checkpoints").iterdir(), key=lambda path: int(path.name[11:]))
    assert int(last.name[11:]) % 2 == 0  # as many steps in each epoch
    finished = weights(folder / "two")
    (last / "trainer_state.json").unlink()  # as if it had ended while this was written
    launch(folder, "torchrun", "two", "--resume", **options)
    assert torch.equal(weights(folder / "two"), finished)
