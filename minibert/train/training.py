"""From a recipe to a fine-tuned checkpoint, with `transformers.Trainer` underneath."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minibert.checkpoint.saving import copy_tokenizer
from minibert.config import BertConfig
from minibert.errors import ConfigError, DataError
from minibert.hub import Source
from minibert.model.crf import BertCrfForTokenClassification
from minibert.model.heads import BertForTokenClassification
from minibert.predict import crf_scores
from minibert.text.alignment import IGNORED
from minibert.text.decoding import best_paths, scheme_scores
from minibert.text.labels import SCHEMES, LabelSet
from minibert.text.tokenizer import load_tokenizer
from minibert.train.data import Example, read_examples
from minibert.train.features import Collator, as_dataset, features
from minibert.train.metrics import span_scores
from minibert.train.optimizer import parameter_groups
from minibert.train.recipe import Recipe
from minibert.writing import replacing

logger = logging.getLogger("minibert")


@dataclass(frozen=True)
class Companion:
    """What `Trainer` saves beside the weights (as its `processing_class`): config and tokeniser."""

    model: BertForTokenClassification
    tokenizer: Source

    @property
    def model_input_names(self) -> list[str]:
        """The column that Trainer takes lengths from."""
        return ["input_ids"]

    def save_pretrained(self, directory: str, **_: Any) -> None:
        """Writes `config.json` and the tokeniser's files."""
        self.model.saved_config().save_pretrained(directory)
        copy_tokenizer(self.tokenizer, directory)


def train(recipe: Recipe, *, resume: bool = False, callbacks: Sequence[Any] = ()) -> BertForTokenClassification:
    """Trains and saves a token classifier; returns it in eval mode.

    `output_dir` gets the model of the best validation F1 (of the last step without validation data), the tokeniser,
    the resolved recipe and `training.json` with the figures; `output_dir/checkpoints` those of the run itself.

    Args:
        recipe: what to do.
        resume: go on from the last checkpoint in `output_dir`; the result is that of a run without a stop.
        callbacks: for `transformers.Trainer`.

    Raises:
        ConfigError, CheckpointError, DataError: the recipe, the model or the data cannot be used.
    """
    import transformers

    examples = _read(recipe)
    labels = _labels(recipe, examples)
    tokenizer_source = Source(recipe.model.tokenizer or str(recipe.model.name_or_path)).remembered()
    tokenizer = load_tokenizer(tokenizer_source)
    transformers.set_seed(recipe.training.seed)
    model = _model(recipe, labels)
    if max(tokenizer.get_vocab().values()) >= model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer {tokenizer_source} has more entries than vocab_size {model.config.vocab_size}"
        )
    length = min(recipe.data.max_length, model.config.max_position_embeddings)
    rows = {
        split: features(as_dataset(of), tokenizer, labels, length, recipe.data.split_mode)
        for split, of in examples.items()
    }
    for split, made in rows.items():
        logger.info("%s: %d texts in %d rows", split, len(examples[split]), len(made))
        if unspelled := sum(made["unspelled"]):
            logger.warning("%s: the edges of %d entities fall inside tokens; they are stretched", split, unspelled)
    training = recipe.training
    groups = parameter_groups(
        model, training.learning_rate, training.weight_decay, training.layer_decay, training.head_learning_rate
    )
    has_validation = "validation" in rows
    output = Path(training.output_dir)
    arguments = transformers.TrainingArguments(
        output_dir=str(output / "checkpoints"),
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        learning_rate=training.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=training.warmup_ratio,  # a share below 1 is one of all steps
        max_grad_norm=training.max_grad_norm,
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch" if has_validation else "no",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=has_validation,
        metric_for_best_model="f1" if has_validation else None,
        logging_strategy="epoch",
        seed=training.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=None,
    )
    stopping = [transformers.EarlyStoppingCallback(training.patience)] if training.patience and has_validation else []
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows["train"].remove_columns("unspelled"),
        eval_dataset=rows["validation"].remove_columns("unspelled") if has_validation else None,
        data_collator=Collator(model.config.pad_token_id or 0),
        processing_class=Companion(model, tokenizer_source),  # type: ignore[arg-type]
        optimizers=(torch.optim.AdamW(groups, lr=training.learning_rate), None),
        compute_metrics=_metrics(labels),
        preprocess_logits_for_metrics=_decoder(recipe.model.decoder, model, labels),
        callbacks=[*stopping, *callbacks],
    )
    trainer.train(resume_from_checkpoint=resume and _has_checkpoint(output / "checkpoints"))
    model.eval()
    if trainer.is_world_process_zero():
        _save(recipe, model, tokenizer_source, trainer.state.log_history)
    return model


def _read(recipe: Recipe) -> dict[str, list[Example]]:
    paths = {"train": recipe.data.train, "validation": recipe.data.validation, "test": recipe.data.test}
    return {split: read_examples(path, recipe.data.format, recipe.data.scheme) for split, path in paths.items() if path}


def _labels(recipe: Recipe, examples: dict[str, list[Example]]) -> LabelSet:
    """The labels given, or O and those of all types of all splits, so that they are the same in every run."""
    if recipe.model.labels is not None:
        labels = LabelSet(recipe.model.labels, recipe.model.scheme)
    else:
        types = sorted({span.label for of in examples.values() for example in of for span in example.entities})
        letters = [letter for letter in SCHEMES[recipe.model.scheme] if letter]
        labels = LabelSet(["O", *(f"{letter}-{name}" for name in types for letter in letters)], recipe.model.scheme)
    known = set(labels.types)
    for split, of in examples.items():
        for example in of:
            for span in example.entities:
                if span.label not in known:
                    raise DataError(f"{split}: {example.place}: type {span.label!r} is not among the recipe's labels")
    return labels


def _model(recipe: Recipe, labels: LabelSet) -> BertForTokenClassification:
    names = dict(enumerate(labels.names))
    kind = BertCrfForTokenClassification if recipe.model.decoder == "crf" else BertForTokenClassification
    model: BertForTokenClassification
    if recipe.model.config is not None:
        config = BertConfig.from_pretrained(recipe.model.config, id2label=names, return_dict=True)
        model = kind(config)
    else:
        model = kind.from_pretrained(
            str(recipe.model.name_or_path),
            id2label=names,
            return_dict=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
        )
    if isinstance(model, BertCrfForTokenClassification):
        start, transitions, end = labels.legal_start(), labels.legal_transitions(), labels.legal_end()
        model.crf.forbid(torch.from_numpy(start), torch.from_numpy(transitions), torch.from_numpy(end))
    model.config.split_mode, model.config.decoder = recipe.data.split_mode, recipe.model.decoder
    return model


def _decoder(
    decoder: str, model: BertForTokenClassification, labels: LabelSet
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Predicted labels (B, S) from logits (B, S, K), decoded as they will be; gold says which tokens count."""

    def decode(logits: torch.Tensor, gold: torch.Tensor) -> torch.Tensor:
        chosen = logits.argmax(-1)
        if decoder == "argmax":
            return chosen
        scores = scheme_scores(labels) if decoder == "viterbi" else crf_scores(model)
        counted = gold != IGNORED
        probabilities = logits.float().softmax(-1)
        rows = [row[keep].cpu().numpy() for row, keep in zip(probabilities, counted, strict=True)]
        for row, keep, path in zip(chosen, counted, best_paths(rows, scores), strict=True):
            row[keep] = torch.from_numpy(path).to(row.device)
        return chosen

    return decode


def _metrics(labels: LabelSet) -> Callable[[Any], dict[str, float]]:
    """Strict and lenient entity scores of what Trainer predicts, row by row."""

    def compute(predicted: Any) -> dict[str, float]:
        found, gold = np.asarray(predicted.predictions), np.asarray(predicted.label_ids)
        counted = gold != IGNORED
        pairs = [(g[keep], f[keep]) for g, f, keep in zip(gold, found, counted, strict=True)]
        scores = {
            mode: span_scores([labels.spans(g, mode) for g, _ in pairs], [labels.spans(f, mode) for _, f in pairs])
            for mode in ("strict", "lenient")
        }
        micro = scores["strict"]["micro"]
        return {
            "f1": micro["f1"],
            "precision": micro["precision"],
            "recall": micro["recall"],
            "lenient_f1": scores["lenient"]["micro"]["f1"],
            "token_accuracy": float((gold == found)[counted].mean()) if counted.any() else 0.0,
        }

    return compute


def _has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("checkpoint-*"))


def _save(recipe: Recipe, model: BertForTokenClassification, tokenizer: Source, history: list[dict[str, Any]]) -> None:
    folder = Path(recipe.training.output_dir)
    model.source = tokenizer  # whose tokeniser is copied beside the weights
    model.save_pretrained(folder)
    figures = (json.dumps(history, indent=1, ensure_ascii=False) + "\n").encode()
    with replacing(folder) as write:
        write("recipe.toml", lambda path: path.write_text(recipe.to_toml(), encoding="utf-8"))
        write("training.json", lambda path: path.write_bytes(figures))
