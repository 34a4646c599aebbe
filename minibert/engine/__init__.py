"""The same model, faster: an encoder whose weights are laid out for the processor, or rounded to int8.

The engine changes how, never what. It takes over the matrix products of the layers, which are nine tenths of the time;
everything else is the plain model's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import nn

from minibert.checkpoint.pages import let_go
from minibert.engine.graphs import GraphedEncoder
from minibert.engine.kernels import Kernel, PlainLinear, kernel_for
from minibert.engine.layers import FastEmbeddings, FastEncoder, FastLayer
from minibert.engine.memory import keep_freed_memory
from minibert.errors import MinibertError
from minibert.model.attention import fits_varlen
from minibert.model.encoder import BertEncoder, BertLayer, BertModel
from minibert.model.pretrained import BertPreTrainedModel

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("fp32", "int8", *HALF)
Model = TypeVar("Model", bound=BertPreTrainedModel)


def optimize(model: Model, precision: str = "fp32", threads: int | None = None) -> Model:
    """An inference model with the same `forward` and outputs, run by the fastest kernels there are here.

    Embeddings and heads are shared with `model`; the layers' weights are copies, so `model` may be let go. What comes
    back can neither be trained nor saved nor moved; `.engine` says what runs it.

    Args:
        model: a model of minibert in float32.
        precision: "fp32", within 1e-5 of the plain model; "int8" (CPU), weights in a quarter of the memory, with
            logits that move in the second digit, so measure what it does to your scores; "bf16" or "fp16", on a GPU.
        threads: CPU threads, of the whole process; default as PyTorch has it.

    Raises:
        MinibertError: an option that is none, or that this machine cannot do.
    """
    return _optimized(model, precision, threads, is_spent=False)


def optimize_spent(model: Model, precision: str) -> Model:
    """The same for a model as it came from its file, which nobody will use again: its memory is let go on the way."""
    return _optimized(model, precision, threads=None, is_spent=True)


def _optimized(model: Model, precision: str, threads: int | None, *, is_spent: bool) -> Model:
    check_precision(precision)
    if model.engine is not None:
        raise MinibertError(f"expected a plain model, got one that was optimized already ({model.engine})")
    if model.dtype != torch.float32:
        raise MinibertError(f"expected a model in float32, got {model.dtype}; load it with dtype=torch.float32")
    if threads is not None:
        set_threads(threads)
    fast = inference_copy(model)
    engine = _for_cpu(fast, precision, is_spent) if model.device.type == "cpu" else _for_gpu(fast, precision)
    for module in fast.modules():
        if isinstance(module, BertPreTrainedModel):
            module.engine = engine
    return fast


def _for_cpu(fast: BertPreTrainedModel, precision: str, is_spent: bool) -> str:
    """Gives a model other layers; returns what runs it."""
    if precision in HALF:
        raise MinibertError(f"precision {precision} is for a GPU; on a CPU take fp32, or int8 for speed")
    kernel = kernel_for(precision)
    if kernel is None:
        raise MinibertError(f"precision {precision}: PyTorch has no kernel for it on this processor; take fp32")
    keep_freed_memory()
    _replace_layers(fast, kernel, FastEncoder, is_spent)
    return f"{precision} by {kernel.name}"


def _for_gpu(fast: BertPreTrainedModel, precision: str) -> str:
    """The same for a GPU."""
    if precision == "int8":
        raise MinibertError("precision int8 is for a CPU; on a GPU take bf16 or fp16 for speed")
    if precision == "fp32":
        _replace_layers(fast, PlainLinear, None)
        return "fp32 by PyTorch"
    fast.to(HALF[precision])
    config = fast.config
    is_varlen = has_varlen(fast.device) and fits_varlen(config.hidden_size // config.num_attention_heads)
    fast.set_attn_implementation("varlen" if is_varlen else "sdpa")
    _replace_layers(fast, PlainLinear, GraphedEncoder if is_varlen else None)
    return f"{precision} by PyTorch, {attention_of(is_varlen)}"


def _replace_layers(
    fast: BertPreTrainedModel,
    kernel: type[Kernel],
    encoder_type: Callable[[BertEncoder], BertEncoder] | None,
    is_spent: bool = False,
) -> None:
    for model in [module for module in fast.modules() if isinstance(module, BertModel)]:
        for index, layer in enumerate(model.encoder.layer):
            assert isinstance(layer, BertLayer)
            weights = list(layer.parameters()) if is_spent else []
            model.encoder.layer[index] = FastLayer(layer, kernel)
            let_go(weights)
        model.embeddings = FastEmbeddings(model.embeddings)
        if encoder_type is not None:
            model.encoder = encoder_type(model.encoder)


def check_precision(precision: str) -> None:
    """Refuses a name that is none, which can be done before a model is loaded."""
    if precision not in PRECISIONS:
        raise MinibertError(f"precision: expected {', '.join(PRECISIONS)}, got {precision!r}")


def attention_of(is_varlen: bool) -> str:
    """What half precision runs on a GPU with or without the kernel, in words."""
    return "varlen attention, CUDA graphs" if is_varlen else "sdpa attention"


def has_varlen(device: torch.device) -> bool:
    """Whether attention over packed sequences is one kernel there: PyTorch has it, for Ampere GPUs and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return find_spec("torch.nn.attention.varlen") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def set_threads(threads: int) -> None:
    """CPU threads, of the whole process."""
    if threads < 1:
        raise MinibertError(f"threads: expected at least 1, got {threads}")
    torch.set_num_threads(threads)


def inference_copy(model: Model) -> Model:
    """The modules anew, the tensors shared, and no gradients."""
    tensors = {id(parameter): nn.Parameter(parameter.detach(), requires_grad=False) for parameter in model.parameters()}
    memo = {**tensors, **{id(buffer): buffer for buffer in model.buffers()}}
    return copy.deepcopy(model, memo).eval()
