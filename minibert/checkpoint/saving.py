"""A model's weights into safetensors files that `transformers` reads too."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from minibert.checkpoint.files import INDEX_SUFFIX, SAFETENSORS, weight_map_of
from minibert.errors import CheckpointError, MinibertError
from minibert.hub import Source
from minibert.writing import write_whole

logger = logging.getLogger("minibert")

INDEX = SAFETENSORS + INDEX_SUFFIX
SHARD = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def save_weights(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    tied: Mapping[str, str],
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes `model.safetensors`, or shards of at most `max_shard_size` and their index.

    Older weights in the directory stay whole, and stay what is loaded, until the new ones are complete; then they are
    removed. `tied` names parameters that stand for others; they are stored once, under the other's name.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    limit = _bytes(max_shard_size)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    state = _separate({name: tensor for name, tensor in model.state_dict().items() if name not in tied})
    single, index = folder / SAFETENSORS, folder / INDEX
    old = _shards_of(index)
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    if not split.is_sharded:
        write_whole(single, lambda path: save_file(state, path, {"format": "pt"}))  # one file comes before an index
        index.unlink(missing_ok=True)
        new = {SAFETENSORS}
    else:
        # Shards of an older save may have these names; new ones take others, so that the old index stays true.
        taken = any((folder / name).exists() for name in split.filename_to_tensors)
        mark = f"-{secrets.token_hex(4)}" if taken else ""
        files = {name: name.replace("model", f"model{mark}", 1) for name in split.filename_to_tensors}
        for name, tensors in split.filename_to_tensors.items():
            part = {tensor: state[tensor] for tensor in tensors}
            write_whole(folder / files[name], lambda path, part=part: save_file(part, path, {"format": "pt"}))  # type: ignore[misc]
        weight_map = {tensor: files[name] for tensor, name in split.tensor_to_filename.items()}
        text = json.dumps({"metadata": split.metadata, "weight_map": weight_map}, indent=2) + "\n"
        write_whole(index, lambda path: path.write_text(text, encoding="utf-8"))
        single.unlink(missing_ok=True)  # until now it came before the index
        new = set(files.values())
    for name in old - new:
        if SHARD.fullmatch(name):  # whatever else an index may name is not ours to remove
            (folder / name).unlink(missing_ok=True)


def copy_tokenizer(source: Source, directory: str | os.PathLike[str]) -> None:
    """Copies the tokeniser's files of the checkpoint a model came from, but for those that are there already."""
    try:
        cached = replace(source, local_files_only=True)  # what was not needed until now is not downloaded for this
        files = {name: cached.fetch(name) for name in TOKENIZER_FILES}
    except CheckpointError as error:  # the checkpoint has gone; the weights are safe by now
        logger.warning("the tokeniser's files were not copied: %s", error)
        return
    for name, path in files.items():
        target = Path(directory) / name
        if path is not None and not target.exists():
            content = path.read_bytes()
            write_whole(target, lambda temporary, content=content: temporary.write_bytes(content))  # type: ignore[misc]


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
