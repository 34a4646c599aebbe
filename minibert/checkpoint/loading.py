"""Stored tensors into a model, whole or not at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minibert.checkpoint.files import SAFETENSORS_DTYPES, WeightFiles
from minibert.checkpoint.names import OTHER_HEADS, POSITION_IDS, head_of, model_name, wrapper_of
from minibert.errors import CheckpointError

logger = logging.getLogger("minibert")


def load_weights(
    model: nn.Module,
    files: WeightFiles,
    *,
    tied: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device,
    ignore_mismatched_sizes: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """Fills a model built on the meta device from the tensors of a checkpoint.

    Names are compared before a single value is read. Parameters that are to be initialised (a head that is not in
    the file, or of another size if that is allowed) are left empty. `tied` names parameters that stand for others.

    Returns:
        A report (missing_keys, unexpected_keys, mismatched_keys, renamed_keys: file name to model name) and the
        names left empty: every parameter of a head of which one was missing or of another size.

    Raises:
        CheckpointError: with every missing, unexpected and mis-shaped name.
    """
    stored = files.tensors
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    sources, unexpected = _match(files, expected, tied)
    missing = [name for name in expected if name not in sources and name not in tied]
    mismatched = [name for name, source in sources.items() if stored[source].shape != expected[name]]
    new_heads = {head_of(name) for name in (*missing, *mismatched)}
    present = {head_of(name) for name in sources}
    problems = {
        "missing": [name for name in missing if head_of(name) is None or head_of(name) in present],
        "unexpected": [name for name in unexpected if not OTHER_HEADS.match(name)],
        "of another shape": [
            f"{name} ({list(stored[sources[name]].shape)} in the file, {list(expected[name])} in the model)"
            for name in mismatched
            if head_of(name) is None or not ignore_mismatched_sizes
        ],
        "not floating point": [
            f"{name} ({stored[source].dtype})" for name, source in sources.items() if stored[source].float_dtype is None
        ],
    }
    if any(problems.values()):
        raise _does_not_fit(files.path, type(model).__name__, problems)
    fresh = [name for name in expected if head_of(name) in new_heads and name not in tied]
    state = {name: stored[source].read().to(device, dtype) for name, source in sources.items() if name not in fresh}
    state |= {name: torch.empty(expected[name], dtype=dtype, device=device) for name in fresh}
    model.load_state_dict(state, strict=False, assign=True)
    report = {
        "missing_keys": missing,
        "unexpected_keys": unexpected,
        "mismatched_keys": mismatched,
        "renamed_keys": {source: name for name, source in sources.items() if source != name},
    }
    return report, fresh


def _does_not_fit(path: Path, model_name: str, problems: Mapping[str, list[str]]) -> CheckpointError:
    lines = [f"{path} does not fit {model_name}:"]
    for kind, names in problems.items():
        if names:
            more = f", and {len(names) - 12} more" if len(names) > 12 else ""
            lines.append(f"  - {kind} ({len(names)}): {', '.join(names[:12])}{more}")
    if problems["of another shape"]:
        lines.append(
            "  Correct the config (num_labels for a classifier), or start the head anew: ignore_mismatched_sizes=True"
        )
    return CheckpointError("\n".join(lines))


def resolve_dtype(
    dtype: str | torch.dtype, config_dtype: str | None, files: WeightFiles, device: torch.device
) -> torch.dtype:
    """The dtype to load in; "auto" is the config's, else the file's, but float32 where the CPU cannot do half.

    Raises:
        CheckpointError: not a floating dtype's name.
    """
    if dtype != "auto":
        known = {str(known).removeprefix("torch."): known for known in SAFETENSORS_DTYPES.values()}
        name = str(dtype).removeprefix("torch.")
        if name not in known:
            raise CheckpointError(f"dtype: expected auto, {', '.join(known)}, got {dtype}")
        return known[name]
    stored = (tensor.float_dtype for tensor in files.tensors.values() if tensor.float_dtype is not None)
    chosen: torch.dtype = getattr(torch, config_dtype) if config_dtype else next(stored, torch.float32)
    if device.type == "cpu" and chosen in (torch.float16, torch.bfloat16) and not _cpu_has(chosen):
        logger.warning("this CPU has no arithmetic for %s; the model is loaded in float32", chosen)
        return torch.float32
    return chosen


def _cpu_has(dtype: torch.dtype) -> bool:
    """Whether PyTorch has kernels for this half precision here; without, it is tens of times slower than float32."""
    probe = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, probe)()) if hasattr(torch.ops.mkldnn, probe) else False


def _match(
    files: WeightFiles, expected: Mapping[str, Any], tied: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Model name to file name for what the model has, and the file names that are left over."""
    wrapper = wrapper_of(files.tensors)
    if wrapper:
        logger.warning("%s: every name begins with %s, which is left off", files.path, wrapper)
    sources: dict[str, str] = {}
    aliases: dict[str, str] = {}
    unexpected = []
    for source in files.tensors:
        name = model_name(source.removeprefix(wrapper), expected)
        if POSITION_IDS.search(name):
            continue
        if name in tied:
            aliases[tied[name]] = source
        elif name not in expected:
            unexpected.append(source)
        elif name in sources:
            raise CheckpointError(f"{files.path}: {sources[name]} and {source} are both {name}; keep one of them")
        else:
            sources[name] = source
    for name, source in aliases.items():
        original = sources.setdefault(name, source)  # either may be stored without the other
        if original != source and not torch.equal(files.tensors[original].read(), files.tensors[source].read()):
            raise CheckpointError(
                f"{files.path}: {source} differs from {original}, but the config ties them (tie_word_embeddings); "
                "pass tie_word_embeddings=False to load both"
            )
    return sources, unexpected
