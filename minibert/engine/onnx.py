"""A model that `minibert export` has written, run by ONNX Runtime: numpy in, numpy out, nothing computed by PyTorch.

Shapes: B sequences of S cells, K labels.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minibert.config import BertConfig
from minibert.errors import CheckpointError, MinibertError, first_line
from minibert.hub import Source, damage
from minibert.text.decoding import PathScores

ONNX_NAME = "model.onnx"
DATA_NAME = "model.onnx.data"  # the weights, if they are not in the same file
CRF_NAME = "crf.safetensors"
CRF_PARTS = ("start_transitions", "transitions", "end_transitions")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # int64 (B, S) each
Array = npt.NDArray[Any]


class OnnxModel:
    """An exported model.

    Args:
        name_or_path: the directory, or the name of a repository on the Hub that holds one.
        threads: of this model; default as ONNX Runtime has it, one for each core.

    Raises:
        CheckpointError: there is no export, or ONNX Runtime cannot load it.
        MinibertError: ONNX Runtime is not installed, or `threads` is below 1.
    """

    def __init__(self, name_or_path: str | os.PathLike[str] | Source, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise MinibertError(f"threads: expected at least 1, got {threads}")
        source = name_or_path if isinstance(name_or_path, Source) else Source(os.fspath(name_or_path))
        with source.unchanged():
            self.config = BertConfig.from_pretrained(source)
            path = source.fetch(ONNX_NAME)
            if path is None:
                raise CheckpointError(f"{source}: no {ONNX_NAME}: {source.absence}; `minibert export` makes one")
            source.fetch(DATA_NAME)  # beside it, if there is one
            crf = source.fetch(CRF_NAME)
            self.crf = None if crf is None else _crf_of(crf)
            self._session = _session_of(path, threads)
        described = self._session.get_modelmeta().custom_metadata_map
        self.precision = described.get("precision", "fp32")
        self.architecture = described.get("architecture", "a graph that does not say what it is")
        self.engine = f"{self.precision} by ONNX Runtime"
        self.outputs = [output.name for output in self._session.get_outputs()]

    def __call__(
        self, input_ids: Array, attention_mask: Array | None = None, token_type_ids: Array | None = None
    ) -> dict[str, Array]:
        """The model's results by name; at padding they are 0.

        Args:
            input_ids: (B, S) integers below vocab_size.
            attention_mask: (B, S), 1 or True for real tokens; default all.
            token_type_ids: (B, S) integers below type_vocab_size; default 0.

        Raises:
            MinibertError: inputs of another shape, ids beyond their table, a mask of other values, or more cells than
                the model has positions.
        """
        config = self.config
        input_ids = np.asarray(input_ids)
        if input_ids.ndim != 2 or not input_ids.size:
            raise MinibertError(f"input_ids: expected shape (batch, sequence), not empty, got {input_ids.shape}")
        if input_ids.shape[1] > config.max_position_embeddings:
            raise MinibertError(
                f"input of {input_ids.shape[1]} tokens is longer than max_position_embeddings "
                f"{config.max_position_embeddings}; split the text into windows"
            )
        mask = np.ones_like(input_ids) if attention_mask is None else np.asarray(attention_mask)
        types = np.zeros_like(input_ids) if token_type_ids is None else np.asarray(token_type_ids)
        given = zip(INPUTS, (input_ids, mask, types), (config.vocab_size, 2, config.type_vocab_size), strict=True)
        feeds = {name: _checked(name, values, input_ids.shape, below) for name, values, below in given}
        return dict(zip(self.outputs, self._session.run(None, feeds), strict=True))


def _checked(name: str, values: Array, shape: tuple[int, ...], below: int) -> Array:
    if values.shape != shape:
        raise MinibertError(f"{name}: expected shape {shape}, that of input_ids, got {values.shape}")
    whole = np.asarray(values).astype(np.int64)
    wrong = values[(whole != values) | (whole < 0) | (whole >= below)]
    if wrong.size:
        raise MinibertError(f"{name}: expected integers from 0 to {below - 1}, got {wrong[0]}")
    return whole


def _session_of(path: Path, threads: int | None) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise MinibertError("engine onnx needs onnxruntime: pip install 'minibert[export]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 4  # what goes wrong is raised; it need not be printed, too
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  # the library raises no narrower class
        raise CheckpointError(f"{path}: cannot be loaded by ONNX Runtime ({first_line(error)})") from None


def _crf_of(path: Path) -> PathScores:
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        return PathScores(*(tensors[f"crf.{part}"] for part in CRF_PARTS))
    except Exception as error:  # noqa: BLE001  # the library raises no narrower class
        raise CheckpointError(f"{path}: not the CRF of an export, {damage(path, error)}") from None
