"""A training run in a TOML file: what is read, what is trained, how."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from minibert.config import has_type
from minibert.errors import ConfigError
from minibert.text.alignment import LABEL_PIECES, SPLIT_MODES
from minibert.text.labels import SCHEMES
from minibert.train.data import FORMATS, OVERLAPPING

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]


LOSSES = ("cross_entropy", "focal", "dice")
LOGGERS = ("tensorboard", "trackio")


@dataclass(frozen=True)
class ModelPart:
    """Where the model comes from: a checkpoint to fine-tune, or a config to start from scratch."""

    name_or_path: str | None = None
    config: str | None = None  # a config.json
    tokenizer: str | None = None  # a directory or Hub name; default that of the checkpoint
    scheme: str = "BIO"  # of the model's labels, whatever that of the data is
    labels: list[str] | None = None  # in the order of their ids; default O and the types of the data, sorted
    decoder: str = "argmax"


@dataclass(frozen=True)
class DataPart:
    """Labelled files, with paths relative to the recipe; or, with `dataset`, the names of its splits."""

    train: str = ""
    validation: str | None = None
    test: str | None = None
    dataset: str | None = None  # a name on the Hub, or a directory, for `datasets` to load
    subset: str | None = None  # of the dataset
    format: str = "auto"
    scheme: str = "auto"
    token_column: int | None = None  # from 0, or from -1 backwards; default found from what the columns hold
    tag_column: int | None = None
    overlapping: str = "error"  # entities: "error", or "keep", and learn the first and longest
    split_mode: str = "text"
    label_pieces: str = "first"  # of a word: "first" or "all"
    max_length: int = 512


@dataclass(frozen=True)
class TrainingPart:
    """How it is trained."""

    output_dir: str = ""
    epochs: float = 3.0
    learning_rate: float = 3e-5
    head_learning_rate: float | None = None
    layer_decay: float = 1.0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    schedule: str = "linear"  # of the learning rate behind the warm-up: down to 0 "linear" or "cosine", or "constant"
    warmup_ratio: float = 0.1  # of all steps
    max_grad_norm: float = 1.0
    batch_size: int = 32  # texts of like length, on each device
    max_tokens_per_batch: int | None = None  # in place of batch_size: as many texts as have so many tokens
    gradient_accumulation_steps: int = 1
    loss: str = "cross_entropy"  # or "focal" or "dice"
    class_weights: dict[str, float] = field(default_factory=dict)  # of labels or types; default 1.0
    label_smoothing: float = 0.0
    focal_gamma: float = 2.0
    dice_alpha: float = 0.0
    r_drop: float = 0.0  # weight of R-Drop's divergence
    adversarial: str | None = None  # "fgm" or "pgd"
    adversarial_epsilon: float = 1.0  # how far word embeddings are moved
    adversarial_step_size: float = 0.3  # of pgd
    adversarial_steps: int = 3  # of pgd
    bf16: bool = False  # autocast; parameters and the optimiser stay in float32
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    patience: int | None = None  # evaluations without a better F1 before it stops
    logging_steps: int = 20
    report_to: list[str] = field(default_factory=lambda: ["tensorboard", "trackio"])  # those that are installed
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """The whole of it.

    Raises:
        ConfigError: listing every key that is none and every value that cannot be.
    """

    model: ModelPart = field(default_factory=ModelPart)
    data: DataPart = field(default_factory=DataPart)
    training: TrainingPart = field(default_factory=TrainingPart)

    @classmethod
    def from_file(cls, path: Path, settings: Sequence[str] = ()) -> Recipe:
        """Reads a TOML file; `settings` such as "training.epochs=5" change it. Paths become absolute.

        A setting without a value, "training.patience=", puts the default back.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: not a recipe in TOML ({error})") from None
        for setting in settings:
            name, equals, value = setting.partition("=")
            section, dot, key = name.strip().partition(".")
            if not equals or not dot:
                raise ConfigError(f"--set {setting}: expected SECTION.KEY=VALUE, such as training.epochs=5")
            table = data.setdefault(section, {})
            if not isinstance(table, dict):
                continue  # no table: named below with everything else
            if value.strip():
                table[key] = _value(value.strip())
            else:
                table.pop(key, None)
        return cls.from_dict(data, path.parent.resolve(), str(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], folder: Path, source: str = "recipe") -> Recipe:
        """The same from nested dictionaries."""
        problems: list[str] = []
        parts = {}
        for section in data.keys() - {f.name for f in dataclasses.fields(cls)}:
            problems.append(f"[{section}]: not a section; expected model, data, training")
        for f in dataclasses.fields(cls):
            kind = get_type_hints(cls)[f.name]
            parts[f.name] = _part(kind, f.name, data.get(f.name, {}), problems)
        if not problems:
            recipe = cls(**parts)._absolute(folder)
            problems = recipe._problems()
        if problems:
            raise ConfigError(f"{source}: unusable recipe:\n" + "\n".join(f"  - {problem}" for problem in problems))
        return recipe

    def to_toml(self) -> str:
        """The recipe with every value resolved."""
        lines = []
        for f in dataclasses.fields(self):
            lines.append(f"[{f.name}]")
            part = getattr(self, f.name)
            for key in dataclasses.fields(part):
                value = getattr(part, key.name)
                if value is not None:
                    lines.append(f"{key.name} = {_toml(value)}")
            lines.append("")
        return "\n".join(lines)

    def _absolute(self, folder: Path) -> Recipe:
        def path(value: str | None, *, only_if_there: bool = False) -> str | None:
            if not value or (only_if_there and not (folder / value).exists()):
                return value  # a name on the Hub
            return str(folder / value)

        model = dataclasses.replace(
            self.model,
            name_or_path=path(self.model.name_or_path, only_if_there=True),
            tokenizer=path(self.model.tokenizer, only_if_there=True),
            config=path(self.model.config),
        )
        if self.data.dataset is None:
            data = dataclasses.replace(
                self.data,
                train=path(self.data.train) or "",
                validation=path(self.data.validation),
                test=path(self.data.test),
            )
        else:
            data = dataclasses.replace(self.data, dataset=path(self.data.dataset, only_if_there=True))
        training = dataclasses.replace(self.training, output_dir=path(self.training.output_dir) or "")
        return Recipe(model, data, training)

    def _problems(self) -> list[str]:
        model, data, training = self.model, self.data, self.training
        problems = []
        value: Any
        if (model.name_or_path is None) == (model.config is None):
            problems.append("model: expected one of name_or_path and config")
        if model.config is not None and model.tokenizer is None:
            problems.append("model.tokenizer: a model from scratch needs one")
        for name, value in (("data.train", data.train), ("training.output_dir", training.output_dir)):
            if not value:
                problems.append(f"{name}: missing")
        for name, value, allowed in (
            ("model.scheme", model.scheme, tuple(SCHEMES)),
            ("model.decoder", model.decoder, ("argmax", "viterbi", "crf")),
            ("data.split_mode", data.split_mode, SPLIT_MODES),
            ("data.label_pieces", data.label_pieces, LABEL_PIECES),
            ("data.overlapping", data.overlapping, OVERLAPPING),
            ("data.format", data.format, FORMATS),
            ("data.scheme", data.scheme, ("auto", *SCHEMES)),
            ("training.schedule", training.schedule, ("linear", "cosine", "constant")),
            ("training.loss", training.loss, LOSSES),
            ("training.adversarial", training.adversarial, (None, "fgm", "pgd")),
        ):
            if value not in allowed:
                problems.append(f"{name}: expected {', '.join(filter(None, allowed))}, got {value!r}")
        if data.subset is not None and data.dataset is None:
            problems.append("data.subset: of which data.dataset?")
        for logger in training.report_to:
            if logger not in LOGGERS:
                problems.append(f"training.report_to: expected of {', '.join(LOGGERS)}, got {logger!r}")
        for label, weight in training.class_weights.items():
            if not has_type(weight, "float") or weight <= 0:
                problems.append(f"training.class_weights: {label}: expected a positive number, got {weight!r}")
        changed = [
            name
            for name, is_set in (
                ("loss", training.loss != "cross_entropy"),
                ("class_weights", bool(training.class_weights)),
                ("label_smoothing", training.label_smoothing != 0),
            )
            if is_set
        ]
        if model.decoder == "crf" and changed:
            problems.append(f"training.{', '.join(changed)}: of single tokens, but decoder crf learns sequences")
        if training.label_smoothing and training.loss != "cross_entropy":
            problems.append("training.label_smoothing: of the loss cross_entropy only")
        for name, number, low, high in (
            ("data.max_length", data.max_length, 3, 10**6),
            ("training.epochs", training.epochs, 1e-6, 10**6),
            ("training.learning_rate", training.learning_rate, 0, 10),
            ("training.head_learning_rate", training.head_learning_rate, 0, 10),
            ("training.layer_decay", training.layer_decay, 1e-6, 1),
            ("training.weight_decay", training.weight_decay, 0, 10),
            ("training.warmup_ratio", training.warmup_ratio, 0, 1),
            ("training.max_grad_norm", training.max_grad_norm, 0, 10**6),
            ("training.adam_beta1", training.adam_beta1, 0, 0.999999),
            ("training.adam_beta2", training.adam_beta2, 0, 0.999999),
            ("training.adam_epsilon", training.adam_epsilon, 0, 1),
            ("training.batch_size", training.batch_size, 1, 10**6),
            ("training.max_tokens_per_batch", training.max_tokens_per_batch, 1, 10**9),
            ("training.label_smoothing", training.label_smoothing, 0, 0.999999),
            ("training.focal_gamma", training.focal_gamma, 0, 100),
            ("training.dice_alpha", training.dice_alpha, 0, 100),
            ("training.r_drop", training.r_drop, 0, 10**6),
            ("training.adversarial_epsilon", training.adversarial_epsilon, 1e-9, 10**6),
            ("training.adversarial_step_size", training.adversarial_step_size, 1e-9, 10**6),
            ("training.adversarial_steps", training.adversarial_steps, 1, 100),
            ("training.logging_steps", training.logging_steps, 1, 10**9),
            ("training.gradient_accumulation_steps", training.gradient_accumulation_steps, 1, 10**6),
            ("training.patience", training.patience, 1, 10**6),
        ):
            if number is not None and not low <= number <= high:
                problems.append(f"{name}: expected {low} to {high}, got {number}")
        return problems


def _part(kind: type, section: str, given: Any, problems: list[str]) -> Any:
    if not isinstance(given, dict):
        problems.append(f"[{section}]: expected a table, got {given!r}")
        return kind()
    types = kind.__annotations__  # as they are written
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in types:
            close = difflib.get_close_matches(key, types, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; expected {', '.join(types)}"
            problems.append(f"{section}.{key}: no such key{hint}")
        elif not has_type(value, types[key]):
            problems.append(f"{section}.{key}: expected {types[key]}, got {value!r}")
        else:
            values[key] = value
    return kind(**values)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {_toml(of)}" for key, of in value.items()) + "}"
        )
    return json.dumps(value, ensure_ascii=False)


def _value(text: str) -> Any:
    """A value as TOML has it; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
