"""What is compared: each takes a checkpoint directory and gives logits for a batch, at the best setting it has.

All but minibert's own are optional; one whose package is not installed says so and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minibert.bench.workloads import Batch
from minibert.config import BertConfig
from minibert.engine import optimize
from minibert.engine.onnx import ONNX_NAME
from minibert.export import export
from minibert.model.heads import BertForTokenClassification

Logits = npt.NDArray[np.float32]
Run = Callable[[Batch], Logits]


@dataclass(frozen=True)
class Setting:
    """A token-classification checkpoint, a folder for exported and converted models, and threads for every peer."""

    checkpoint: Path
    work: Path
    threads: int


def minibert_plain(setting: Setting) -> Run:
    """The plain model of minibert."""
    return _of_module(BertForTokenClassification.from_pretrained(setting.checkpoint, dtype=torch.float32))


def minibert_fp32(setting: Setting) -> Run:
    """minibert, optimized, in float32."""
    return _of_module(optimize(BertForTokenClassification.from_pretrained(setting.checkpoint, dtype=torch.float32)))


def minibert_int8(setting: Setting) -> Run:
    """minibert, optimized, in int8."""
    return _of_module(
        optimize(BertForTokenClassification.from_pretrained(setting.checkpoint, dtype=torch.float32), "int8")
    )


def transformers_eager(setting: Setting) -> Run:
    """transformers with its explicit attention."""
    return _of_module(_transformers(setting.checkpoint, "eager"))


def transformers_sdpa(setting: Setting) -> Run:
    """transformers with PyTorch's fused attention."""
    return _of_module(_transformers(setting.checkpoint, "sdpa"))


def transformers_compile(setting: Setting) -> Run:
    """The same through torch.compile, with its weights frozen into the graph."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    return _of_module(torch.compile(_transformers(setting.checkpoint, "sdpa"), dynamic=True))


def minibert_onnx(setting: Setting) -> Run:
    """minibert, exported and run by ONNX Runtime."""
    target = setting.work / "minibert-onnx"
    if not target.exists():
        export(setting.checkpoint, "onnx", target)
    return _of_session(target / ONNX_NAME, setting.threads)


def onnxruntime_fp32(setting: Setting) -> Run:
    """ONNX Runtime with attention, layer norm and GELU fused."""
    return _of_session(_fused_onnx(setting), setting.threads)


def onnxruntime_int8(setting: Setting) -> Run:
    """The same, quantized dynamically, weights by channel."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = setting.work / "model-int8.onnx"
    if not target.exists():
        quantize_dynamic(
            _fused_onnx(setting),
            target,
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"DefaultTensorType": 1},  # float32, which it cannot find out behind a fused node
        )
    return _of_session(target, setting.threads)


def openvino_fp32(setting: Setting) -> Run:
    """OpenVINO from the model's ONNX graph."""
    import openvino

    core = openvino.Core()
    settings = {
        "INFERENCE_NUM_THREADS": setting.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = core.compile_model(core.read_model(_onnx(setting)), "CPU", settings)

    def run(batch: Batch) -> Logits:
        result: Logits = compiled({"input_ids": batch.ids, "attention_mask": batch.mask})[0]
        return result

    return run


def ctranslate2_float32(setting: Setting) -> Run:
    """CTranslate2, which removes padding, too; it gives the encoder's output, and the head is applied behind it."""
    return _ctranslate2(setting, "float32")


def ctranslate2_int8(setting: Setting) -> Run:
    """The same in int8."""
    return _ctranslate2(setting, "int8")


PEERS: dict[str, Callable[[Setting], Run]] = {
    "minibert plain": minibert_plain,
    "minibert fp32": minibert_fp32,
    "minibert int8": minibert_int8,
    "minibert onnx": minibert_onnx,
    "transformers eager": transformers_eager,
    "transformers sdpa": transformers_sdpa,
    "transformers compile": transformers_compile,
    "onnxruntime fp32": onnxruntime_fp32,
    "onnxruntime int8": onnxruntime_int8,
    "openvino fp32": openvino_fp32,
    "ctranslate2 fp32": ctranslate2_float32,
    "ctranslate2 int8": ctranslate2_int8,
}
PACKAGES = ("torch", "transformers", "onnxruntime", "openvino", "ctranslate2")  # whose versions matter


def _of_module(model: Any) -> Run:
    def run(batch: Batch) -> Logits:
        # A mask that hides nothing is left out, as a careful user would: it costs some of them their fast path.
        mask = None if batch.mask.all() else torch.from_numpy(batch.mask)
        with torch.inference_mode():
            logits: Logits = model(torch.from_numpy(batch.ids), attention_mask=mask).logits.numpy()
        return logits

    return run


def _transformers(folder: Path, attention: str) -> Any:
    import transformers

    load = transformers.BertForTokenClassification.from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation=attention).eval()


def _onnx(setting: Setting) -> Path:
    """The graph of transformers' model with batch and length left open."""
    import onnx  # noqa: F401  # without which the exporter fails late

    target = setting.work / "model.onnx"
    if not target.exists():
        model = _transformers(setting.checkpoint, "eager")
        model.config.return_dict = False
        ids = torch.ones(2, 7, dtype=torch.long)
        axes = {0: "batch", 1: "length"}
        names = ["input_ids", "attention_mask"]
        torch.onnx.export(
            model,
            (ids, ids),
            str(target),
            input_names=names,
            output_names=["logits"],
            dynamic_axes=dict.fromkeys((*names, "logits"), axes),
            opset_version=17,
            dynamo=False,
        )
    return target


def _fused_onnx(setting: Setting) -> Path:
    from onnxruntime.transformers import optimizer

    target = setting.work / "model-fused.onnx"
    if not target.exists():
        config = BertConfig.from_pretrained(setting.checkpoint)
        fused = optimizer.optimize_model(
            str(_onnx(setting)),
            model_type="bert",
            num_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
        )
        fused.save_model_to_file(str(target))
    return target


def _of_session(path: Path, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [wanted.name for wanted in session.get_inputs()]

    def run(batch: Batch) -> Logits:
        given = {"input_ids": batch.ids, "attention_mask": batch.mask, "token_type_ids": np.zeros_like(batch.ids)}
        logits: Logits = session.run(["logits"], {name: given[name] for name in names})[0]
        return logits

    return run


def _ctranslate2(setting: Setting, kind: str) -> Run:
    import ctranslate2
    import transformers

    target = setting.work / f"ctranslate2-{kind}"
    model = _transformers(setting.checkpoint, "sdpa")
    if not target.exists():
        encoder = setting.work / "encoder"
        bert = transformers.BertModel.from_pretrained(setting.checkpoint, dtype=torch.float32)
        bert.config.position_embedding_type = "absolute"  # which the converter asks for, and transformers 5 left out
        bert.save_pretrained(encoder)
        words = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(5, model.config.vocab_size))])
        (encoder / "vocab.txt").write_text(words + "\n", encoding="utf-8")
        transformers.BertTokenizer(str(encoder / "vocab.txt")).save_pretrained(encoder)
        ctranslate2.converters.TransformersConverter(str(encoder)).convert(str(target), quantization=kind)
    encoder_of = ctranslate2.Encoder(str(target), intra_threads=setting.threads, inter_threads=1, compute_type=kind)
    head = model.classifier

    def run(batch: Batch) -> Logits:
        lengths = batch.mask.sum(1)
        rows = [row[:length].tolist() for row, length in zip(batch.ids, lengths, strict=True)]
        states = np.asarray(encoder_of.forward_batch(rows).last_hidden_state)
        with torch.inference_mode():
            logits: Logits = head(torch.from_numpy(states)).numpy()
        return logits

    return run
