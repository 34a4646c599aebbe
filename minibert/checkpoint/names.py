"""How a file's tensor names become the model's: the spellings that BERT checkpoints have used over the years."""

from __future__ import annotations

import re
from collections.abc import Collection

BASE_PREFIX = "bert."
ENCODER_PARTS = ("embeddings", "encoder", "pooler")

# Parts of other models than the one being loaded: known, and left out. Anything else that is not expected is an error.
OTHER_HEADS = re.compile(r"^(bert\.)?(cls|classifier|qa_outputs|pooler)\.")
# A constant counting 0, 1, 2, ..., which transformers saved as a buffer until version 4.31.
POSITION_IDS = re.compile(r"(^|\.)embeddings\.position_ids$")


WRAPPERS = ("module.", "model.", "_orig_mod.")  # DataParallel, training frameworks and torch.compile


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


def model_name(file_name: str, expected: Collection[str]) -> str:
    """The name that the tensor `file_name` has in a model whose `state_dict` keys are `expected`."""
    name = re.sub(r"(?<=LayerNorm\.)gamma$", "weight", file_name)  # TensorFlow's names, still in bert-base-chinese
    name = re.sub(r"(?<=LayerNorm\.)beta$", "bias", name)
    has_prefix = any(key.startswith(BASE_PREFIX) for key in expected)
    if has_prefix and name.split(".")[0] in ENCODER_PARTS:
        return BASE_PREFIX + name
    return name if has_prefix else name.removeprefix(BASE_PREFIX)


def head_of(name: str) -> str | None:
    """The head that a model's tensor belongs to, all of which may be new; None for embeddings and encoder."""
    parts = name.removeprefix(BASE_PREFIX).split(".")
    if parts[0] in ("embeddings", "encoder"):
        return None
    return ".".join(parts[:2]) if parts[0] == "cls" else parts[0]
