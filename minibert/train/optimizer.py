"""Which parameters learn how fast, and which decay."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

LAYER = re.compile(r"(?:^|\.)encoder\.layer\.(\d+)\.")


def parameter_groups(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    head_learning_rate: float | None = None,
) -> list[dict[str, Any]]:
    """Groups for an optimiser, each with `lr` and `weight_decay`; every trainable parameter is in just one.

    Biases and LayerNorm parameters do not decay (Devlin et al., "BERT", 2019, as in its code). With `layer_decay` d,
    the last layer learns at `learning_rate`, the one below at d times that, and so on down to the embeddings (Clark et
    al., "ELECTRA", 2020). What is neither layer nor embedding is the head, and learns at `head_learning_rate`, by
    default `learning_rate`.

    Args:
        model: any of the models, wrapped or not.
        learning_rate: of the last layer.
        weight_decay: of what decays.
        layer_decay: above 0 and at most 1.
        head_learning_rate: of the head.
    """
    layers = [int(match[1]) for name, _ in model.named_parameters() if (match := LAYER.search(name))]
    depth = max(layers, default=-1) + 1
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        match = LAYER.search(name)
        if match:
            rate = learning_rate * layer_decay ** (depth - 1 - int(match[1]))
        elif "embeddings." in name:
            rate = learning_rate * layer_decay**depth
        else:
            rate = learning_rate if head_learning_rate is None else head_learning_rate
        decay = 0.0 if name.endswith("bias") or "LayerNorm" in name else weight_decay
        group = groups.setdefault((rate, decay), {"params": [], "lr": rate, "weight_decay": decay})
        group["params"].append(parameter)
    return list(groups.values())
