"""BertConfig: the Hugging Face `config.json` of a BERT model, read strictly."""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields
from pathlib import Path
from typing import Any

from minibert.errors import CheckpointError, ConfigError
from minibert.hub import Source, read_json
from minibert.writing import replacing

CONFIG_NAME = "config.json"

# fmt: off
ACTIVATION_NAMES = frozenset({
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid",
    "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
})
# fmt: on
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
DTYPES = ("float16", "bfloat16", "float32", "float64")

# What this encoder does not do. Any other value would change the numbers, so it is refused by name.
REQUIRED_VALUES: dict[str, Any] = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "quantization_config": None,
}
# Sizes and the largest that is taken for one: beyond it, building the model would hang instead of failing.
SIZES = {
    "vocab_size": 2**31 - 1,
    "hidden_size": 2**20,
    "num_hidden_layers": 1000,
    "num_attention_heads": 2**20,
    "intermediate_size": 2**24,
    "max_position_embeddings": 2**31 - 1,
    "type_vocab_size": 2**31 - 1,
    "num_labels": 2**20,
}
PROBABILITIES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
# Null means "not given" here; elsewhere it is a wrong type, since guessing a size would change the model.
NULL_IS_DEFAULT = (
    "num_labels",
    "id2label",
    "label2id",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "tie_word_embeddings",
    "model_type",
)
NEVER_KEPT = ("_name_or_path", "use_return_dict", "torch_dtype")  # a path is private; the others repeat a field

SOURCE_OPTIONS = tuple(f.name for f in fields(Source) if f.name != "name")

logger = logging.getLogger("minibert")


@dataclass(init=False)
class BertConfig:
    """Everything that decides what a BERT model computes; fields and defaults as in Hugging Face's `config.json`.

    The fields are frozen: a model's config cannot drift from its weights. Use `replace` for a changed copy. Keys
    that minibert does not know are kept in `extra`, read and set as attributes, and written back.
    Field meanings: https://huggingface.co/docs/transformers/model_doc/bert#transformers.BertConfig

    Raises:
        ConfigError: listing every field of a wrong type or an impossible value, or one that asks for something
            this encoder does not do (relative positions, a decoder, cross attention).
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    classifier_dropout: float | None = None
    tie_word_embeddings: bool = True
    problem_type: str | None = None
    num_labels: int = 2
    id2label: dict[int, str] = field(default_factory=dict)
    label2id: dict[str, int] = field(default_factory=dict)
    return_dict: bool = True
    output_hidden_states: bool = False
    output_attentions: bool = False
    dtype: str | None = None
    architectures: list[str] | None = None
    model_type: str = "bert"
    extra: dict[str, Any] = field(default_factory=dict)

    def __init__(self, **given: Any) -> None:
        given = {**given.pop("extra", {}), **given}  # dataclasses.replace passes it
        hints = [_did_you_mean(name) for name in given if name not in _known_fields()]
        self._fill(given, [hint for hint in hints if hint])

    def _fill(self, given: Mapping[str, Any], problems: list[str]) -> None:
        known = _known_fields()
        values = {name: f.default for name, f in known.items() if name not in ("id2label", "label2id")}
        values |= {
            name: value
            for name, value in given.items()
            if name in known and not (value is None and name in NULL_IS_DEFAULT)
        }
        values["dtype"] = _dtype_name(given)
        wrong = {name for name in values if not has_type(values[name], known[name].type)}
        problems += [f"{name}: expected {known[name].type}, got {values[name]!r}" for name in known if name in wrong]
        problems += _impossible_values({name: value for name, value in values.items() if name not in wrong}, given)
        if not wrong & {"num_labels", "id2label", "label2id"} and values["num_labels"] <= SIZES["num_labels"]:
            problems += _resolve_labels(values, given)
        if problems:
            raise ConfigError("unusable BERT config:\n" + "\n".join(f"  - {problem}" for problem in problems))
        unknown = {key: given[key] for key in given if key not in known and key not in NEVER_KEPT}
        vars(self).update(values, extra=unknown)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dataclass_fields__:
            raise FrozenInstanceError(f"{name} is frozen; make another config with replace({name}=...)")
        self.extra[name] = value  # as transformers' Trainer does with use_cache

    def __getattr__(self, name: str) -> Any:  # only called for what is not a field
        extra = self.__dict__.get("extra", {})
        if name in extra:
            return extra[name]
        raise AttributeError(f"BertConfig has no field {name!r}")

    @property
    def classifier_dropout_prob(self) -> float:
        """Dropout before a classifier: `classifier_dropout` (0.0 counts), else `hidden_dropout_prob`."""
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BertConfig:
        """A config from the contents of a `config.json`; unlike in the constructor, any unknown key is kept."""
        config = cls.__new__(cls)
        config._fill(data, [])
        return config

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str] | Source, **options: Any) -> BertConfig:
        """Reads `config.json` of a directory or a model on the Hub, or the file given.

        `options` are those of `hub.Source` (revision, subfolder, token, cache_dir, local_files_only) and fields to
        override, known ones only.
        """
        where = {name: options.pop(name) for name in SOURCE_OPTIONS if name in options}
        if not isinstance(name_or_path, Source) and Path(name_or_path).is_file():
            path = Path(name_or_path)
        else:
            source = name_or_path if isinstance(name_or_path, Source) else Source(os.fspath(name_or_path), **where)
            found = source.fetch(CONFIG_NAME)
            if found is None:
                raise ConfigError(f"{source}/{CONFIG_NAME}: {source.absence}")
            path = found
        try:
            data = read_json(path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        try:
            return cls.from_dict(_overridden(data, options))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def replace(self, **changes: Any) -> BertConfig:
        """A copy with known fields changed; new labels or a new `num_labels` replace the old label maps."""
        return self.from_dict(_overridden(self.to_dict(), changes))

    def to_dict(self) -> dict[str, Any]:
        """The fields as `config.json` holds them; a null that is the field's default is left out."""
        data = dict(self.extra)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "extra" and not (value is None and f.default is None):
                data[f.name] = dict(value) if isinstance(value, dict) else value
        return data

    def to_json(self) -> bytes:
        """The contents of `config.json`; `torch_dtype` is added for transformers v4."""
        data = self.to_dict()
        if self.dtype is not None:
            data["torch_dtype"] = self.dtype
        try:
            return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
        except UnicodeEncodeError:  # half a surrogate pair in a kept key; JSON can spell it in ASCII
            return (json.dumps(data, indent=2) + "\n").encode()

    def to_json_string(self) -> str:
        """The same as a string: what Trainer's loggers ask a model's config for."""
        return self.to_json().decode()

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes `config.json` into `directory`, atomically."""
        content = self.to_json()
        with replacing(Path(directory)) as write:
            write(CONFIG_NAME, lambda path: path.write_bytes(content))


def _known_fields() -> dict[str, Any]:
    """The fields that a `config.json` can set, by name."""
    return {f.name: f for f in fields(BertConfig) if f.name != "extra"}


def _did_you_mean(name: str) -> str | None:
    """A problem for a key that is nearly a field: kept in silence, a typing error would leave the default in use."""
    close = difflib.get_close_matches(name, _known_fields(), n=1, cutoff=0.85)
    recognised = name in NEVER_KEPT or name in REQUIRED_VALUES
    return f"{name}: unknown field; did you mean {close[0]}?" if close and not recognised else None


def _dtype_name(given: Mapping[str, Any]) -> Any:
    """`dtype`, else the older `torch_dtype`, as a plain name ("float16" for torch.float16)."""
    dtype, older = (
        str(value).removeprefix("torch.") if value is not None and not isinstance(value, (int, float, bool)) else value
        for value in (given.get("dtype"), given.get("torch_dtype"))
    )
    dtype, older = (None if value == "auto" else value for value in (dtype, older))
    if dtype is not None and older is not None and dtype != older:
        logger.warning("config has dtype %s and torch_dtype %s; dtype is used", dtype, older)
    return older if dtype is None else dtype


def has_type(value: Any, annotation: str) -> bool:
    """Whether a JSON value fits a field's annotation; a bool is not a number, and infinities are not floats."""
    for kind in annotation.split(" | "):
        if kind == "None":
            fits = value is None
        elif kind == "float":
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        elif kind == "int":
            fits = isinstance(value, int) and not isinstance(value, bool)
        elif kind == "list[str]":
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        else:
            fits = isinstance(value, {"str": str, "bool": bool}.get(kind, dict))
        if fits:
            return True
    return False


def _impossible_values(values: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Problems of the fields in `values`, which holds only those of the right type."""
    problems = [
        f"{name}: must be at least 1 and at most {largest}, got {values[name]}"
        for name, largest in SIZES.items()
        if not 1 <= values.get(name, 1) <= largest
    ]
    for name in PROBABILITIES:
        if values.get(name) is not None and not 0 <= values[name] <= 1:
            problems.append(f"{name}: must lie between 0 and 1, got {values[name]}")
    for name in ("layer_norm_eps", "initializer_range"):
        if values.get(name, 0) < 0:
            problems.append(f"{name}: must not be negative, got {values[name]}")
    hidden_size, num_heads = values.get("hidden_size", 0), values.get("num_attention_heads", 1)
    if num_heads >= 1 and hidden_size % num_heads:
        problems.append(f"num_attention_heads: {num_heads} heads do not divide hidden_size {hidden_size}")
    pad = values.get("pad_token_id")
    if pad is not None and not 0 <= pad < values.get("vocab_size", math.inf):
        problems.append(f"pad_token_id: {pad} lies outside the vocabulary of {values['vocab_size']}")
    for name, allowed in (("hidden_act", ACTIVATION_NAMES), ("problem_type", PROBLEM_TYPES), ("dtype", DTYPES)):
        if values.get(name) is not None and values[name] not in allowed:
            problems.append(f"{name}: {values[name]!r} is not one of {', '.join(sorted(allowed))}")
    if values.get("model_type", "bert") != "bert":
        problems.append(f"model_type: {values['model_type']!r} is another architecture; only 'bert' is implemented")
    for name, required in REQUIRED_VALUES.items():
        value = given.get(name)
        if name == "pruned_heads" and isinstance(value, dict) and not any(value.values()):
            continue  # layers of which no head was pruned
        if value is not None and value != required:
            problems.append(f"{name}: {given[name]!r} is not implemented; only {required!r} is")
    return problems


def _label_id(key: Any) -> Any:
    """A label's id as JSON spells it ("3"), as an integer; anything else as it came."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 10 else key


def _resolve_labels(values: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Fills num_labels, id2label and label2id from whichever are given; returns what contradicts."""
    id2label, label2id, num_labels = (given.get(name) for name in ("id2label", "label2id", "num_labels"))
    if id2label:
        pairs = [(_label_id(key), name) for key, name in id2label.items()]
    elif label2id:
        pairs = [(_label_id(key), name) for name, key in label2id.items()]
    else:
        pairs = [(index, f"LABEL_{index}") for index in range(values["num_labels"])]
    ids, names = [index for index, _ in pairs], [name for _, name in pairs]
    if any(type(index) is not int for index in ids) or sorted(ids) != list(range(len(ids))):
        return [f"id2label: ids must be the integers 0 to {len(ids) - 1}, each once, got {ids}"]
    if any(not isinstance(name, str) for name in names) or len(set(names)) < len(names):
        return [f"id2label: label names must be strings and differ, got {names}"]
    labels = dict(sorted(pairs))
    inverse = {name: index for index, name in labels.items()}
    problems = []
    if label2id and {name: _label_id(index) for name, index in label2id.items()} != inverse:
        problems.append(f"label2id: {label2id} contradicts id2label {labels}; correct one or leave it out")
    if num_labels is not None and num_labels != len(labels):
        problems.append(f"num_labels: {num_labels} contradicts id2label, which names {len(labels)} labels")
    values |= {"id2label": labels, "label2id": inverse, "num_labels": len(labels)}
    return problems


def _overridden(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with `overrides`; labels given anew replace the label fields that would contradict them."""
    if "torch_dtype" in overrides:
        overrides = {"dtype": overrides["torch_dtype"], **{k: v for k, v in overrides.items() if k != "torch_dtype"}}
    unknown = [name for name in overrides if name not in _known_fields()]
    if unknown:
        hints = [_did_you_mean(name) or f"{name}: not a field of BertConfig" for name in unknown]
        raise ConfigError("unusable override: " + "; ".join(hints))
    merged = {**data, **overrides}
    dropped: set[str] = {"torch_dtype"} if "dtype" in overrides else set()
    label_fields = {"num_labels", "id2label", "label2id"}
    if overrides.keys() & label_fields:
        count = len(data.get("id2label") or ()) or data.get("num_labels", 2)
        if set(overrides) & label_fields != {"num_labels"} or overrides["num_labels"] != count:
            dropped |= label_fields - overrides.keys()
    return {key: value for key, value in merged.items() if key not in dropped}
