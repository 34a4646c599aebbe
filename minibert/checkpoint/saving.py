"""A model's weights into a safetensors file that `transformers` reads too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from minibert.checkpoint.files import SAFETENSORS


def save_weights(model: nn.Module, directory: str | os.PathLike[str], *, tied: Mapping[str, str]) -> None:
    """Writes `model.safetensors` into `directory`, atomically: an older file stays whole until the new one is.

    `tied` names parameters that stand for others; they are stored once, under the other's name.
    """
    target = Path(directory) / SAFETENSORS
    target.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        save_file(state, temporary, metadata={"format": "pt"})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
