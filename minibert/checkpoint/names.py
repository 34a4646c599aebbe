"""How a file's tensor names become the model's: the spellings that BERT checkpoints have used over the years."""

from __future__ import annotations

import re
from collections.abc import Collection

BASE_PREFIX = "bert."
ENCODER_PARTS = ("embeddings", "encoder", "pooler")
WRAPPERS = ("module.", "model.", "_orig_mod.")  # DataParallel, training frameworks and torch.compile

# Older endings and today's. TensorFlow's names for a normalisation are still in the Hub's bert-base-chinese.
ENDINGS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
# A constant counting 0, 1, 2, ..., which transformers saved as a buffer until version 4.31.
POSITION_IDS = re.compile(r"(^|\.)embeddings\.position_ids$")
# A layer on top of the logits, which are what it was given; without it they are decoded one by one.
CRF = re.compile(r"^crf\.")
# Parts of other models than the one being loaded: known, and left out. Anything else that is not expected is an error.
OTHER_HEADS = re.compile(r"^(bert\.)?(cls|classifier|qa_outputs|pooler|crf)\.")
# What PEFT and adapter libraries put inside the encoder: without it the numbers would be others.
ADAPTER = re.compile(r"(^|[._])(lora_|adapters?[._]|base_layer\.|ia3_)")


def wrapper_of(file_names: Collection[str]) -> str:
    """The wrappers in front of all names of a file, one or several, or an empty string."""
    found = ""
    while file_names:
        shared = (found + wrapper for wrapper in WRAPPERS)
        longer = next((prefix for prefix in shared if all(name.startswith(prefix) for name in file_names)), None)
        if longer is None:
            break
        found = longer
    return found


def has_base(model_keys: Collection[str]) -> bool:
    """Whether a model with these `state_dict` keys keeps its encoder under the base prefix, as task models do."""
    return any(key.startswith(BASE_PREFIX) for key in model_keys)


def model_name(file_name: str, *, has_base: bool) -> str:
    """The name that the tensor `file_name` has in a model, with or without a base prefix for its encoder."""
    name = file_name
    for old, new in ENDINGS.items():
        if f".{name}".endswith(old):
            name = name.removesuffix(old[1:]) + new[1:]
    if has_base and name.split(".")[0] in ENCODER_PARTS:
        return BASE_PREFIX + name
    return name if has_base else name.removeprefix(BASE_PREFIX)


def head_of(name: str) -> str | None:
    """The head that a model's tensor belongs to, all of which may be new; None for embeddings and encoder."""
    parts = name.removeprefix(BASE_PREFIX).split(".")
    if parts[0] in ("embeddings", "encoder"):
        return None
    return ".".join(parts[:2]) if parts[0] == "cls" else parts[0]
