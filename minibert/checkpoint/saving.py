"""A model into a checkpoint directory that `transformers` reads too."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from minibert.checkpoint.files import INDEX_SUFFIX, SAFETENSORS, weight_map_of
from minibert.config import CONFIG_NAME, BertConfig
from minibert.errors import CheckpointError, MinibertError
from minibert.hub import Source
from minibert.writing import file_in, replacing

logger = logging.getLogger("minibert")

INDEX = SAFETENSORS + INDEX_SUFFIX
WEIGHT_PATTERNS = (SAFETENSORS, INDEX, "model-?????-of-?????.safetensors")  # what a checkpoint of ours can have
SHARD = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def save_checkpoint(
    model: nn.Module,
    config: BertConfig,
    directory: str | os.PathLike[str],
    *,
    tied: Mapping[str, str],
    source: Source | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes config, `model.safetensors` or shards of at most `max_shard_size` and their index, and the tokeniser.

    All of it takes the place of an older checkpoint in the directory at one moment; until then the older one is whole.

    Args:
        tied: parameters that stand for others; they are stored once, under the other's name.
        source: the checkpoint the model came from, whose tokeniser's files are copied unless there are some already.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    folder = Path(directory)
    state = _separate({name: tensor for name, tensor in model.state_dict().items() if name not in tied})
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=_bytes(max_shard_size)
    )
    files = {CONFIG_NAME: config.to_json()}  # what cannot be written as JSON fails here, before anything is
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        files[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
    with replacing(folder, lambda: _old_weights(folder)) as write:
        for name, tensors in split.filename_to_tensors.items():
            part = {tensor: state[tensor] for tensor in tensors}
            write(name, partial(_save_file, part))
        if source is not None:
            files |= _tokenizer_files(source, folder)
        for name, content in files.items():
            write(name, partial(_write_bytes, content))


def copy_tokenizer(source: Source, directory: str | os.PathLike[str]) -> None:
    """Copies the tokeniser's files of a checkpoint into a folder, but for those that are there already."""
    folder = Path(directory)
    with replacing(folder) as write:
        for name, content in _tokenizer_files(source, folder).items():
            write(name, partial(_write_bytes, content))


def _save_file(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(str(error)) from error


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _tokenizer_files(source: Source, folder: Path) -> dict[str, bytes]:
    """The tokeniser's files that the checkpoint at `source` has and `folder` has not."""
    try:
        cached = replace(source, local_files_only=True)  # what was not needed until now is not downloaded for this
        found = {name: cached.fetch(name) for name in TOKENIZER_FILES if file_in(folder, name) is None}
        return {name: path.read_bytes() for name, path in found.items() if path is not None}
    except (CheckpointError, OSError) as error:  # the checkpoint has gone; a model without it is better than none
        logger.warning("the tokeniser's files were not copied: %s", error)
        return {}


def _old_weights(folder: Path) -> set[str]:
    """The weight files of the checkpoint that is there."""
    return {
        name
        for name in {SAFETENSORS, INDEX} | _shards_of(folder / INDEX)
        if (name in (SAFETENSORS, INDEX) or SHARD.fullmatch(name))  # whatever else an index may name is not ours
        and (folder / name).exists()
    }


def _bytes(size: int | str) -> int:
    """A size as a number of bytes or as "200MB"; powers of a thousand, as on the Hub."""
    match = re.fullmatch(r"(\d{1,6})\s*([KMGT]?B)?", str(size))
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if not isinstance(size, str) or match is None or int(match[1]) == 0:
        raise MinibertError(f'max_shard_size: expected a positive number of bytes, or such as "200MB", got {size!r}')
    return int(match[1]) * units[match[2] or "B"]


def _shards_of(index: Path) -> set[str]:
    """The files of older shards; none if there are none, or if the index cannot say."""
    try:
        return set(weight_map_of(index).values()) if index.is_file() else set()
    except CheckpointError:
        return set()


def _separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, no two of which share memory, as safetensors wants them; copies only where it must."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return separate
