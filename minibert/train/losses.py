"""Losses beside cross entropy for labels of uneven frequency, which most named-entity data have.

Each is a sum over labelled tokens divided by their number in the whole step, so that accumulated batches add up to
one large batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minibert.errors import ConfigError
from minibert.model.heads import at_least_one, widen
from minibert.text.alignment import IGNORED
from minibert.text.labels import LabelSet
from minibert.train.recipe import LOSSES


@dataclass(frozen=True)
class TokenLoss:
    """A loss for `transformers.Trainer(compute_loss_func=...)`.

    Args:
        kind: "cross_entropy"; "focal": cross entropy times (1 - p)^gamma, so that easy tokens weigh little (Lin et al.,
            "Focal Loss for Dense Object Detection", 2017, equation 4); "dice": one minus the soft dice coefficient of
            each token and class, p against 0 or 1, summed over classes (Li et al., "Dice Loss for Data-imbalanced NLP
            Tasks", 2020, equation 12, with a smoothing term of 1).
        class_weights: one for each label; a token's loss is multiplied by that of its gold label.
        label_smoothing: the share of probability that cross entropy spreads over all labels.
        focal_gamma: the exponent of the focal loss.
        dice_alpha: the exponent of the factor (1 - p)^alpha on p, with which easy tokens weigh less. The best p is then
            1 / (1 + alpha) instead of 1.
    """

    kind: str = "cross_entropy"
    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    focal_gamma: float = 2.0
    dice_alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise ConfigError(f"loss: expected {', '.join(LOSSES)}, got {self.kind!r}")

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: int | Tensor | None = None) -> Tensor:
        """The loss of `outputs["logits"]` (..., K) against labels (...) with -100 for none, in float32 at least.

        Divided by `num_items_in_batch`, by default the number of labelled tokens; 0.0 with zero gradients without any.
        """
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        labels = labels.to(logits.device)
        labelled = labels != IGNORED
        logits, labels = logits[labelled], labels[labelled]  # (N, K), (N,)
        total = self.of_tokens(logits, labels).sum() + logits.sum() * 0.0
        divisor = labelled.sum() if num_items_in_batch is None else num_items_in_batch
        loss: Tensor = total / at_least_one(divisor)
        return loss

    def of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(N,) losses of logits (N, K) against labels (N,)."""
        logits = widen(logits)
        if self.kind == "dice":
            gold = F.one_hot(labels, logits.shape[1])
            p = logits.softmax(-1)
            p = p * (1 - p) ** self.dice_alpha
            losses = (1 - (2 * p * gold + 1) / (p + gold + 1)).sum(-1)
        else:
            losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)
            if self.kind == "focal":
                p = logits.softmax(-1).gather(1, labels[:, None])[:, 0]
                losses = losses * (1 - p) ** self.focal_gamma
        if self.class_weights is not None:
            losses = losses * torch.tensor(self.class_weights, dtype=losses.dtype, device=losses.device)[labels]
        return losses


def weights_of_labels(weights: Mapping[str, float], labels: LabelSet) -> tuple[float, ...]:
    """One weight a label from those of labels and types; a label's own comes before its type's, and 1.0 is the default.

    Raises:
        ConfigError: a name that is neither, or a weight that is not positive.
    """
    known = {*labels.names, *labels.entity_types}
    wrong = [name for name in weights if name not in known]
    if wrong:
        names = ", ".join(labels.names)
        raise ConfigError(f"class_weights: {', '.join(wrong)}: neither label nor type; the labels are {names}")
    if not all(weight > 0 for weight in weights.values()):
        raise ConfigError(f"class_weights: expected positive numbers, got {dict(weights)}")
    return tuple(
        float(weights.get(name, weights.get(kind, 1.0) if kind else 1.0))
        for name, kind in zip(labels.names, labels.types, strict=True)
    )


def symmetric_divergence(logits: Tensor, others: Tensor, labels: Tensor) -> Tensor:
    """Half of KL(p || q) + KL(q || p), summed over labelled tokens, from logits (B, S, K) of p and of q."""
    labelled = labels != IGNORED
    p, q = (x[labelled].float().log_softmax(-1) for x in (logits, others))
    return ((p.exp() - q.exp()) * (p - q)).sum() / 2
