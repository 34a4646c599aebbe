"""A training step: `transformers.Trainer` with either model and its collator, on the same rows in the same order.

Without dropout, so that both losses can be compared step by step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from minibert.bench.peers import Setting
from minibert.bench.workloads import Workload
from minibert.model.heads import BertForTokenClassification
from minibert.text.tokenizer import load_tokenizer

BATCH_SIZE, STEPS = 32, 20
LEARNING_RATE = 3e-5
PLAIN: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Rows = list[dict[str, list[int]]]  # input_ids and labels


@dataclass(frozen=True)
class Steps:
    """What each step took, in seconds, and its loss before the step."""

    seconds: list[float]
    losses: list[float]


def rows_of_file(setting: Setting, path: str) -> Rows:
    """Labelled text of a file, for the labels that the checkpoint has; as many rows as the steps take."""
    from minibert.config import BertConfig
    from minibert.text.labels import LabelSet
    from minibert.train.data import read_examples
    from minibert.train.features import as_dataset, features

    config = BertConfig.from_pretrained(setting.checkpoint)
    labels = LabelSet([config.id2label[index] for index in range(config.num_labels)])
    examples = read_examples(path)[: BATCH_SIZE * STEPS]
    made = features(
        as_dataset(examples),
        load_tokenizer(setting.checkpoint),
        labels,
        config.max_position_embeddings,
        "characters",
    )
    return [{name: row[name] for name in ("input_ids", "labels")} for row in made][: BATCH_SIZE * STEPS]


def rows_of_workload(workload: Workload, num_labels: int) -> Rows:
    """The sequences of a workload over and over, with random labels."""
    generator = torch.Generator().manual_seed(0)
    sequences = [
        row[: int(mask.sum())].tolist()
        for batch in workload.batches
        for row, mask in zip(batch.ids, batch.mask, strict=True)
    ]
    rows = []
    for number in range(BATCH_SIZE * STEPS):
        ids = sequences[number % len(sequences)]
        labels = torch.randint(0, num_labels, (len(ids),), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def minibert_steps(setting: Setting, rows: Rows) -> Steps:
    """minibert's model and packed batches."""
    from minibert.train.features import PackingCollator

    model = BertForTokenClassification.from_pretrained(setting.checkpoint, dtype=torch.float32, **PLAIN)
    return _trained(setting, model, rows, PackingCollator())


def transformers_steps(setting: Setting, rows: Rows) -> Steps:
    """The model of transformers, and the collator that it has for token classification."""
    import transformers

    load = transformers.BertForTokenClassification.from_pretrained
    model = load(setting.checkpoint, dtype=torch.float32, **PLAIN)
    tokenizer = transformers.BertTokenizer.from_pretrained(setting.checkpoint)
    return _trained(setting, model, rows, transformers.DataCollatorForTokenClassification(tokenizer))


TRAINERS = {"minibert": minibert_steps, "transformers": transformers_steps}


def _trained(setting: Setting, model: Any, rows: Rows, collator: Any) -> Steps:
    import transformers

    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    arguments = transformers.TrainingArguments(
        output_dir=str(setting.work / "trained"),
        max_steps=min(STEPS, len(rows) // BATCH_SIZE),
        per_device_train_batch_size=BATCH_SIZE,
        train_sampling_strategy="sequential",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=0,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[Clock()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Steps(seconds, losses)
