"""The parts of a BERT layer that hold its matrix products, with a kernel in place of each Linear.

Kernels are called by their `forward`: nobody listens to them, and 32 tokens in int8 are 9 ms, of which the calls of all
modules were 0.3 (EPYC, 2 threads).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from minibert.engine.kernels import GELU, Kernel, joined
from minibert.model.activations import Activation
from minibert.model.attention import BertSelfAttention
from minibert.model.encoder import BertEncoder, BertIntermediate, BertLayer, BertOutput
from minibert.model.packing import Packing


def begin_like(module: nn.Module, plain: nn.Module) -> None:
    """Begins a module with the settings of another one, and none of its parameters and parts."""
    nn.Module.__init__(module)
    vars(module).update({name: value for name, value in vars(plain).items() if not name.startswith("_")})


class FastSelfAttention(BertSelfAttention):
    """Query, key and value by one product; the attention itself is that of the plain model."""

    def __init__(self, plain: BertSelfAttention, kernel: type[Kernel]) -> None:
        begin_like(self, plain)
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
        self.activation = None if is_gelu else activation

    def forward(self, hidden_states: Tensor) -> Tensor:
        widened = self.dense.forward(hidden_states)
        if self.activation is not None:
            widened = self.activation(widened)
        return widened


class FastOutput(nn.Module):
    """Projection and residual connection by one product, then normalisation."""

    def __init__(self, plain: BertOutput, kernel: type[Kernel]) -> None:
        super().__init__()
        self.dense = kernel(*joined([plain.dense]))
        self.LayerNorm = plain.LayerNorm

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        norm = self.LayerNorm
        return torch.layer_norm(self.dense.add(x, residual), norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class FastEncoder(BertEncoder):
    """The stack of layers; packed tokens are made a round number.

    oneDNN makes code for every number of rows that it meets and keeps it: a stream of texts took 300 MB for that, and
    at each new number a moment. Some tokens go through a second time instead, as a sequence of their own: 3 % at most,
    and less than 16.
    """

    def __init__(self, plain: BertEncoder) -> None:
        begin_like(self, plain)
        self.layer = plain.layer

    def forward(
        self, hidden_states: Tensor, packing: Packing, need_weights: bool = False, need_states: bool = False
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """As in `BertEncoder`."""
        tokens = len(hidden_states)
        spare = -tokens % rounding(tokens) if packing.lengths and not (need_weights or need_states) else 0
        if not 0 < spare <= tokens:
            return super().forward(hidden_states, packing, need_weights, need_states)
        rounded = replace(packing, lengths=[*packing.lengths, spare], _made={})
        result, _, _ = super().forward(torch.cat([hidden_states, hidden_states[:spare]]), rounded)
        return result[:tokens], [], []


def rounding(tokens: int) -> int:
    """8, or the power of two that is between a 32nd and a 64th of the tokens."""
    return int(max(8, 1 << max(0, tokens.bit_length() - 6)))


class FastLayer(BertLayer):
    """Attention and feed-forward network, with kernels in place of the Linears.

    The plain layer's weights are let go one after another.
    """

    def __init__(self, plain: BertLayer, kernel: type[Kernel]) -> None:
        begin_like(self, plain)
        attention = self.attention = plain.attention
        attention.self = FastSelfAttention(attention.self, kernel)
        attention.output = FastOutput(attention.output, kernel)  # type: ignore[assignment]
        self.intermediate = FastIntermediate(plain.intermediate, kernel)  # type: ignore[assignment]
        self.output = FastOutput(plain.output, kernel)  # type: ignore[assignment]
