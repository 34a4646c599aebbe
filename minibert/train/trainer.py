"""`transformers.Trainer` with two ways to train for robustness: R-Drop, and adversarial word embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from minibert.text.alignment import IGNORED
from minibert.train.losses import symmetric_divergence


@dataclass(frozen=True)
class Attack:
    """The change of the word embeddings that the loss suffers most from, within a ball.

    With one step of `step_size` = `epsilon` this is the fast gradient method (FGM; Miyato et al., "Adversarial Training
    Methods for Semi-Supervised Text Classification", 2017), with several projected gradient descent (PGD; Madry et al.,
    "Towards Deep Learning Models Resistant to Adversarial Attacks", 2018), both on the rows of the table that a batch
    uses, as Chinese NER practitioners do. With several processes, the first direction is that of the gradient which
    they have accumulated together; else it is that of the batch alone.

    Args:
        steps: forward and backward passes besides the plain one.
        step_size: length of a step (Frobenius norm over the rows).
        epsilon: the ball's radius.
    """

    steps: int = 1
    step_size: float = 1.0
    epsilon: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.step_size <= 0 or self.epsilon <= 0:
            raise ValueError(f"expected at least one step and positive sizes, got {self}")


class RobustTrainer(transformers.Trainer):
    """`transformers.Trainer` with R-Drop and adversarial training.

    Args:
        r_drop: weight of R-Drop's divergence: every batch goes through the model twice, with two dropout masks, and
            what it says should agree (Liang et al., "R-Drop", 2021, equation 4; cross entropy is the mean of both).
        attack: with one, each batch is learnt with disturbed embeddings too, and the gradients of both are added.
        train_collator: makes the batches of training; default `data_collator`, which makes those of evaluation.
        **options: of `transformers.Trainer`.
    """

    def __init__(
        self,
        *,
        r_drop: float = 0.0,
        attack: Attack | None = None,
        train_collator: Callable[[Any], dict[str, Tensor]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.r_drop, self.attack = r_drop, attack
        self.train_collator = train_collator or self.data_collator

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As in Trainer, with the collator of training."""
        usual, self.data_collator = self.data_collator, self.train_collator
        try:
            loader: DataLoader[Any] = super().get_train_dataloader()
        finally:
            self.data_collator = usual
        return loader

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: int | Tensor | None = None,
    ) -> Any:
        """As in Trainer; in training, with R-Drop."""
        if not self.r_drop or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        rows = 1 if "sequence_lengths" in inputs else 0  # the dimension in which a sequence follows another
        twice = {name: torch.cat([value, value], dim=min(rows, value.dim() - 1)) for name, value in inputs.items()}
        count = (labels != IGNORED).sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss, outputs = super().compute_loss(model, twice, True, 2 * count)
        first, second = outputs["logits"].chunk(2, dim=rows)
        # Trainer multiplies the loss by the number of processes, over which gradients are averaged.
        scale = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        loss = loss + self.r_drop * scale * symmetric_divergence(first, second, labels) / count.clamp(min=1)
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: int | Tensor | None = None
    ) -> Tensor:
        """As in Trainer; then again with disturbed embeddings. Returns the plain loss."""
        if self.attack is None:
            plain: Tensor = super().training_step(model, dict(inputs), num_items_in_batch)
            return plain
        table = self.accelerator.unwrap_model(model).get_input_embeddings().weight
        rows = inputs["input_ids"].unique().to(table.device)
        is_alone = self.accelerator.num_processes == 1
        earlier = table.grad[rows] if is_alone and table.grad is not None else torch.zeros_like(table[rows])
        loss: Tensor = super().training_step(model, dict(inputs), num_items_in_batch)
        direction = table.grad[rows] - earlier
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = [parameter.grad for parameter in parameters]
        with _restored(table, rows) as original:
            for step in range(self.attack.steps):
                _move(table, rows, original, direction, self.attack)
                is_last = step == self.attack.steps - 1  # the one whose gradients count
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient if is_last else None
                super().training_step(model, dict(inputs), num_items_in_batch)
                direction = table.grad[rows]
        return loss


@contextmanager
def _restored(table: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Hands out what rows of a table hold, and puts it back."""
    original = table.detach()[rows].clone()
    try:
        yield original
    finally:
        with torch.no_grad():
            table[rows] = original


@torch.no_grad()
def _move(table: Tensor, rows: Tensor, original: Tensor, direction: Tensor, attack: Attack) -> None:
    """Moves rows in a direction, but not out of the ball."""
    length = direction.norm()
    if not length.isfinite() or length == 0:
        return
    moved = table[rows] - original + attack.step_size * direction / length
    table[rows] = original + moved * (attack.epsilon / moved.norm()).clamp(max=1)
