"""The weights that training of the default model starts from: random, but heads look at their neighbours.

A BERT from nothing first has to find out which position lies beside which. It gets that for free: positions begin as
sinusoids (Vaswani et al., "Attention is all you need", 2017, section 3.5) in channels of their own, and the queries and
keys of some heads as the rotation of these that puts the peak of attention on the token a few places before or behind.
All of it is trained like any other weight; the architecture is BERT's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minibert import BertConfig, BertModel

# For each layer from the first, the places that its first heads look at.
OFFSETS = ((-1, 1, -2, 2, -3, 3), (-1, 1, -2, 2), (-1, 1), ())
SHARPNESS = 1.3  # of the peak; larger is sharper


def initial_model(config: BertConfig, seed: int) -> BertModel:
    """A model to start from."""
    torch.manual_seed(seed)
    model = BertModel(config)
    size = config.hidden_size // config.num_attention_heads
    frequencies = torch.logspace(math.log10(2 * math.pi / 200), math.log10(0.8 * math.pi), size // 2)
    embeddings = model.embeddings
    with torch.no_grad():
        angles = torch.arange(config.max_position_embeddings)[:, None] * frequencies
        scale = embeddings.word_embeddings.weight.std() * math.sqrt(2)
        embeddings.word_embeddings.weight[:, :size] = 0
        embeddings.position_embeddings.weight.zero_()
        embeddings.position_embeddings.weight[:, :size] = scale * _interleaved(angles.sin(), angles.cos())
        for layer, offsets in zip(model.encoder.layer, OFFSETS, strict=False):
            attention = layer.attention.self
            for head, offset in enumerate(offsets):
                rows = slice(head * size, (head + 1) * size)
                attention.query.weight[rows, :size] += SHARPNESS * _rotation(frequencies, offset)
                attention.key.weight[rows, :size] += SHARPNESS * torch.eye(size)
    return model


def _interleaved(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2)


def _rotation(frequencies: Tensor, offset: int) -> Tensor:
    """Turns (sin a, cos a) of each frequency, for a position, into those of the position `offset` further on."""
    blocks = []
    for angle in (offset * frequencies).tolist():
        blocks.append(torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]))
    return torch.block_diag(*blocks)
