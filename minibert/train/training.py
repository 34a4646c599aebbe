"""From a recipe to a fine-tuned checkpoint, with `transformers.Trainer` underneath."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from minibert.checkpoint.saving import copy_tokenizer
from minibert.config import BertConfig
from minibert.errors import ConfigError
from minibert.hub import Source
from minibert.model.crf import BertCrfForTokenClassification
from minibert.model.heads import BertForTokenClassification
from minibert.predict import TokenClassifier, crf_scores
from minibert.text.alignment import IGNORED
from minibert.text.decoding import best_paths, scheme_scores
from minibert.text.labels import SCHEMES, LabelSet
from minibert.text.tokenizer import load_tokenizer
from minibert.train.data import Example, Faults, read_dataset, read_examples, unknown_types
from minibert.train.evaluate import evaluate
from minibert.train.features import Collator, PackingCollator, TokenBatches, as_dataset, features
from minibert.train.losses import TokenLoss, weights_of_labels
from minibert.train.metrics import span_scores
from minibert.train.optimizer import parameter_groups
from minibert.train.progress import Progress
from minibert.train.recipe import Recipe
from minibert.train.report import Run, write_report
from minibert.train.trainer import Attack, RobustTrainer
from minibert.writing import replacing

logger = logging.getLogger("minibert")

CHECKPOINT_FILES = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt")


@dataclass(frozen=True)
class Companion:
    """What `Trainer` saves beside the weights (as its `processing_class`): config and tokeniser.

    `Trainer` itself writes only the weights of a model that is not one of transformers' own.
    """

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
    the resolved recipe, `training.json` with the figures, `report.html`, `learning-curve.png` and a model card;
    `output_dir/checkpoints` those of the run itself, and `output_dir/logs` what TensorBoard reads.

    Under `torchrun` or `accelerate launch` each process calls this; the first one writes.

    Args:
        recipe: what to do.
        resume: go on from the last checkpoint in `output_dir`; the result is that of a run without a stop.
        callbacks: for `transformers.Trainer`.

    Raises:
        ConfigError, CheckpointError, DataError: the recipe, the model or the data cannot be used; or there is a run in
            `output_dir` already, and it is not to be resumed or was another recipe's.
    """
    started = time.time()
    output = Path(recipe.training.output_dir)
    last = _last_checkpoint(output, recipe, resume=resume)
    arguments = _arguments(recipe)
    examples, declared = _read(recipe)
    labels = _labels(recipe, examples, declared)
    tokenizer_source = Source(recipe.model.tokenizer or str(recipe.model.name_or_path)).remembered()
    tokenizer = load_tokenizer(tokenizer_source)
    transformers.set_seed(recipe.training.seed)
    model = _model(recipe, labels)
    if max(tokenizer.get_vocab().values()) >= model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer {tokenizer_source} has more entries than vocab_size {model.config.vocab_size}"
        )
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    length = min(recipe.data.max_length, model.config.max_position_embeddings)
    rows = {}
    with arguments.main_process_first(), _bars_on_terminals_only():
        for split, of in examples.items():
            if split != "test":
                made = features(
                    as_dataset(of), tokenizer, labels, length, recipe.data.split_mode, recipe.data.label_pieces
                )
                rows[split] = made.select_columns(["input_ids", "labels", "length"])
                _report_rows(split, of, made["unspelled"], length)
    is_first = arguments.process_index == 0
    if is_first:  # before Trainer and its loggers write there: a folder that cannot be written to is one clear error
        with replacing(output) as write:
            write("recipe.toml", lambda path: path.write_text(recipe.to_toml(), encoding="utf-8"))
    trainer = _trainer(recipe, arguments, model, labels, rows, Companion(model, tokenizer_source), callbacks)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    model.eval()
    if is_first:
        model.source = tokenizer_source  # whose tokeniser is copied beside the weights
        model.save_pretrained(output)
        classifier = TokenClassifier(model, tokenizer)
        evaluations = {split: evaluate(classifier, of) for split, of in examples.items() if split != "train"}
        history = trainer.state.log_history
        sizes = {split: len(of) for split, of in examples.items()}
        run = Run(recipe, model, evaluations, history, sizes, time.time() - started, arguments.world_size)
        write_report(output, run)
    return model


def _arguments(recipe: Recipe) -> transformers.TrainingArguments:
    training, output = recipe.training, Path(recipe.training.output_dir)
    has_validation = recipe.data.validation is not None
    return transformers.TrainingArguments(
        output_dir=str(output / "checkpoints"),
        run_name=output.name,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.accelerator.is_available(),  # said, so that several processes on CPUs find one another
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.batch_size if training.max_tokens_per_batch is None else 1,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        learning_rate=training.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(training.schedule, training.schedule),
        warmup_steps=training.warmup_ratio,  # a share below 1 is one of all steps
        max_grad_norm=training.max_grad_norm,
        train_sampling_strategy="group_by_length" if training.max_tokens_per_batch is None else "random",
        bf16=training.bf16,
        torch_compile=training.torch_compile,
        eval_strategy="epoch" if has_validation else "no",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=has_validation,
        metric_for_best_model="f1" if has_validation else None,
        logging_steps=training.logging_steps,
        seed=training.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=["trackio"] if "trackio" in _loggers(recipe) else [],
        project="minibert",
        disable_tqdm=True,  # `Progress` shows it
    )


def _trainer(
    recipe: Recipe,
    arguments: transformers.TrainingArguments,
    model: BertForTokenClassification,
    labels: LabelSet,
    rows: dict[str, Any],
    companion: Companion,
    callbacks: Sequence[Any],
) -> RobustTrainer:
    training = recipe.training
    groups = parameter_groups(
        model, training.learning_rate, training.weight_decay, training.layer_decay, training.head_learning_rate
    )
    optimizer = torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
    )
    train_rows = rows["train"]
    if training.max_tokens_per_batch is not None:
        epochs, each = math.ceil(training.epochs), arguments.world_size
        train_rows = TokenBatches(train_rows, training.max_tokens_per_batch, epochs, training.seed, each)
    has_validation = "validation" in rows
    stopping = [transformers.EarlyStoppingCallback(training.patience)] if training.patience and has_validation else []
    trainer = RobustTrainer(
        r_drop=training.r_drop,
        attack=_attack(recipe),
        # Tracing, and splitting a batch among devices, take rows.
        train_collator=PackingCollator() if arguments.n_gpu <= 1 and not training.torch_compile else None,
        model=model,
        args=arguments,
        train_dataset=train_rows,
        eval_dataset=rows.get("validation"),
        data_collator=Collator(model.config.pad_token_id or 0),
        processing_class=companion,
        optimizers=(optimizer, None),
        compute_loss_func=_loss(recipe, labels),
        compute_metrics=_metrics(labels),
        preprocess_logits_for_metrics=_decoder(recipe.model.decoder, model, labels),
        callbacks=[Progress(), *stopping, *_tensorboard(recipe, arguments), *callbacks],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _loggers(recipe: Recipe) -> list[str]:
    """Those that the recipe names and that are installed."""
    return [name for name in recipe.training.report_to if importlib.util.find_spec(name) is not None]


def _tensorboard(recipe: Recipe, arguments: transformers.TrainingArguments) -> list[transformers.TrainerCallback]:
    """Logs for TensorBoard beside the run, if it is installed."""
    if "tensorboard" not in _loggers(recipe) or arguments.process_index != 0:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(Path(recipe.training.output_dir) / "logs")))]


def _attack(recipe: Recipe) -> Attack | None:
    training = recipe.training
    if training.adversarial is None:
        return None
    if training.adversarial == "fgm":
        return Attack(1, training.adversarial_epsilon, training.adversarial_epsilon)
    return Attack(training.adversarial_steps, training.adversarial_step_size, training.adversarial_epsilon)


def _loss(recipe: Recipe, labels: LabelSet) -> TokenLoss | None:
    training = recipe.training
    if training.loss == "cross_entropy" and not training.class_weights and not training.label_smoothing:
        return None  # the model's own
    weights = weights_of_labels(training.class_weights, labels) if training.class_weights else None
    return TokenLoss(training.loss, weights, training.label_smoothing, training.focal_gamma, training.dice_alpha)


def _read(recipe: Recipe) -> tuple[dict[str, list[Example]], list[str]]:
    """The examples of each split, and the tags that a data set declares."""
    data = recipe.data
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    examples = {}
    declared: list[str] = []
    for split, name in splits.items():
        if name and data.dataset is None:
            examples[split] = read_examples(
                name,
                data.format,
                data.scheme,
                token_column=data.token_column,
                tag_column=data.tag_column,
                overlapping=data.overlapping,
            )
        elif name and data.dataset is not None:
            examples[split], declared = read_dataset(
                data.dataset, name, data.subset, data.scheme, overlapping=data.overlapping
            )
    return examples, declared


def _labels(recipe: Recipe, examples: dict[str, list[Example]], declared: list[str]) -> LabelSet:
    """The labels given, or O and those of all types of all splits, so that they are the same in every run."""
    if recipe.model.labels is not None:
        labels = LabelSet(recipe.model.labels, recipe.model.scheme)
    else:
        types = {span.label for of in examples.values() for example in of for span in example.entities}
        types |= set(LabelSet(declared, complete=False).entity_types) if declared else set()
        letters = [letter for letter in SCHEMES[recipe.model.scheme] if letter]
        names = [f"{letter}-{name}" for name in sorted(types) for letter in letters]
        labels = LabelSet(["O", *names], recipe.model.scheme)
    for split, of in examples.items():
        faults = Faults(split)
        for label, place in unknown_types(of, labels.entity_types).items():
            faults.add(place, f"type {label!r} is not among the recipe's labels")
        faults.raise_if_any()
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


def _report_rows(split: str, examples: Sequence[Example], unspelled: Sequence[int], length: int) -> None:
    """Says what became of texts and entities: nothing is cut, but a reader should know."""
    logger.info(
        "%s: %d texts in %d rows of at most %d tokens; nothing is cut", split, len(examples), len(unspelled), length
    )
    if total := sum(unspelled):
        logger.warning("%s: the edges of %d entities fall inside words; they are stretched to the words'", split, total)


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Progress bars of `datasets`, which otherwise show everywhere."""
    import datasets

    hide = not sys.stderr.isatty() and datasets.are_progress_bars_disabled() is False
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()


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


# What a run leaves behind.


def _last_checkpoint(output: Path, recipe: Recipe, *, resume: bool) -> Path | None:
    """The last whole checkpoint, if the run is to go on.

    Raises:
        ConfigError: there is a run already, which is not to be resumed, or was another recipe's.
    """
    found = sorted(
        (path for path in (output / "checkpoints").glob("checkpoint-*") if path.name[11:].isdecimal()),
        key=lambda path: int(path.name[11:]),
    )
    if found and not resume:
        raise ConfigError(
            f"{output}: holds a run already; resume it, or remove {found[0].parent}, or name another output_dir"
        )
    if resume and (output / "recipe.toml").is_file():
        _refuse_other_recipe(Recipe.from_file(output / "recipe.toml"), recipe, output)
    whole = [path for path in found if _is_whole(path)]
    if found and not whole:
        logger.warning("%s: no checkpoint is whole, so training starts anew", output)
    return whole[-1] if whole else None


def _is_whole(checkpoint: Path) -> bool:
    """Whether the process did not end while it wrote this: the state is the last file of it."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all((checkpoint / name).is_file() for name in CHECKPOINT_FILES)


def _refuse_other_recipe(before: Recipe, now: Recipe, output: Path) -> None:
    changes = []
    for section in dataclasses.fields(Recipe):
        old, new = getattr(before, section.name), getattr(now, section.name)
        for key in dataclasses.fields(old):
            one, other = getattr(old, key.name), getattr(new, key.name)
            if one != other and (section.name, key.name) not in MAY_CHANGE:
                changes.append(f"{section.name}.{key.name} was {one!r} and is {other!r}")
    if changes:
        raise ConfigError(f"{output}: the run there has another recipe: {'; '.join(changes)}")


MAY_CHANGE = {("training", "output_dir"), ("training", "report_to"), ("training", "patience")}
