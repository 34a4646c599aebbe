"""The parts of a BERT layer as single nodes of an ONNX graph, of the domain in which ONNX Runtime has its fast ones.

These modules are for tracing only: they say what the graph is to hold, and compute nothing. The nodes are described in
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. Shapes: B sequences of S cells, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minibert.engine.kernels import joined
from minibert.errors import MinibertError
from minibert.model.attention import BertSelfAttention
from minibert.model.encoder import BertEncoder, BertLayer, BertOutput
from minibert.model.packing import Packing

LOWEST = torch.finfo(torch.float32).min  # instead of the node's own -10000, which a score may outweigh


class FusedSelfAttention(BertSelfAttention):
    """Projections and attention as one `Attention` node."""

    def __init__(self, plain: BertSelfAttention) -> None:
        nn.Module.__init__(self)
        self.num_heads = plain.num_heads
        weight, bias = joined([plain.query, plain.key, plain.value])
        self.weight = nn.Parameter(weight.t().contiguous(), requires_grad=False)  # (C, 3 C)
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]) if bias is None else bias, requires_grad=False)

    def forward(  # type: ignore[override]  # always within a model
        self, hidden_states: Tensor, packing: Packing, output_attentions: bool = False
    ) -> tuple[Tensor, None]:
        if output_attentions:
            raise MinibertError("output_attentions: a fused attention has no weights; export with portable=True")
        assert packing.mask is not None
        context: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::Attention",
            (
                hidden_states.unflatten(0, (packing.batch_size, packing.seq_len)),
                self.weight,
                self.bias,
                packing.mask[:, 0, 0].int(),  # (B, S), 1 = a real key
            ),
            {"num_heads": self.num_heads, "mask_filter_value": LOWEST},
            dtype=hidden_states.dtype,
            shape=(packing.batch_size, packing.seq_len, hidden_states.shape[-1]),
            version=1,
        )
        return context.flatten(0, 1), None


class FusedOutput(nn.Module):
    """Projection, then residual connection and normalisation as one `SkipLayerNormalization` node."""

    def __init__(self, plain: BertOutput) -> None:
        super().__init__()
        self.dense, self.LayerNorm = plain.dense, plain.LayerNorm

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.dense(x)
        normed: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::SkipLayerNormalization",
            (x, residual, self.LayerNorm.weight, self.LayerNorm.bias),
            {"epsilon": self.LayerNorm.eps},
            dtype=x.dtype,
            shape=x.shape,
            version=1,
        )
        return normed


def fuse(model: nn.Module) -> None:
    """Puts these parts into a model, in place of its own. GELU needs none: it is a node of ONNX as it is."""
    for encoder in (module for module in model.modules() if isinstance(module, BertEncoder)):
        for layer in encoder.layer:
            assert isinstance(layer, BertLayer)
            attention = layer.attention
            attention.self = FusedSelfAttention(attention.self)
            attention.output = FusedOutput(attention.output)  # type: ignore[assignment]
            layer.output = FusedOutput(layer.output)  # type: ignore[assignment]
