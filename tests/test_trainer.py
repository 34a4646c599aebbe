"""Plain `transformers.Trainer` with a minibert model: the losses of transformers' own model, step by step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

from reference import pair

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

LENGTHS = (7, 3, 5, 9, 2, 8, 4, 6, 7, 3, 5, 9)


class Sentences(Dataset[dict[str, list[int]]]):
    """Twelve labelled sentences of uneven length; one token in three has no label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for length in LENGTHS:
            ids = torch.randint(6, 99, (length,), generator=generator)
            labels = (ids % 18).masked_fill(torch.arange(length) % 3 == 2, -100)
            self.rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    ids = padded("input_ids", 5)
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": padded("labels", -100)}


def train(model: Any, directory: Path, **options: Any) -> list[float]:
    """Six optimiser steps of plain SGD, without dropout or shuffling; the logged losses."""
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=6,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Sentences(), data_collator=collate)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)  # type: ignore[method-assign]
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}


@pytest.mark.parametrize(
    "options",
    [{"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 4, "activation_checkpointing": True}],
    ids=["plain", "activation checkpointing"],
)
def test_the_losses_are_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = pair("BertForTokenClassification", **NO_DROPOUT)
    losses = train(ours, tmp_path / "ours", **options)
    reference = train(theirs, tmp_path / "theirs", per_device_train_batch_size=4)
    assert len(losses) == 6
    assert losses == pytest.approx(reference, abs=2e-4)  # Trainer rounds what it logs to four digits
    assert losses[-1] < losses[0]


def test_accumulation_gives_the_parameters_of_one_large_batch(tmp_path: Path) -> None:
    large, _ = pair("BertForTokenClassification", **NO_DROPOUT)
    small = copy.deepcopy(large)
    whole = train(large, tmp_path / "large", per_device_train_batch_size=4)
    parts = train(small, tmp_path / "small", per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert parts == pytest.approx(whole, abs=2e-4)
    for one, other in zip(large.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
