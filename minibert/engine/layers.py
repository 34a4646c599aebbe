"""The parts of a BERT layer that hold its matrix products, with a kernel in place of each Linear.

Kernels are called by their `forward`: nobody listens to them, and 32 tokens in int8 are 9 ms, of which the calls of all
modules were 0.3 (EPYC, 2 threads).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minibert.engine.kernels import GELU, Kernel, joined
from minibert.model.activations import Activation
from minibert.model.attention import BertSelfAttention, is_slow_to_call
from minibert.model.embeddings import BertEmbeddings, check_ids
from minibert.model.encoder import BertEncoder, BertIntermediate, BertLayer, BertOutput
from minibert.model.packing import Packing


def begin_like(module: nn.Module, plain: nn.Module) -> None:
    """Begins a module with the settings of another one, and none of its parameters and parts."""
    nn.Module.__init__(module)
    vars(module).update({name: value for name, value in vars(plain).items() if not name.startswith("_")})


def norm_of(module: nn.LayerNorm) -> tuple[Any, ...]:
    """What `torch.layer_norm` wants to know."""
    return tuple(module.normalized_shape), module.weight, module.bias, module.eps


class FastEmbeddings(BertEmbeddings):
    """Positions and the first token type are one table, as long as nobody gives other ones."""

    def __init__(self, plain: BertEmbeddings) -> None:
        begin_like(self, plain)
        for name, part in plain.named_children():
            setattr(self, name, part)
        first_type = plain.token_type_embeddings.weight.select(0, 0)
        self._rows = plain.position_embeddings.weight + first_type  # (positions, C)
        self._norm = norm_of(plain.LayerNorm)
        self._parts = list(self.children())

    def forward(
        self,
        packing: Packing,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        """As in `BertEmbeddings`."""
        is_usual = inputs_embeds is token_type_ids is position_ids is None
        if input_ids is None or not is_usual or any(map(is_watched, self._parts)):
            return super().forward(packing, input_ids, token_type_ids, position_ids, inputs_embeds)
        self.check_length(packing)
        ids = packing.pack(input_ids)
        check_ids("input_ids", self.word_embeddings, ids, "vocab_size")
        words = F.embedding(ids.long(), self.word_embeddings.weight)
        if packing.lengths:
            positions = packing.positions(words.device).expand(packing.batch_size, -1)
            summed = words + self._rows.index_select(0, packing.pack(positions))
        else:
            rows = self._rows[: packing.seq_len]
            summed = (words.unflatten(0, (packing.batch_size, packing.seq_len)) + rows).flatten(0, 1)
        return torch.layer_norm(summed, *self._norm)


class FastSelfAttention(BertSelfAttention):
    """Query, key and value by one product; the attention itself is the plain model's, or the same by fewer calls."""

    def __init__(self, plain: BertSelfAttention, kernel: type[Kernel]) -> None:
        begin_like(self, plain)
        self.out_proj = nn.Identity()
        self.bias_k = self.bias_v = None
        self.qkv = kernel(*joined([plain.query, plain.key, plain.value]))

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.qkv(query).chunk(3, -1)  # of the same hidden states, all three
        return query, key, value

    def forward(  # type: ignore[override]  # the Hub's interface, not torch's
        self, hidden_states: Tensor, attention_mask: Tensor | Packing | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As in `BertSelfAttention`; behind the packing's tokens there may be spare ones, which see only themselves."""
        packing = attention_mask
        if (
            not isinstance(packing, Packing)
            or packing.mask is not None
            or output_attentions
            or self.attn_implementation == "varlen"
            or is_slow_to_call(hidden_states.device)
        ):
            return super().forward(hidden_states, attention_mask, output_attentions)
        product = self.qkv.forward(hidden_states)
        tokens, size = packing.tokens, self.embed_dim
        if packing.lengths or self.attn_implementation != "sdpa":
            query, key, value = product.chunk(3, -1)
            context, _ = self.attend_packed(query, key, value, packing.every_length)
        else:  # the same for rows of one length, by fewer calls
            shape = packing.batch_size, packing.seq_len, 3, self.num_heads, size // self.num_heads
            query, key, value = product[:tokens].view(shape).permute(2, 0, 3, 1, 4).unbind()  # (B, H, S, D) each
            context = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(tokens, size)
        if tokens < len(product):
            context = torch.cat([context, product[tokens:, 2 * size :]])  # attention to one token gives its value
        return context, None


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
        self._norm = norm_of(plain.LayerNorm)
        self._add = self.dense.add

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.layer_norm(self._add(x, residual), *self._norm)


class FastEncoder(BertEncoder):
    """The stack of layers, with a round number of tokens.

    oneDNN makes code for every number of rows that it meets, and keeps it: texts of 9 to 509 tokens, one at a time,
    took 1.1 GB for that, with rounding 0.2, and at each new number a moment. Some tokens go through a second time
    instead, as spare ones: 3 % at most, or less than 8.
    """

    def __init__(self, plain: BertEncoder) -> None:
        begin_like(self, plain)
        self.layer = plain.layer

    def forward(
        self, hidden_states: Tensor, packing: Packing, need_weights: bool = False, need_states: bool = False
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """As in `BertEncoder`."""
        tokens = len(hidden_states)
        spare = -tokens % rounding(tokens)
        if not 0 < spare <= tokens or packing.mask is not None or need_weights or need_states:
            return super().forward(hidden_states, packing, need_weights, need_states)
        result, _, _ = super().forward(torch.cat([hidden_states, hidden_states[:spare]]), packing)
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
        self._parts = [attention, attention.self, attention.output, self.intermediate, self.output]
        self._attend, self._project = attention.self.forward, attention.output.forward
        self._widen, self._narrow = self.intermediate.forward, self.output.forward

    def forward(self, hidden_states: Tensor, packing: Packing, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        if need_weights or any(map(is_watched, self._parts)):
            return super().forward(hidden_states, packing, need_weights)
        context, _ = self._attend(hidden_states, packing)
        attended = self._project(context, hidden_states)
        return self._narrow(self._widen(attended), attended), None


def is_watched(module: nn.Module) -> bool:
    """Whether a call of the module is more than its `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
