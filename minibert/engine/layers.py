"""The parts of a BERT layer that hold its matrix products, with a kernel in place of each Linear."""

from __future__ import annotations

from torch import Tensor, nn

from minibert.engine.kernels import GELU, Kernel, joined
from minibert.model.activations import Activation
from minibert.model.attention import BertSelfAttention
from minibert.model.encoder import BertIntermediate, BertLayer, BertOutput


class FastSelfAttention(BertSelfAttention):
    """Query, key and value by one product; the attention itself is that of the plain model."""

    def __init__(self, plain: BertSelfAttention, kernel: type[Kernel]) -> None:
        nn.Module.__init__(self)
        settings = {name: value for name, value in vars(plain).items() if not name.startswith("_")}
        vars(self).update(settings)
        self.out_proj = nn.Identity()
        self.bias_k = self.bias_v = None
        self.qkv = kernel(*joined([plain.query, plain.key, plain.value]))

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.qkv(query).chunk(3, -1)  # of the same hidden states, all three
        return query, key, value


class FastIntermediate(nn.Module):
    """The wide half of the feed-forward network; GELU is part of the product."""

    def __init__(self, plain: BertIntermediate, kernel: type[Kernel]) -> None:
        super().__init__()
        activation = plain.intermediate_act_fn
        is_gelu = isinstance(activation, Activation) and activation.name in ("gelu", "gelu_python")
        self.dense = kernel(*joined([plain.dense]), GELU if is_gelu else None)
        self.activation = nn.Identity() if is_gelu else activation

    def forward(self, hidden_states: Tensor) -> Tensor:
        widened: Tensor = self.activation(self.dense(hidden_states))
        return widened


class FastOutput(nn.Module):
    """Projection and residual connection by one product, then normalisation."""

    def __init__(self, plain: BertOutput, kernel: type[Kernel]) -> None:
        super().__init__()
        self.dense = kernel(*joined([plain.dense]))
        self.LayerNorm = plain.LayerNorm

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense.add(x, residual))
        return normed


def take_over(layer: BertLayer, kernel: type[Kernel]) -> None:
    """Puts kernels in the place of a layer's Linears, whose weights are let go one after another."""
    attention = layer.attention
    attention.self = FastSelfAttention(attention.self, kernel)
    attention.output = FastOutput(attention.output, kernel)  # type: ignore[assignment]
    layer.intermediate = FastIntermediate(layer.intermediate, kernel)  # type: ignore[assignment]
    layer.output = FastOutput(layer.output, kernel)  # type: ignore[assignment]
