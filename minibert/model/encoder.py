"""The BERT encoder (https://arxiv.org/abs/1810.04805), from one layer to `BertModel`.

Shapes: B sequences of S cells, T packed tokens, C hidden channels, H heads. Parameter names are the Hub's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minibert.config import BertConfig
from minibert.errors import MinibertError
from minibert.model.activations import activation
from minibert.model.attention import BertSelfAttention
from minibert.model.embeddings import BertEmbeddings
from minibert.model.outputs import BaseModelOutput
from minibert.model.packing import Packing, is_tracing
from minibert.model.pretrained import BertPreTrainedModel, warn_of_unmasked_padding


class BertOutput(nn.Module):
    """Ends both halves of a layer: projection, dropout, residual connection, normalisation."""

    def __init__(self, config: BertConfig, in_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual)
        return normed


class BertAttention(nn.Module):
    """First half of a layer: self-attention and its output."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertOutput(config, config.hidden_size)

    def forward(self, hidden_states: Tensor, packing: Packing, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        context, weights = self.self(hidden_states, packing, need_weights)
        return self.output(context, hidden_states), weights


class BertIntermediate(nn.Module):
    """The wide part of the feed-forward network."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = activation(config.hidden_act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        widened: Tensor = self.intermediate_act_fn(self.dense(hidden_states))
        return widened


class BertLayer(nn.Module):
    """Self-attention, then feed-forward, each with residual connection and post-normalisation."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, config.intermediate_size)

    def forward(self, hidden_states: Tensor, packing: Packing, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.attention(hidden_states, packing, need_weights)
        return self.output(self.intermediate(attended), attended), weights


class BertEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.checkpoint_every = 0  # n > 0: every n-th layer keeps no activations and is run again in the backward pass
        self.checkpoint_kwargs: dict[str, Any] = {}

    def forward(
        self, hidden_states: Tensor, packing: Packing, need_weights: bool = False, need_states: bool = False
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The last hidden states (T, C); if needed, those before the first and after every layer, and the weights."""
        states = [hidden_states] if need_states else []
        attentions = []
        for index, layer in enumerate(self.layer):
            if self.training and self.checkpoint_every and index % self.checkpoint_every == 0:
                hidden_states, weights = checkpoint(
                    layer, hidden_states, packing, need_weights, **self.checkpoint_kwargs
                )
            else:
                hidden_states, weights = layer(hidden_states, packing, need_weights)
            if need_states:
                states.append(hidden_states)
            if need_weights:
                attentions.append(weights)
        return hidden_states, states, attentions


class BertPooler(nn.Module):
    """A sequence's first token through a dense layer and tanh."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_tokens: Tensor) -> Tensor:
        return torch.tanh(self.dense(first_tokens))


@dataclass(frozen=True)
class PackedOutput:
    """What `BertModel` hands to a task head: tokens still packed (T, C), and everything else as users get it."""

    tokens: Tensor
    packing: Packing
    pooler_output: Tensor | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class BertModel(BertPreTrainedModel):
    """The encoder without a task head.

    Args:
        config: sizes and settings.
        add_pooling_layer: whether to have the pooler over the first token.
    """

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        sequence_lengths: Tensor | None = None,
        packed: bool = False,
    ) -> BaseModelOutput | tuple[Tensor, ...] | PackedOutput:
        """Encodes a batch.

        Args:
            input_ids: (B, S) integers below vocab_size; or give `inputs_embeds` instead.
            attention_mask: None, (B, S) with 1 for real tokens, or one of the other forms of `Packing.from_mask`.
            token_type_ids: (B, S), default 0.
            position_ids: (B, S) or (S,), default 0 to S - 1 from the first cell, padding or not.
            inputs_embeds: (B, S, C), used in place of the word embeddings.
            output_attentions: also return every layer's weights (B, H, S, S), by the explicit attention.
            output_hidden_states: also return the embeddings and every layer's output, (B, S, C) each.
            return_dict: False for a plain tuple; default as in the config.
            sequence_lengths: (N,) if the input is one row, (1, S), in which N sequences of so many tokens lie one
                behind another, with no padding; none attends to another, positions start anew in each, and
                pooler_output is (N, C). Without `attention_mask`.
            packed: leave tokens packed, as the task heads want them.

        Returns:
            last_hidden_state (B, S, C) and pooler_output (B, C); then hidden_states and attentions if asked for.
            Everything at padded positions is 0. The pooler takes each sequence's first real token.

        Raises:
            MinibertError: inputs that do not fit the model or each other.
        """
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise MinibertError(f"expected either input_ids or inputs_embeds, got {given}")
        batch_size, seq_len = self._check_inputs(input_ids, inputs_embeds)
        if sequence_lengths is None:
            packing = Packing.from_mask(attention_mask, batch_size, seq_len, config.num_attention_heads)
        elif attention_mask is None and not is_tracing():
            packing = Packing.from_lengths(sequence_lengths, batch_size, seq_len)
        else:
            raise MinibertError("sequence_lengths: go without an attention_mask, and cannot be traced")
        if attention_mask is None and input_ids is not None and not is_tracing():
            warn_of_unmasked_padding(input_ids, config.pad_token_id)
        embedded = self.embeddings(packing, input_ids, token_type_ids, position_ids, inputs_embeds)
        need_weights = config.output_attentions if output_attentions is None else output_attentions
        need_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        tokens, states, weights = self.encoder(embedded, packing, need_weights, need_states)
        output = PackedOutput(
            tokens,
            packing,
            pooler_output=None if self.pooler is None else self.pooler(packing.first_tokens(tokens)),
            hidden_states=tuple(packing.unpack(state) for state in states) if need_states else None,
            attentions=tuple(weights) if need_weights else None,
        )
        if packed:
            return output
        return self.result(
            BaseModelOutput(
                last_hidden_state=packing.unpack(tokens) if output.hidden_states is None else output.hidden_states[-1],
                pooler_output=output.pooler_output,
                hidden_states=output.hidden_states,
                attentions=output.attentions,
            ),
            return_dict,
        )

    def _check_inputs(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
        if input_ids is not None:
            if input_ids.dim() != 2:
                raise MinibertError(f"input_ids: expected shape (batch, sequence), got {tuple(input_ids.shape)}")
            return input_ids.shape[0], input_ids.shape[1]
        assert inputs_embeds is not None
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
            wanted = f"(batch, sequence, {self.config.hidden_size})"
            raise MinibertError(f"inputs_embeds: expected shape {wanted}, got {tuple(inputs_embeds.shape)}")
        return inputs_embeds.shape[0], inputs_embeds.shape[1]
