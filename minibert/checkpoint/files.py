"""The weight files of a checkpoint directory: which there are, what is in them, and whether they are whole."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minibert.errors import CheckpointError, first_line
from minibert.hub import Source, damage, read_json

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
# Names that other frameworks give their weights, and what to do about it.
FOREIGN = {
    "tf_model.h5": "TensorFlow",
    "flax_model.msgpack": "Flax",
    "bert_model.ckpt.index": "TensorFlow 1",
    "model.ckpt.index": "TensorFlow 1",
    "rust_model.ot": "rust-bert",
}
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that has not been read yet: its shape, its dtype as the file spells it, and how to read it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]

    @property
    def float_dtype(self) -> torch.dtype | None:
        """The torch dtype if these are floating-point weights."""
        return SAFETENSORS_DTYPES.get(self.dtype)


class WeightFiles:
    """All tensors of a checkpoint by name, from one file or from the shards of an index.

    `model.safetensors` is preferred, then its index, then `pytorch_model.bin`, then its index. Everything is looked
    at before anything is read: a file that is missing or damaged is an error and never a reason to take another.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """

    def __init__(self, source: Source) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._open_files = ExitStack()
        self.path = source.folder
        for name, add in ((SAFETENSORS, self._add_safetensors), (PICKLE, self._add_pickle)):
            path = source.fetch(name)
            index = None if path is not None else source.fetch(name + INDEX_SUFFIX)
            if path is not None:
                self.path = path
                add(path)
            elif index is not None:
                self.path = index
                self._add_shards(source, index, add)
            else:
                continue
            if not self.tensors:
                raise CheckpointError(f"{self.path}: holds no tensors")
            return
        raise CheckpointError(_no_weights(source))

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._open_files.close()

    def _add_safetensors(self, path: Path) -> None:
        try:
            file = self._open_files.enter_context(safe_open(path, framework="pt", device="cpu"))
            _refuse_duplicates(path)
            for name in file.keys():  # noqa: SIM118  # not a dict
                part = file.get_slice(name)
                read = _reader(file, name)
                self._add(name, StoredTensor(path, tuple(part.get_shape()), part.get_dtype(), read))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {damage(path, error)}") from None

    def _add_pickle(self, path: Path) -> None:
        try:
            # A pickle can run code; with weights_only it can make tensors and nothing else. Mapping needs the zip
            # format, which torch.save has written since 1.6; bert-base-chinese's own file is older.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path}: refused, it holds more than tensors and could run code, or it is damaged "
                f"({first_line(error)}); save the weights as model.safetensors"
            ) from None
        except Exception as error:  # noqa: BLE001  # the unpickler raises whatever a damaged file makes it stumble over
            raise CheckpointError(f"{path}: {damage(path, error)}") from None
        if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
            inner = [key for key, value in state.items() if isinstance(value, dict)] if isinstance(state, dict) else []
            hint = f"; they seem to be in {inner[0]!r}, save that alone" if inner else ""
            raise CheckpointError(f"{path}: expected a dictionary of tensors by name, as model.state_dict() is{hint}")
        spelled = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
        seen: set[int] = set()
        for name, tensor in state.items():
            if not isinstance(name, str) or tensor.layout != torch.strided or tensor.device.type != "cpu":
                kind = f"{tensor.layout} on {tensor.device}"
                raise CheckpointError(f"{path}: expected plain tensors by name, got {kind} for {name!r}")
            if tensor.untyped_storage().data_ptr() in seen or 0 in tensor.stride():
                tensor = tensor.clone(memory_format=torch.contiguous_format)  # two parameters must not be one
            seen.add(tensor.untyped_storage().data_ptr())
            dtype = spelled.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
            self._add(name, StoredTensor(path, tuple(tensor.shape), dtype, _constant(tensor)))

    def _add_shards(self, source: Source, index: Path, add: Callable[[Path], None]) -> None:
        weight_map = weight_map_of(index)
        shards = {shard: source.fetch(shard) for shard in sorted(set(weight_map.values()))}
        missing = [shard for shard, path in shards.items() if path is None]
        if missing:
            raise CheckpointError(f"{index}: names {', '.join(missing)}: {source.absence}; download the missing files")
        for path in shards.values():
            assert path is not None
            add(path)
        found = {name: tensor.path.name for name, tensor in self.tensors.items()}
        for name in sorted(found.keys() | weight_map.keys()):
            if found.get(name) != weight_map.get(name):
                raise CheckpointError(
                    f"{index}: does not belong to the files beside it: {name} is in {found.get(name, 'none of them')}, "
                    f"by the index in {weight_map.get(name, 'none')}; download all files again"
                )

    def _add(self, name: str, tensor: StoredTensor) -> None:
        if name in self.tensors:
            raise CheckpointError(f"{tensor.path}: {name} is in {self.tensors[name].path.name} too; keep one of them")
        self.tensors[name] = tensor


def _refuse_duplicates(path: Path) -> None:
    """The library takes the last of several entries of one name; it has checked the header's length by now."""

    def unique(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: incomplete or corrupt, {twice} is in its header twice; download it again")

    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    json.loads(header, object_pairs_hook=unique)


def _reader(file: Any, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def weight_map_of(index: Path) -> dict[str, str]:
    """Tensor name to file name, from an index whose names stay inside its directory."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: expected weight_map, from tensor names to file names")
    outside = [shard for shard in weight_map.values() if shard in ("", ".", "..") or set("/\\\0") & set(shard)]
    if outside:
        raise CheckpointError(f"{index}: refused, {outside[0]!r} is not the plain name of a file beside the index")
    return weight_map


def _no_weights(source: Source) -> str:
    message = f"{source}: no {SAFETENSORS} or {PICKLE}: {source.absence}"
    if not source.is_local:
        return message
    try:
        found = sorted(entry.name for entry in source.folder.iterdir())
    except OSError as error:
        return f"{source}: cannot be read ({error.strerror})"
    for name, framework in FOREIGN.items():
        if name in found:
            return (
                f"{source}/{name}: {framework} weights are not read; convert them with transformers "
                f"(save_pretrained writes {SAFETENSORS})"
            )
    if "adapter_config.json" in found:
        return f"{message}; there is an adapter only: load it with PEFT onto its base model, merge, and save that"
    if "model.onnx" in found:
        return f"{message}; there is an export to ONNX only: TokenClassifier runs it with engine='onnx' (--engine onnx)"
    return f"{message}; found {', '.join(found[:20])}"
