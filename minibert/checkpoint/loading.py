"""Stored tensors into a model, whole or not at all."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minibert.checkpoint.files import SAFETENSORS_DTYPES, WeightFiles
from minibert.checkpoint.names import ADAPTER, CRF, OTHER_HEADS, POSITION_IDS, has_base, head_of, model_name, wrapper_of
from minibert.checkpoint.pages import let_go
from minibert.errors import CheckpointError

logger = logging.getLogger("minibert")
LOOKED_AT = 32_000_000  # bytes that are looked at before their pages are let go


class LoadingReport(dict[str, Any]):
    """What became of a checkpoint's tensors; printed, it is a summary.

    missing_keys and mismatched_keys were initialised, unexpected_keys (the file's names) were left out, and
    renamed_keys maps a file's name to the model's.
    """

    loaded: int = 0  # parameters and buffers taken from the file
    conversions: Mapping[str, int]  # how many went from which dtype to which
    not_finite: list[str]  # the file's names of tensors that hold NaN or infinite numbers

    def __str__(self) -> str:
        lines = [f"loaded {self.loaded} tensors"]
        lines += [f"converted {count} from {change}" for change, count in self.conversions.items()]
        for title, names in (
            ("initialised, not in the file", self["missing_keys"]),
            ("initialised, of another size in the file", self["mismatched_keys"]),
            ("left out, for other heads", self["unexpected_keys"]),
            ("renamed", [f"{old} to {new}" for old, new in self["renamed_keys"].items()]),
            ("NaN or infinite", self.not_finite),
        ):
            if names:
                lines.append(f"{title} ({len(names)}): {few(names)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """What a checkpoint has for a model, by the model's names; nothing has been read yet."""

    shapes: dict[str, tuple[int, ...]]  # of everything the model has
    wrapper: str  # what stands in front of every name of the file, left off here
    sources: dict[str, str]  # model name to file name
    missing: list[str]
    mismatched: list[str]
    unexpected: list[str]  # file names
    problems: dict[str, list[str]]  # what cannot be loaded, by kind
    fresh: list[str]  # every parameter of a head of which one is missing or of another size


def compare(
    model: nn.Module, files: WeightFiles, *, tied: Mapping[str, str], ignore_mismatched_sizes: bool = False
) -> Comparison:
    """Compares names, shapes and kinds of numbers. `tied` names parameters that stand for others."""
    stored = files.tensors
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrapper = wrapper_of(files.tensors)
    sources, unexpected = _match(files, wrapper, expected, tied)
    missing = [name for name in expected if name not in sources and name not in tied]
    mismatched = [name for name in expected if name in sources and stored[sources[name]].shape != expected[name]]
    own_heads = {head_of(name) for name in expected}
    new_heads = {head_of(name) for name in (*missing, *mismatched)}
    present = {head_of(name) for name in sources}
    problems = {
        "missing": [name for name in missing if head_of(name) is None or head_of(name) in present],
        "unexpected": [
            source for source, name in unexpected.items() if not OTHER_HEADS.match(name) or head_of(name) in own_heads
        ],
        "of another shape": [
            f"{name} ({list(stored[sources[name]].shape)} in the file, {list(expected[name])} in the model)"
            for name in mismatched
            if head_of(name) is None or not ignore_mismatched_sizes
        ],
        "not floating point": [
            f"{name} ({stored[source].dtype})" for name, source in sources.items() if stored[source].float_dtype is None
        ],
    }
    fresh = [name for name in expected if head_of(name) in new_heads and name not in tied]
    return Comparison(expected, wrapper, sources, missing, mismatched, list(unexpected), problems, fresh)


def load_weights(
    model: nn.Module,
    files: WeightFiles,
    *,
    tied: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device,
    ignore_mismatched_sizes: bool = False,
) -> tuple[LoadingReport, list[str]]:
    """Fills a model built on the meta device from the tensors of a checkpoint.

    Names are compared before a single value is read. Parameters that are to be initialised (a head that is not in
    the file, or of another size if that is allowed) are left empty, and named beside the report.

    Raises:
        CheckpointError: with every missing, unexpected and mis-shaped name.
    """
    found = compare(model, files, tied=tied, ignore_mismatched_sizes=ignore_mismatched_sizes)
    if any(found.problems.values()):
        raise _does_not_fit(files.path, type(model).__name__, found.problems)
    if found.wrapper:
        logger.warning("%s: every name begins with %s, which is left off", files.path, found.wrapper)
    if hasattr(model, "classifier") and any(CRF.match(name.removeprefix(found.wrapper)) for name in found.unexpected):
        logger.warning("%s: the CRF is left out; labels are those of the logits under it", files.path)
    fresh = set(found.fresh)
    state = {name: torch.empty(found.shapes[name], dtype=dtype, device=device) for name in fresh}
    conversions: Counter[str] = Counter()
    not_finite: list[str] = []
    looked_at: list[Tensor] = []
    for name, source in found.sources.items():
        if name not in fresh:
            stored = files.tensors[source]
            if stored.float_dtype != dtype:
                conversions[f"{stored.dtype} to {str(dtype).removeprefix('torch.')}"] += 1
            tensor = stored.read().to(dtype)
            if not is_finite(tensor):
                not_finite.append(f"{source} (in {dtype})" if is_finite(stored.read()) else source)
            state[name] = tensor.to(device)
            looked_at.append(tensor)
            if sum(tensor.nbytes for tensor in looked_at) > LOOKED_AT:
                let_go(looked_at)
                looked_at.clear()
    let_go(looked_at)
    if not_finite:
        logger.warning(
            "%s: NaN or infinite numbers in %s: results will be no numbers either", files.path, few(not_finite)
        )
    model.load_state_dict(state, strict=False, assign=True)
    report = LoadingReport(
        missing_keys=found.missing,
        unexpected_keys=found.unexpected,
        mismatched_keys=found.mismatched,
        renamed_keys={source: name for name, source in found.sources.items() if source != name},
    )
    report.loaded, report.conversions, report.not_finite = len(state) - len(fresh), conversions, not_finite
    return report, found.fresh


def is_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN and no infinity in a tensor; one pass over it, without a copy, in nearly all cases."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())  # a sum can overflow


def few(names: Sequence[str], most: int = 4) -> str:
    """The first names of a list, for a line of text."""
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def _does_not_fit(path: Path, model_name: str, problems: Mapping[str, list[str]]) -> CheckpointError:
    lines = [f"{path} does not fit {model_name}:"]
    for kind, names in problems.items():
        if names:
            lines.append(f"  - {kind} ({len(names)}): {few(names, 12)}")
    if problems["of another shape"]:
        lines.append(
            "  Correct the config (num_labels for a classifier), or start the head anew: ignore_mismatched_sizes=True"
        )
    if any(ADAPTER.search(name) for name in problems["unexpected"]):
        lines.append(
            "  There is an adapter in it; merge it into the weights (with PEFT: merge_and_unload) and save those"
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
    files: WeightFiles, wrapper: str, expected: Mapping[str, Any], tied: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Model name to file name for what the model has, and file name to model name for what is left over."""
    with_base = has_base(expected)
    sources: dict[str, str] = {}
    aliases: dict[str, str] = {}
    unexpected: dict[str, str] = {}
    for source in files.tensors:
        name = model_name(source.removeprefix(wrapper), has_base=with_base)
        if POSITION_IDS.search(name):
            continue
        if name in tied:
            aliases[tied[name]] = source
        elif name not in expected:
            unexpected[source] = name
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
