"""A model for other runtimes: an ONNX graph or a `torch.export` program, compared with the plain model first.

Shapes: B sequences of S cells, padded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import minibert
from minibert.checkpoint.files import PICKLE, SAFETENSORS
from minibert.checkpoint.saving import INDEX, TOKENIZER_FILES, copy_tokenizer
from minibert.config import SOURCE_OPTIONS, BertConfig
from minibert.engine import inference_copy
from minibert.engine.fused import fuse
from minibert.engine.onnx import CRF_NAME, CRF_PARTS, DATA_NAME, INPUTS, ONNX_NAME, Array, OnnxModel
from minibert.errors import CheckpointError, MinibertError, first_line
from minibert.hub import DEFAULT_MODEL, Source
from minibert.model.crf import BertCrfForTokenClassification
from minibert.model.heads import BertForTokenClassification, named_class
from minibert.model.pretrained import BertPreTrainedModel
from minibert.predict import TokenClassifier
from minibert.quiet import quiet
from minibert.writing import replacing

if TYPE_CHECKING:
    from minibert.train.data import Example

TARGETS = ("onnx", "torch")
PROGRAM_NAME = "model.pt2"
OPSET = 20  # the first in which GELU is one node
AXES = ("batch", "length")  # of every input; both are open
ONE_FILE = 1_900_000_000  # bytes: beyond 2 GB protobuf has no message, so the weights go into a file of their own
TOLERANCES = {"fp32": 1e-4, "int8": 0.35}  # largest difference; for int8, root mean square as a share of the output's
QUANTIZED = ("MatMul", "Attention")
REPLACED = frozenset({ONNX_NAME, DATA_NAME, PROGRAM_NAME, CRF_NAME, *TOKENIZER_FILES})
Run = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True)
class Difference:
    """An exported model from the plain one, on one batch and in one of its results."""

    batch: str
    result: str
    largest: float
    mean: float
    relative: float  # root mean square of the difference, as a share of that of the plain model's result

    def above(self, tolerance: float, precision: str) -> bool:
        """Whether it is too large; NaN is."""
        return not (self.relative if precision == "int8" else self.largest) <= tolerance

    def __str__(self) -> str:
        return f"{self.batch:32}{self.result:24}{self.largest:12.2e}{self.mean:12.2e}{self.relative:12.2e}"


def export(
    name_or_path: str | os.PathLike[str] | None,
    target: str,
    directory: str | os.PathLike[str],
    *,
    precision: str = "fp32",
    portable: bool = False,
    external_data: bool | None = None,
    tolerance: float | None = None,
    examples: Sequence[Example] | None = None,
    max_drop: float = 1.0,
    unmeasured: bool = False,
    report: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> list[Difference]:
    """Writes a checkpoint's model for another runtime, with config and tokeniser, if it computes the same.

    Args:
        name_or_path: as for `TokenClassifier`. The class is the one that its config names, with its CRF if it has one.
        target: "onnx" (`model.onnx`) or "torch" (`model.pt2`, for `torch.export.load`).
        directory: made if there is none; an older export in it goes.
        precision: "fp32"; or "int8" (onnx), which rounds the layers' weights, and not embeddings and head.
        portable: only standard ONNX operators, for other runtimes than ONNX Runtime; slower in that.
        external_data: whether to keep the weights in a file of their own; default if they are too large for one.
        tolerance: default 1e-4, the largest difference; with int8 0.35, the root mean square of the differences as a
            share of that of the plain model's output.
        examples: labelled text, on which F1 is measured before and after.
        max_drop: by how many points strict F1 may fall.
        unmeasured: accept int8 of a token classifier without `examples`.
        report: told line by line what was made and how far it is from the plain model.
        options: as in `hub.Source`.

    Raises:
        MinibertError: an option that is none; a package that is not installed; a difference above the tolerance, or a
            fall of F1: then nothing has been written.
        CheckpointError: the checkpoint cannot be loaded, lacks its head, or `directory` holds a checkpoint.
    """
    _check_options(target, precision, portable, options)
    folder = Path(directory)
    _refuse_checkpoint(folder)
    source = Source(os.fspath(DEFAULT_MODEL if name_or_path is None else name_or_path), **options)
    model = _load(source)
    tags = isinstance(model, BertForTokenClassification)
    if precision == "int8" and tags and examples is None and not unmeasured:
        raise MinibertError(
            "int8 changes the entities that are found: give labelled text to measure by how much (--evaluate FILE), or "
            "say that you measure it yourself (--unmeasured)"
        )
    if target == "onnx" and not portable and model.config.output_attentions:
        raise MinibertError(
            "output_attentions: a fused attention has no weights to give; export with portable=True (--portable), or "
            "set it to false in config.json"
        )
    with tempfile.TemporaryDirectory() as place:
        made = Path(place, "made")
        made.mkdir()
        if target == "torch":
            run = _made_program(model, made / PROGRAM_NAME)
        else:
            run = _made_graph(model, made, precision, portable, external_data)
            report(f"opset {OPSET}: {_described(count_nodes(made / ONNX_NAME))}")
        _complete(model, source, made)
        found = _compare(model, run, tolerance or TOLERANCES[precision], precision, report)
        if examples is not None:
            _measure(source, made, target, examples, max_drop, report)
        with replacing(folder, lambda: {name for name in REPLACED if (folder / name).exists()}) as write:
            for path in sorted(made.iterdir()):
                write(path.name, partial(shutil.move, path))
    return found


def _check_options(target: str, precision: str, portable: bool, options: Mapping[str, Any]) -> None:
    if target not in TARGETS:
        raise MinibertError(f"target: expected {', '.join(TARGETS)}, got {target!r}")
    if precision not in TOLERANCES:
        raise MinibertError(f"precision: expected {', '.join(TOLERANCES)}, got {precision!r}")
    if target == "torch" and (precision != "fp32" or portable):
        raise MinibertError("target torch: is written in fp32, and as portable as it gets; int8 is for onnx")
    unknown = options.keys() - set(SOURCE_OPTIONS)
    if unknown:
        raise MinibertError(f"expected options of hub.Source ({', '.join(SOURCE_OPTIONS)}), got {', '.join(unknown)}")
    if target == "onnx":
        _import("onnx", "onnxruntime", "onnxscript")


def _import(*names: str) -> None:
    import importlib

    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            raise MinibertError(f"export to ONNX needs {name}: pip install 'minibert[export]'") from None


def _refuse_checkpoint(folder: Path) -> None:
    """An export has a `config.json` of its own, which would take the place of the checkpoint's."""
    held = [name for name in (SAFETENSORS, INDEX, PICKLE) if (folder / name).exists()]
    if held:
        raise CheckpointError(f"{folder}: expected a directory for the export alone, but it holds {held[0]}")


def _load(source: Source) -> BertPreTrainedModel:
    """The plain model in float32 on the CPU, whole."""
    with source.unchanged():
        config = BertConfig.from_pretrained(source)
        name, kind = named_class(config)
        if kind is None:
            raise CheckpointError(f"{source}: expected a BERT of minibert in architectures, got {name}")
        if name == "BertForMultipleChoice":
            raise CheckpointError(f"{source}: {name} cannot be exported; its inputs have a third axis")
        if kind is BertForTokenClassification and config.extra.get("decoder") == "crf":
            kind = BertCrfForTokenClassification
        where = {option: getattr(source, option) for option in SOURCE_OPTIONS}
        model, found = kind.from_pretrained(source.name, dtype=torch.float32, output_loading_info=True, **where)
    if found["missing_keys"]:
        missing = ", ".join(found["missing_keys"])
        raise CheckpointError(f"{source}: {missing} not in this checkpoint; fine-tune it first")
    assert isinstance(model, BertPreTrainedModel)
    return model


# Writing.


def _made_program(model: BertPreTrainedModel, path: Path) -> Run:
    """A `torch.export` program in a file, and the function that runs what the file holds."""
    names = _result_names(model)
    with quiet():
        torch.export.save(_traced(_traceable(model)), path)
        loaded = torch.export.load(path).module()

    def run(batch: Mapping[str, Array]) -> dict[str, Array]:
        with torch.no_grad():
            results = loaded(*(torch.from_numpy(batch[name]) for name in INPUTS))
        return dict(zip(names, (tensor.numpy() for tensor in _flat(results)), strict=True))

    return run


def _made_graph(
    model: BertPreTrainedModel, made: Path, precision: str, portable: bool, external_data: bool | None
) -> Run:
    """An ONNX graph in a file, and the function that runs what the file holds."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if external_data is False and size > ONE_FILE:
        raise MinibertError(f"one file: {size:,} bytes of weights are more than an ONNX file of protobuf can hold")
    apart = size > ONE_FILE if external_data is None else external_data
    with quiet():
        if precision == "fp32":
            write_graph(model, made / ONNX_NAME, portable=portable, external_data=apart)
        else:
            before = made.parent / "fp32" / ONNX_NAME
            before.parent.mkdir()
            write_graph(model, before, portable=portable, external_data=size > ONE_FILE, precision=precision)
            _quantize(before, made / ONNX_NAME, apart)
    check_inputs(made / ONNX_NAME)
    model.saved_config().save_pretrained(made)
    exported = OnnxModel(made)
    return lambda batch: exported(**batch)


def write_graph(
    model: BertPreTrainedModel,
    path: Path,
    *,
    portable: bool = False,
    external_data: bool = False,
    precision: str = "fp32",
) -> None:
    """The graph of a model in float32, opset `OPSET`; the initializers have the names of the checkpoint.

    Unless it is to be `portable`, attention and normalisations are nodes that only ONNX Runtime knows.
    """
    traced = _traceable(model)
    if portable:
        traced.set_attn_implementation("eager")  # its graph is the simpler one
    else:
        fuse(traced)
    program = torch.onnx.export(
        _traced(traced),
        input_names=INPUTS,
        output_names=_result_names(model),
        dynamic_shapes=_open_axes(model.config),
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(
        minibert=minibert.__version__, architecture=type(model).__name__, precision=precision
    )
    program.save(path, external_data=external_data)


def _quantize(before: Path, path: Path, external_data: bool) -> None:
    """Weights of the layers in int8 by channel; activations are rounded as they come.

    To seven bits: processors without VNNI add two products of eight bits in 16, which may overflow.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(before, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer if ".layer." in tensor.name and len(tensor.dims) == 2}
    kept = [node.name for node in graph.node if not weights & set(node.input)]
    quantize_dynamic(
        before,
        path,
        op_types_to_quantize=QUANTIZED,
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=[*kept, *(f"{name}_MatMul" for name in kept)],  # what it makes of Gemm
        use_external_data_format=external_data,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},  # which it cannot find out behind a fused node
    )


def _traceable(model: BertPreTrainedModel) -> Any:
    """A copy that returns a plain tuple."""
    traced = inference_copy(model)
    config = model.config.replace(return_dict=False)
    for module in traced.modules():
        if isinstance(module, BertPreTrainedModel):
            module.config = config
    return traced


def _traced(model: BertPreTrainedModel) -> torch.export.ExportedProgram:
    """What the model computes, for any batch and any length that it has positions for."""
    try:
        with torch.no_grad():
            return torch.export.export(model, _example(model.config), dynamic_shapes=_open_axes(model.config))
    except Exception as error:  # whatever the tracer makes of code that it cannot read
        raise MinibertError(f"PyTorch {torch.__version__} cannot trace this model ({first_line(error)})") from error


def _example(config: BertConfig) -> tuple[Tensor, ...]:
    ids = torch.zeros(2, min(7, config.max_position_embeddings), dtype=torch.long)
    return ids, torch.ones_like(ids), torch.zeros_like(ids)


def _open_axes(config: BertConfig) -> dict[str, dict[int, Any]]:
    batch = torch.export.Dim(AXES[0], min=1)
    length = torch.export.Dim(AXES[1], min=1, max=config.max_position_embeddings)
    return {name: {0: batch, 1: length} for name in INPUTS}


def check_inputs(path: Path) -> None:
    """Refuses a graph whose inputs have other names than `INPUTS`, or axes that are not open.

    Raises:
        MinibertError: naming what there is instead.
    """
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    found = {
        given.name: tuple(axis.dim_param or axis.dim_value for axis in given.type.tensor_type.shape.dim)
        for given in graph.input
    }
    wanted = dict.fromkeys(INPUTS, AXES)
    if found != wanted:
        raise MinibertError(f"{path.name}: expected the inputs {_axes(wanted)}, got {_axes(found)}")


def _axes(inputs: Mapping[str, Sequence[object]]) -> str:
    return ", ".join(f"{name} ({', '.join(map(str, axes))})" for name, axes in inputs.items())


def count_nodes(path: Path) -> Counter[str]:
    """How many nodes of each kind an ONNX graph has; those of ONNX Runtime's own domain with it in front."""
    import onnx

    nodes = onnx.load(path, load_external_data=False).graph.node
    return Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes)


def _described(nodes: Counter[str]) -> str:
    wanted = ("Attention", "Normalization", "Gelu", "Gemm", "MatMulInteger")
    counts = [f"{count} {name}" for name, count in sorted(nodes.items()) if name.endswith(wanted)]
    return ", ".join([*counts, f"{sum(nodes.values())} nodes in all"])


def _complete(model: BertPreTrainedModel, source: Source, made: Path) -> None:
    """What a program needs besides: config with labels, tokeniser, CRF."""
    from safetensors.numpy import save_file

    model.saved_config().save_pretrained(made)
    copy_tokenizer(source, made)
    if isinstance(model, BertCrfForTokenClassification):
        save_file({f"crf.{part}": getattr(model.crf, part).detach().numpy() for part in CRF_PARTS}, made / CRF_NAME)


# Comparing.


def _flat(results: Collection[Any]) -> list[Tensor]:
    return [tensor for result in results for tensor in (result if isinstance(result, tuple) else (result,))]


def _result_names(model: BertPreTrainedModel) -> list[str]:
    """Names of the results; of a tuple's tensors with their number: `hidden_states.0`."""
    with torch.no_grad():
        results = model(*_example(model.config), return_dict=True)
    return [
        f"{name}.{place}" if isinstance(value, tuple) else name
        for name, value in results.items()
        for place in range(len(value) if isinstance(value, tuple) else 1)
    ]


def batches(config: BertConfig) -> Iterator[tuple[str, dict[str, Array]]]:
    """What is tried, by name: padding on the right and of a whole row, two segments, a single token, all positions."""
    random = np.random.default_rng(0)
    longest = config.max_position_embeddings

    def batch(lengths: Sequence[int], segments: int = 1) -> dict[str, Array]:
        cells = np.arange(max(lengths))
        ids = random.integers(0, config.vocab_size, (len(lengths), len(cells)))
        mask = (cells < np.array(lengths)[:, None]).astype(np.int64)
        types = np.broadcast_to(cells * min(segments, config.type_vocab_size) // len(cells), ids.shape)
        return dict(zip(INPUTS, (ids, mask, np.ascontiguousarray(types).astype(np.int64)), strict=True))

    some = min(20, longest)
    yield "padded", batch([some, max(1, some // 3), 0])
    yield "two segments", batch([some, max(1, some - 5)], segments=2)
    yield "length 1", batch([1])
    yield "maximum length", batch([longest, max(1, longest // 2)], segments=2)


def _compare(
    model: BertPreTrainedModel, run: Run, tolerance: float, precision: str, report: Callable[[str], object]
) -> list[Difference]:
    report(f"{'':56}{'largest':>12}{'mean':>12}{'relative':>12}")
    names = _result_names(model)
    found = []
    for batch_name, batch in batches(model.config):
        with torch.inference_mode():
            plain = _flat(model(*(torch.from_numpy(batch[name]) for name in INPUTS), return_dict=False))
        results = run(batch)
        where = f"{batch_name} {tuple(batch[INPUTS[0]].shape)}"
        for name, expected in zip(names, plain, strict=True):
            found.append(_difference(where, name, results[name], expected.numpy()))
            report(str(found[-1]) + f"  above {tolerance:g}" * found[-1].above(tolerance, precision))
    wrong = [difference for difference in found if difference.above(tolerance, precision)]
    if wrong:
        worst = wrong[0]
        raise MinibertError(
            f"the exported model differs from the plain one: {worst.result} on {worst.batch} by {worst.largest:.2e} "
            f"(relative {worst.relative:.2e}), tolerance {tolerance:g}; nothing was written"
        )
    return found


def _difference(batch: str, name: str, ours: Array, plain: Array) -> Difference:
    if ours.shape != plain.shape:
        raise MinibertError(f"the exported model gives {name} of shape {ours.shape} on {batch}, not {plain.shape}")
    distance = np.abs(ours.astype(np.float64) - plain)
    size = max(float(np.sqrt((plain.astype(np.float64) ** 2).mean())), 1e-12)
    return Difference(
        batch, name, float(distance.max()), float(distance.mean()), float(np.sqrt((distance**2).mean())) / size
    )


def _measure(
    source: Source,
    made: Path,
    target: str,
    examples: Sequence[Example],
    max_drop: float,
    report: Callable[[str], object],
) -> None:
    """Strict F1 of the plain model and of the exported one."""
    from minibert.train.evaluate import evaluate

    if target != "onnx":
        raise MinibertError("F1 is measured with ONNX Runtime; expected target onnx")
    where = {option: getattr(source, option) for option in SOURCE_OPTIONS}
    pair = (
        TokenClassifier.from_pretrained(source.name, device="cpu", **where),
        TokenClassifier.from_pretrained(made, engine="onnx"),
    )
    before, after = (100 * evaluate(classifier, examples).scores["strict"]["micro"]["f1"] for classifier in pair)
    report(f"strict F1: plain {before:.2f}, exported {after:.2f}, a change of {after - before:+.2f} points")
    if not before - after <= max_drop:
        raise MinibertError(
            f"F1 fell by {before - after:.2f} points, more than {max_drop:g} (--max-drop); nothing was written"
        )
