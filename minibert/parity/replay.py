"""BERT's formulas once more, one function a point, in float64: to ask what a value would be if one of them were wrong.

Written for that question alone: on padded cells, from what was recorded and the reference's parameters.
Shapes: B sequences of S cells, C channels in H heads of D, T real tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minibert.model.activations import activation
from minibert.parity.batches import Batch
from minibert.parity.tracing import Trace


@dataclass
class Evidence:
    """What is known when a point has failed: both runs, the reference's parameters and config, and the batch."""

    batch: Batch
    config: Any
    candidate: Trace
    reference: Trace
    parameters: Mapping[str, Tensor]
    head: str
    own_parameters: Mapping[str, Tensor] = field(default_factory=dict)  # the candidate's

    def cells(self, name: str) -> Tensor | None:
        """A recorded value as (B, S, ...) or (B, H, S, S), or as it is: the candidate's, else the reference's.

        A candidate without padding has its real tokens at their places among the reference's padding, or among zeros.
        """
        if name in self.candidate.cells:
            return self.candidate.cells[name].double()
        value, padded = self.candidate.values.get(name), self.reference.cells.get(name)
        if value is None:
            return None
        real = self.batch.real
        if value.shape[0] != int(real.sum()) or name == "pooler":
            return value.double()
        cells = value.new_zeros(*real.shape, *value.shape[1:]) if padded is None else padded.to(value.dtype).clone()
        cells[real] = value
        return cells.double()


Formula = Callable[["Replay"], Tensor]


class Replay:
    """Values computed for one target, with one formula changed.

    Args:
        evidence: recorded values are taken for everything but the target, so that only what lies between is computed.
        target: the point that is asked for, never taken as recorded.
        change: a point's name, and the formula in place of its own.
    """

    def __init__(self, evidence: Evidence, target: str, change: tuple[str, Formula] | None = None) -> None:
        self.evidence, self.target, self.change = evidence, target, change
        self.config, self.batch = evidence.config, evidence.batch
        self.needed: list[str] = []  # points that were computed, in order

    def result(self) -> Tensor:
        """The target, over real tokens (T, ...) or as it is."""
        value = self.value(self.target)
        if self.target.endswith(".scores"):
            value = value.transpose(1, 2)
        return value[self.batch.real] if value.shape[:2] == self.batch.real.shape else value

    def value(self, name: str) -> Tensor:
        """A point's value: as recorded, or by its formula."""
        if name != self.target:
            recorded = self.evidence.cells(name)
            if recorded is not None:
                return recorded
        if name not in self.needed:
            self.needed.append(name)
        if self.change is not None and self.change[0] == name:
            return self.change[1](self)
        return self.formula(name)

    def parameter(self, name: str) -> Tensor:
        """One of the reference's."""
        return self.evidence.parameters[name].detach().double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T + b."""
        bias = self.parameter(f"{name}.bias") if f"{name}.bias" in self.evidence.parameters else None
        return F.linear(x, self.parameter(f"{name}.weight"), bias)

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        """Layer normalisation with a module's weight and bias."""
        weight, bias = self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias")
        return F.layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_eps if eps is None else eps)

    def activate(self, x: Tensor, name: str | None = None) -> Tensor:
        """The config's activation, or another; KeyError for those with parameters of their own."""
        name = name or self.config.hidden_act
        if name in ("prelu", "xielu"):
            raise KeyError(name)
        function: Tensor = activation(name)(x)
        return function

    def heads(self, x: Tensor) -> Tensor:
        """(B, S, C) to (B, H, S, D)."""
        apart: Tensor = x.unflatten(-1, (self.config.num_attention_heads, -1))
        return apart.transpose(1, 2)

    def open_keys(self) -> Tensor:
        """(B, 1, 1, S), True for real tokens."""
        return self.batch.real[:, None, None, :]

    def positions(self) -> Tensor:
        """(B, S)."""
        given = self.batch.inputs.get("position_ids")
        if given is not None:
            return given.reshape(self.batch.real.shape)
        return torch.arange(self.batch.real.shape[1], device=self.batch.real.device).expand(self.batch.real.shape)

    def raw_scores(self, layer: str, scale: float | None = None) -> Tensor:
        """(B, H, S, S): what goes into the softmax, but for the mask."""
        query, key = (self.heads(self.value(f"{layer}.attention.self.{name}")) for name in ("query", "key"))
        return query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)

    def first_tokens(self) -> Tensor:
        """(B, C): the last layer's, of each sequence."""
        last: Tensor = self.value(self.last_layer)
        return last[:, 0]

    @property
    def last_layer(self) -> str:
        """The name of the last layer's output."""
        return f"encoder.layer.{self.config.num_hidden_layers - 1}.output"

    def formula(self, name: str) -> Tensor:
        """What a point is in BERT."""
        if name.startswith("encoder.layer."):
            parts = name.split(".")
            return self._in_layer(int(parts[2]), ".".join(parts[3:]))
        match name:
            case "embeddings.word_embeddings":
                return self.parameter(f"{name}.weight")[self.batch.ids]
            case "embeddings.token_type_embeddings":
                return self.parameter(f"{name}.weight")[self.batch.types]
            case "embeddings.position_embeddings":
                return self.parameter(f"{name}.weight")[self.positions()]
            case "embeddings":
                return self.norm("embeddings.LayerNorm", self.sum_of_embeddings())
            case "pooler":
                return torch.tanh(self.linear("pooler.dense", self.first_tokens()))
            case "cls.predictions.transform.dense":
                return self.linear(name, self.value(self.last_layer))
            case "cls.predictions.transform":
                return self.norm(f"{name}.LayerNorm", self.activate(self.value(f"{name}.dense")))
        return self._result(name)

    def sum_of_embeddings(self) -> Tensor:
        """(B, S, C), before normalisation."""
        tables = ("word_embeddings", "token_type_embeddings", "position_embeddings")
        return sum((self.value(f"embeddings.{table}") for table in tables), start=torch.zeros((), dtype=torch.float64))

    def layer_input(self, layer: int) -> Tensor:
        """(B, S, C)."""
        return self.value(f"encoder.layer.{layer - 1}.output" if layer else "embeddings")

    def _in_layer(self, index: int, part: str) -> Tensor:
        layer = f"encoder.layer.{index}"
        match part:
            case "attention.self.query" | "attention.self.key" | "attention.self.value":
                return self.linear(f"{layer}.{part}", self.layer_input(index))
            case "attention.self.scores":
                return self.raw_scores(layer).masked_fill(~self.open_keys(), float("-inf")).softmax(-1)
            case "attention.self.context":
                value = self.heads(self.value(f"{layer}.attention.self.value"))
                return (self.value(f"{layer}.attention.self.scores") @ value).transpose(1, 2).flatten(2)
            case "attention.output.dense":
                return self.linear(f"{layer}.{part}", self.value(f"{layer}.attention.self.context"))
            case "attention.output":
                dense = self.value(f"{layer}.attention.output.dense")
                return self.norm(f"{layer}.{part}.LayerNorm", dense + self.layer_input(index))
            case "intermediate.dense":
                return self.linear(f"{layer}.{part}", self.value(f"{layer}.attention.output"))
            case "intermediate":
                return self.activate(self.value(f"{layer}.intermediate.dense"))
            case "output.dense":
                return self.linear(f"{layer}.{part}", self.value(f"{layer}.intermediate"))
        assert part == "output"
        residual = self.value(f"{layer}.attention.output")
        return self.norm(f"{layer}.output.LayerNorm", self.value(f"{layer}.output.dense") + residual)

    def result_input(self) -> tuple[str, Tensor]:
        """The Linear that makes the target, a result of the model, and what goes into it."""
        head, name = self.evidence.head, self.target
        if name == "seq_relationship_logits" or head == "BertForNextSentencePrediction":
            return "cls.seq_relationship", self.value("pooler")
        if name == "prediction_logits" or head == "BertForMaskedLM":
            return "cls.predictions.decoder", self.value("cls.predictions.transform")
        if head == "BertForQuestionAnswering":
            return "qa_outputs", self.value(self.last_layer)
        pooled = head in ("BertForSequenceClassification", "BertForMultipleChoice")
        return "classifier", self.value("pooler" if pooled else self.last_layer)

    def _result(self, name: str) -> Tensor:
        if name == "last_hidden_state":
            return self.value(self.last_layer)
        if name == "pooler_output":
            return self.value("pooler")
        linear, x = self.result_input()
        return self.shaped(self.linear(linear, x))

    def shaped(self, logits: Tensor) -> Tensor:
        """Logits as the head returns them."""
        if self.evidence.head == "BertForQuestionAnswering":
            return logits[..., 0 if self.target == "start_logits" else 1]
        if self.evidence.head == "BertForMultipleChoice":
            return logits.view(self.batch.inputs["input_ids"].shape[:2])
        return logits
