"""One run of a model, and what it had at every point.

Shapes: B sequences of S cells, T real tokens, C channels, H heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minibert.errors import MinibertError
from minibert.model.pretrained import BertPreTrainedModel
from minibert.parity.batches import Batch
from minibert.parity.points import SCORES, TOKENS, WHOLE, Names, Point

OUTPUTS = {  # names for the results of a model that gives a plain tuple
    "BertModel": ("last_hidden_state", "pooler_output"),
    "BertForPreTraining": ("prediction_logits", "seq_relationship_logits"),
    "BertForQuestionAnswering": ("start_logits", "end_logits"),
}


@dataclass(frozen=True)
class Side:
    """A model that takes part in a comparison."""

    title: str  # for people
    model: nn.Module
    head: str  # the class of minibert that it is or imitates
    names: Names = field(default_factory=Names)
    scores: bool = True  # whether a model of minibert is to give its attention weights, which takes the eager path
    dtype: torch.dtype | None = None  # what to run it in; None for what its parameters are in

    @property
    def is_plain(self) -> bool:
        """Whether it can be converted to another precision: an engine cannot."""
        return getattr(self.model, "engine", None) is None

    def parameters(self) -> dict[str, Tensor]:
        """Parameters by our names, tied ones under each of theirs."""
        found: dict[str, Tensor] = {}
        for own, parameter in self.model.named_parameters(remove_duplicate=False):
            targets = self.names.ours(own)
            parts = parameter.chunk(len(targets)) if len(targets) > 1 else (parameter,)
            found.update(zip(targets, parts, strict=False))
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by our names; zeros where a parameter took no part."""
        found: dict[str, Tensor] = {}
        for own, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                targets = self.names.ours(own)
                parts = gradient.chunk(len(targets)) if len(targets) > 1 else (gradient,)
                found.update(zip(targets, parts, strict=False))
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Puts the model in eval mode and in `dtype`, without gradients, and back as it was.

        The model itself and not a copy: whatever was planted into it by hand stays where it is.
        """
        was_training = self.model.training
        parameters = list(self.model.parameters())
        tensors = [t for t in (*parameters, *self.model.buffers()) if t.is_floating_point()]
        data, gradients = [t.data for t in tensors], [p.grad for p in parameters]
        try:
            self.model.eval()
            for parameter in parameters:
                parameter.grad = None
            for tensor in tensors if self.dtype is not None else ():
                tensor.data = tensor.data.to(self.dtype)
            yield
        finally:
            for parameter in parameters:
                parameter.grad = None
            for tensor, values in zip(tensors, data, strict=True):
                tensor.data = values
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.model.train(was_training)

    def accepts(self, arguments: Mapping[str, Any]) -> bool:
        """Whether its forward has parameters of all these names."""
        return bool(arguments) and arguments.keys() <= inspect.signature(self.model.forward).parameters.keys()


@dataclass
class Trace:
    """Values by the names of points: of real tokens (T, ...), and of all cells (B, S, ...) if the model has those."""

    values: dict[str, Tensor] = field(default_factory=dict)
    cells: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # by the names of parameters

    def add(self, name: str, kind: str, value: Tensor, real: Tensor) -> None:
        """Records a value in whatever layout it came."""
        value = value.detach()
        cells = None if kind == WHOLE else _cells(value, kind, real)
        if cells is not None:
            self.cells[name] = cells
            value = (cells.transpose(1, 2) if kind == SCORES else cells)[real]
        self.values[name] = value


def trace(side: Side, batch: Batch, places: Sequence[Point], *, own_loss: bool, grad: bool = False) -> Trace:
    """Runs a model in eval mode, listening to every module that has a point.

    Args:
        own_loss: take the model's own loss, not one made here from what it returns, only for the gradients.
        grad: also run backward.

    Raises:
        MinibertError: its forward does not take the inputs, or fails.
    """
    caught: dict[str, dict[int, Tensor]] = {place.name: {} for place in places}
    wanted: dict[str, list[tuple[str, int, int]]] = {}
    for place in places:
        for rank, (module, result) in enumerate(place.modules):
            wanted.setdefault(module, []).append((place.name, rank, result))
    found = Trace()
    with ExitStack() as stack:
        stack.enter_context(side.running())
        for own, module in side.model.named_modules():
            targets = side.names.ours(own)
            listeners = [(part, *listener) for part, name in enumerate(targets) for listener in wanted.get(name, ())]
            if not side.is_plain and own.endswith("intermediate.dense"):
                continue  # an engine's product has the activation in it
            if listeners:
                stack.callback(module.register_forward_hook(_listener(listeners, len(targets), caught)).remove)
        with torch.set_grad_enabled(grad):
            outputs = _outputs(side, batch, own_loss=own_loss)
            loss = outputs.get("loss")
            if grad and loss is not None:
                loss.backward()
                found.gradients = side.gradients()
    for place in places:
        if caught[place.name]:
            found.add(place.name, place.kind, caught[place.name][min(caught[place.name])], batch.real)
    if not own_loss:
        outputs.pop("loss", None)
    for name, value in outputs.items():
        found.add(name, TOKENS if value.shape[:2] == batch.real.shape else WHOLE, value, batch.real)
    return found


def _listener(
    listeners: Sequence[tuple[int, str, int, int]], num_parts: int, caught: dict[str, dict[int, Tensor]]
) -> Callable[..., None]:
    def listen(_module: nn.Module, _arguments: Any, results: Any) -> None:
        for part, name, rank, index in listeners:
            value = results
            if not isinstance(value, Tensor):
                several = list(value.values() if isinstance(value, Mapping) else value)
                value = several[index] if index < len(several) else None
            elif index:
                continue
            if isinstance(value, Tensor):  # a copy, since what follows may work in place
                value = value.detach().clone()
                caught[name][rank] = value.chunk(num_parts, -1)[part] if num_parts > 1 else value

    return listen


def _outputs(side: Side, batch: Batch, *, own_loss: bool) -> dict[str, Tensor]:
    """What the model returns, by name, with a loss."""
    arguments = dict(batch.inputs)
    if own_loss:
        dtype = next((p.dtype for p in side.model.parameters()), torch.float32)
        arguments |= {n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.labels.items()}
    accepted = inspect.signature(side.model.forward).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    if "input_ids" not in arguments:
        raise MinibertError(
            f"{side.title}: expected forward(input_ids, attention_mask, token_type_ids), got "
            f"({', '.join(accepted)}); wrap it in a module with these names"
        )
    extra: dict[str, Any] = {}
    if hasattr(getattr(side.model, "config", None), "return_dict"):
        extra["return_dict"] = True
    if isinstance(side.model, BertPreTrainedModel):
        extra["output_attentions"] = side.scores
    try:
        result = side.model(**arguments, **extra)
    except MinibertError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MinibertError(f"{side.title}: its forward fails: {type(error).__name__}: {error}") from error
    if not isinstance(result, Mapping):
        several = (result,) if isinstance(result, Tensor) else result
        names = OUTPUTS.get(side.head, ("logits",))
        result = dict(zip(("loss", *names) if own_loss else names, several, strict=False))
    outputs = {name: value for name, value in result.items() if isinstance(value, Tensor)}
    if not own_loss:
        outputs["loss"] = _stand_in(outputs, batch.real)
    elif side.head == "BertForQuestionAnswering":
        outputs["loss"] = _answer_loss(outputs, batch)
    return {"loss": outputs.pop("loss"), **outputs} if "loss" in outputs else outputs


def _stand_in(outputs: Mapping[str, Tensor], real: Tensor) -> Tensor:
    """A number that depends on every result, for models without a loss: their product with fixed waves."""
    total = torch.zeros((), dtype=torch.float64, device=real.device)
    for name, value in outputs.items():
        if name != "loss" and value.is_floating_point():
            waves = torch.arange(value.numel(), dtype=torch.float64, device=value.device).add(1).cos().view(value.shape)
            if value.shape[:2] == real.shape:
                waves = waves.flatten(2).masked_fill(~real[..., None], 0).view(value.shape)
            total = total + (value.double() * waves).mean()
    return total


def _answer_loss(outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Question answering's, over real tokens: `transformers` takes it over padding, too, and so depends on that."""
    parts = [
        F.cross_entropy(
            outputs[f"{end}_logits"].masked_fill(~batch.real, float("-inf")), batch.labels[f"{end}_positions"]
        )
        for end in ("start", "end")
    ]
    return (parts[0] + parts[1]) / 2


def _cells(value: Tensor, kind: str, real: Tensor) -> Tensor | None:
    """A value as (B, S, ...) or (B, H, S, S); None if it has no padding or is something else."""
    B, S = real.shape
    if kind == SCORES:
        return value if value.dim() == 4 and value.shape[0] == B and value.shape[2:] == (S, S) else None
    if value.dim() == 4 and (value.shape[0], value.shape[2]) == (B, S):  # heads apart: (B, H, S, D)
        value = value.transpose(1, 2).flatten(2)
    if value.shape[:-1] in ((S,), (1, S)) and int(real.sum()) != S:  # positions, looked up once
        value = value.expand(B, -1, -1)
    elif value.dim() == 3 and value.shape[:2] == (S, B):
        value = value.transpose(0, 1)
    elif value.dim() == 2 and value.shape[0] == B * S and not real.all():  # all cells one after another
        value = value.reshape(B, S, -1)
    return value if value.dim() >= 2 and value.shape[:2] == (B, S) else None
