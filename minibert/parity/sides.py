"""What is compared with what: checkpoints in minibert or `transformers`, engines, and modules of users."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minibert.checkpoint.loading import few
from minibert.config import BertConfig
from minibert.engine import optimize
from minibert.errors import MinibertError
from minibert.model.heads import MODELS, named_class
from minibert.parity.points import Names
from minibert.parity.tracing import Side

logger = logging.getLogger("minibert")

Place = str | os.PathLike[str]
TRANSFORMERS, MINIBERT = "transformers", "minibert"  # what a checkpoint can be run by
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """A dtype by its short or its long name.

    Raises:
        MinibertError: it is none of those that can be compared.
    """
    if isinstance(name, str):
        long = name.removeprefix("torch.")
        name = DTYPES.get(name) or next((d for d in DTYPES.values() if str(d) == f"torch.{long}"), name)
    if name not in DTYPES.values():
        raise MinibertError(f"dtype: expected {', '.join(DTYPES)}, got {name}")
    assert isinstance(name, torch.dtype)
    return name


def head_of(place: Place) -> str:
    """The class that a checkpoint names in `architectures`; "BertModel", with a notice, for one that is not ours."""
    name, model_class = named_class(BertConfig.from_pretrained(place))
    if model_class is None:
        logger.warning("%s: the head of %s is not compared, only the encoder", place, name)
        return "BertModel"
    return name


def in_minibert(
    place: Place, head: str, *, dtype: torch.dtype, attention: str, device: str | None, engine: str | None = None
) -> tuple[Side, list[str]]:
    """A checkpoint in minibert, or in an engine, and the parameters that it lacks."""
    model, report = MODELS[head].from_pretrained(
        place, dtype=dtype, attn_implementation=attention, device=device, output_loading_info=True
    )
    title = f"{place} in minibert, {str(dtype).removeprefix('torch.')}"
    if engine is not None:
        model = optimize(model, engine)
        title = f"{place} in minibert, {model.engine}"
    return Side(title, model, head, scores=attention == "eager"), report["missing_keys"]


def in_transformers(place: Place, head: str, *, dtype: torch.dtype, attention: str, device: str | None) -> Side:
    """A checkpoint in `transformers`.

    Raises:
        MinibertError: `transformers` is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise MinibertError("parity needs the reference: pip install 'minibert[train]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = getattr(transformers, head).from_pretrained(place, dtype=dtype, attn_implementation=attention)
    name = f"{place} in transformers {transformers.__version__}, {str(dtype).removeprefix('torch.')}"
    return Side(name, model.to(device or "cpu").eval(), head)


def of_module(
    model: nn.Module, names: Names | None, *, dtype: torch.dtype, attention: str, device: str | None, head: str = ""
) -> Side:
    """A module as it is.

    Raises:
        MinibertError: it is on another device.
    """
    first = next(iter(model.parameters()), torch.empty(0))
    if device is not None and first.device.type != torch.device(device).type:
        raise MinibertError(f"device: the module is on {first.device}, move it to {device} first")
    known = type(model).__name__ if type(model).__name__ in MODELS else head
    engine = getattr(model, "engine", None)
    title = (
        f"{type(model).__module__.split('.')[0]}.{type(model).__name__}, {engine or str(dtype).removeprefix('torch.')}"
    )
    convert = None if engine or first.dtype == dtype else dtype
    return Side(title, model, known or "BertModel", names or Names(), attention == "eager", convert)


def share_missing(candidate: Side, reference: Side, missing: list[str]) -> None:
    """Gives both the same random numbers for what a checkpoint has in neither."""
    if missing:
        logger.warning("not in the checkpoint, so random, and the same in both: %s", few(missing))
        ours = candidate.parameters()
        theirs = reference.parameters()
        with torch.no_grad():
            for name in (name.removeprefix("bert.") for name in missing):
                theirs[name].copy_(ours[name])


def load_own(spec: str, place: Place, names: Names, weights: Mapping[str, Tensor]) -> nn.Module:
    """A user's model from `FILE.py:NAME`.

    A class is made with the checkpoint's config and filled with its weights, by name; a function is called with the
    checkpoint's place and gives the model with its weights.

    Raises:
        MinibertError: there is no such file or name, it gives no module, or its parameters are not the checkpoint's.
    """
    file, _, name = spec.rpartition(":")
    found = importlib.util.spec_from_file_location(Path(file).stem, file) if Path(file).suffix == ".py" else None
    if found is None or found.loader is None or not Path(file).is_file():
        raise MinibertError(f"module: expected FILE.py:NAME of a class or a function, got {spec}")
    code = importlib.util.module_from_spec(found)
    sys.path.insert(0, str(Path(file).resolve().parent))  # as when Python runs the file
    try:
        found.loader.exec_module(code)
    finally:
        sys.path.pop(0)
    maker = getattr(code, name, None)
    if not callable(maker):
        raise MinibertError(f"{file}: expected a class or a function {name!r}, there is none")
    is_class = inspect.isclass(maker)
    model = maker(BertConfig.from_pretrained(place) if is_class else os.fspath(place))
    if is_class and isinstance(model, nn.Module):
        _fill(model, names, weights)
    if not isinstance(model, nn.Module):
        raise MinibertError(f"{spec}: expected a torch.nn.Module, got {type(model).__name__}")
    return model.eval()


def _fill(model: nn.Module, names: Names, weights: Mapping[str, Tensor]) -> None:
    problems = []
    with torch.no_grad():
        for own, parameter in model.named_parameters(remove_duplicate=False):
            wanted = names.ours(own)
            absent = [name for name in wanted if name not in weights]
            if absent:
                problems.append(f"{own}: no {absent[0]} in the checkpoint")
                continue
            value = torch.cat([weights[name] for name in wanted]) if len(wanted) > 1 else weights[wanted[0]]
            if value.shape != parameter.shape:
                problems.append(f"{own}: {list(parameter.shape)}, in the checkpoint {list(value.shape)}")
            else:
                parameter.copy_(value)
    if problems:
        raise MinibertError(f"the module's parameters are not the checkpoint's: {few(problems, 6)}")


def config_of(side: Side) -> Any:
    """The model's config, if it has one with BERT's fields."""
    config = getattr(side.model, "config", None)
    return config if hasattr(config, "num_hidden_layers") else None
