"""Plain `transformers.Trainer` with a minibert model: the losses of transformers' own model, step by step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

from minibert import BertForMaskedLM, BertForTokenClassification, TokenClassifier
from minibert.hub import Source
from minibert.train.features import Collator, PackingCollator
from minibert.train.training import Companion
from reference import pair
from tagger import write_checkpoint

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


collate = Collator(pad_token_id=5)


def train(model: Any, directory: Path, collator: Any = collate, dataset: Any = None, **options: Any) -> list[float]:
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
    trainer = transformers.Trainer(model, arguments, train_dataset=dataset or Sentences(), data_collator=collator)
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


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"label_smoothing_factor": 0.2}, 2e-4),
        ({"bf16": True}, 3e-2),
        ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, 2e-4),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_trainer_does_to_the_loss_it_does_to_ours(options: Any, tolerance: float, tmp_path: Path) -> None:
    ours, theirs = pair("BertForTokenClassification", **NO_DROPOUT)
    same = {} if "torch_compile" in options else options  # theirs is compared plain, which is quicker
    losses = train(ours, tmp_path / "ours", per_device_train_batch_size=4, **options)
    reference = train(theirs, tmp_path / "theirs", per_device_train_batch_size=4, **same)
    assert losses == pytest.approx(reference, abs=tolerance)
    assert all(parameter.dtype == torch.float32 for parameter in ours.parameters())


def test_packed_batches_give_the_losses_of_padded_ones(tmp_path: Path) -> None:
    padded, _ = pair("BertForTokenClassification", **NO_DROPOUT)
    packed = copy.deepcopy(padded)
    expected = train(padded, tmp_path / "padded", per_device_train_batch_size=4)
    losses = train(packed, tmp_path / "packed", PackingCollator(), per_device_train_batch_size=4)
    assert losses == pytest.approx(expected, abs=2e-4)


def test_a_batch_without_a_label_spoils_nothing(tmp_path: Path) -> None:  # E05
    class Unlabelled(Sentences):
        def __init__(self) -> None:
            super().__init__()
            for row in self.rows[4:8]:  # the second step's
                row["labels"] = [-100] * len(row["labels"])

    model, _ = pair("BertForTokenClassification", **NO_DROPOUT)
    losses = train(model, tmp_path, dataset=Unlabelled(), per_device_train_batch_size=4)
    assert losses[1] == losses[4] == 0.0
    assert all(0 < loss < 10 for loss in (losses[0], losses[2], losses[3], losses[5]))
    assert losses[3] < losses[0]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def write_checkpoint_folder(folder: Path) -> Path:
    write_checkpoint(folder / "tokenizer")
    return folder / "tokenizer"


def test_columns_that_the_model_does_not_know_go_and_labels_stay(tmp_path: Path) -> None:  # H01
    ours, _ = pair("BertForTokenClassification")
    rows = [{**row, "token_type_ids": [1] * len(row["input_ids"])} for row in Sentences().rows]
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"]), "text": "x", "tokens": ["x"]} for row in rows]
    seen: list[set[str]] = []

    def spy(given: list[dict[str, Any]]) -> dict[str, Tensor]:
        seen.append(set(given[0]))
        return collate(given)

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    dataset = datasets.Dataset.from_list(rows)
    trainer = transformers.Trainer(
        ours,
        arguments,
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=spy,
        compute_metrics=lambda predicted: {"shapes": (predicted.predictions.shape, predicted.label_ids.shape)},
    )
    trainer.train()
    assert seen[0] == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    metrics = trainer.evaluate()
    assert metrics["eval_shapes"] == ((12, 9, 18), (12, 9))
    batch = collate(Sentences().rows)
    with torch.no_grad():
        assert metrics["eval_loss"] == pytest.approx(float(ours(**batch).loss), rel=0.2)  # a mean of means of batches


def test_a_model_with_shared_parameters_outlives_its_first_checkpoint(tmp_path: Path) -> None:  # E09
    model, _ = pair("BertForMaskedLM", **NO_DROPOUT)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    companion = Companion(model, Source(write_checkpoint_folder(tmp_path)))
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Sentences(), data_collator=collate, processing_class=companion
    )
    trainer.train()
    again = BertForMaskedLM.from_pretrained(tmp_path / "checkpoint-2")
    assert again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


class Scripted(transformers.TrainerCallback):
    """F1 of .1 .5 .3 .2 .4, one an evaluation, and a bias that tells the evaluations' models apart."""

    scores = (0.1, 0.5, 0.3, 0.2, 0.4)

    def __init__(self) -> None:
        self.done = 0
        self.kept: list[set[int]] = []

    def on_save(self, *given: Any, **_: Any) -> None:
        self.kept.append({int(path.name[11:]) for path in Path(given[0].output_dir).iterdir()})

    def on_step_end(self, *given: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            model.classifier.bias.fill_(given[1].global_step)

    def metrics(self, _: Any) -> dict[str, float]:
        self.done += 1
        return {"f1": self.scores[self.done - 1]}


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_checkpoint_and_the_last_are_kept(limit: int, tmp_path: Path) -> None:  # E10, E09, H05
    write_checkpoint(tmp_path / "base")
    model = BertForTokenClassification.from_pretrained(tmp_path / "base")
    weight = model.bert.encoder.layer[0].attention.self.query.weight
    weight.data = weight.data.t().contiguous().t()  # not contiguous
    script = Scripted()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=10,
        learning_rate=0.0,
        use_cpu=True,
        report_to=[],
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=limit,
        load_best_model_at_end=True,
        metric_for_best_model="f1",
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        data_collator=Collator(),
        processing_class=Companion(model, Source(tmp_path / "base")),
        compute_metrics=script.metrics,
        callbacks=[script],
    )
    trainer.train()
    assert script.kept[-1] == {4, 10}  # whose names sort otherwise than their numbers
    assert all(max(kept) == 2 * (n + 1) for n, kept in enumerate(script.kept))  # the newest is always there
    assert (model.classifier.bias == 4).all()
    # Without need of it, when all is done, transformers itself removes the last one at a limit of 1.
    for name, value in (("checkpoint-4", 4), ("checkpoint-10", 10))[:limit]:
        folder = tmp_path / "run" / name
        theirs = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
        TokenClassifier.from_pretrained(folder)  # the tokeniser is there, too
        ours = BertForTokenClassification.from_pretrained(folder)
        assert (ours.classifier.bias == value).all()
        assert ours.config.id2label == theirs.config.id2label == model.config.id2label
        ids = torch.randint(5, 80, (1, 9))
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=0)
        ours.save_pretrained(tmp_path / "again")
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_accumulation_gives_the_parameters_of_one_large_batch(tmp_path: Path) -> None:
    large, _ = pair("BertForTokenClassification", **NO_DROPOUT)
    small = copy.deepcopy(large)
    whole = train(large, tmp_path / "large", per_device_train_batch_size=4)
    parts = train(small, tmp_path / "small", per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert parts == pytest.approx(whole, abs=2e-4)
    for one, other in zip(large.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
