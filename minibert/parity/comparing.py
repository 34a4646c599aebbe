"""From two models to a report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minibert.config import BertConfig
from minibert.errors import MinibertError
from minibert.parity import batches, causes, sides
from minibert.parity.batches import SENTENCES, Batch
from minibert.parity.differences import HALF, INT8_TOLERANCE, Bound, Difference
from minibert.parity.points import Names, points
from minibert.parity.replay import Evidence
from minibert.parity.report import Report
from minibert.parity.sides import MINIBERT, TRANSFORMERS, Place
from minibert.parity.tracing import Side, Trace, trace

if TYPE_CHECKING:
    from typing_extensions import TypeIs

ROUNDING = 1e-9  # of a value of 1 in float64, after a whole model
CONFIG_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps",
    "max_position_embeddings", "type_vocab_size", "vocab_size", "pad_token_id",
)  # fmt: skip


def compare(
    candidate: Place | nn.Module,
    against: Place | nn.Module | None = None,
    *,
    texts: Sequence[str] = SENTENCES,
    inputs: Mapping[str, Tensor] | None = None,
    dtype: str | torch.dtype = torch.float32,
    engine: str | None = None,
    grad: bool = False,
    device: str | None = None,
    mapping: Names | None = None,
    module: str | None = None,
    tolerance: float | None = None,
    attn_implementation: str = "eager",
) -> Report:
    """Runs two models on the same padded batches, and compares what they have at every point.

    The class is the one that a checkpoint names in `architectures`, else `BertModel`. Dropout is off on both sides. A
    difference is judged by the error that the reference itself makes: in half precision against its float32, with which
    the candidate is compared then, and in float32 against its float64.

    Args:
        candidate: a checkpoint, run by minibert; or any `torch.nn.Module` whose modules have the Hub's names, or names
            that `mapping` translates.
        against: the reference: "transformers" (the same checkpoint there), "minibert" (the same checkpoint in the plain
            model and float32), another checkpoint, run by minibert, or a module. Default "transformers" for a
            checkpoint, "minibert" with `module`. A candidate that is a module wants a checkpoint or a module.
        texts: each is a row, and one row is a pair of the first and the last; cut to the model's length.
        inputs: `input_ids`, `attention_mask`, `token_type_ids` (B, S), instead of texts.
        dtype: the candidate's: fp32, fp64, bf16 or fp16.
        engine: the candidate as `minibert.optimize` makes it with this precision.
        grad: compare every parameter's gradient, too.
        device: of both.
        mapping: the names of the candidate, a module.
        module: `FILE.py:NAME` of a user's model to compare in place of the checkpoint `candidate` itself: a class to
            be made with its config and filled with its weights, or a function of its place.
        tolerance: largest difference that counts as the same, relative to the reference's largest value if that is
            above 1; default by the reference's own error, 1e-10 in float64, and 0.2 for int8.
        attn_implementation: "eager", or "sdpa", which has no scores.

    Raises:
        MinibertError: options that do not go together, models that cannot be loaded or run, `transformers` is missing.
    """
    start = time.perf_counter()
    if grad and engine is not None:
        raise MinibertError("grad: an engine has no gradients; compare the plain model's")
    chosen = sides.dtype_of({"bf16": "bf16", "fp16": "fp16"}.get(engine or "", dtype))
    if engine == "int8" and tolerance is None:
        tolerance = INT8_TOLERANCE
    options = _Options(chosen, attn_implementation, device, engine, mapping, module)
    mine, reference = _both(candidate, against, options)
    config = sides.config_of(reference) or sides.config_of(mine)
    if config is None:
        raise MinibertError("expected a model with BERT's config on one side at least, got none")
    if inputs is None:
        places = [p for p in (candidate, against) if _is_place(p)]
        given = list(batches.from_texts(places[0], texts, config)) if places else [batches.random_inputs(config)]
    else:
        given = [dict(inputs)]
    run = _Run(mine, reference, config, Bound(chosen, tolerance), grad)
    for one in given:
        run.add(batches.make_batch(one, reference.head, config, _device_of(reference.model)))
    return run.report(start)


@dataclass(frozen=True)
class _Options:
    dtype: torch.dtype
    attention: str
    device: str | None
    engine: str | None
    names: Names | None
    module: str | None


def _is_place(value: Place | nn.Module | None) -> TypeIs[Place]:
    return not isinstance(value, nn.Module) and value is not None and value not in (TRANSFORMERS, MINIBERT)


def _both(candidate: Place | nn.Module, against: Place | nn.Module | None, options: _Options) -> tuple[Side, Side]:
    """The candidate, and the reference in float32 unless the candidate is in float64."""
    wide = torch.float32 if options.dtype in HALF else options.dtype
    common: dict[str, Any] = {"attention": options.attention, "device": options.device}
    if isinstance(candidate, nn.Module):
        common["device"] = options.device or str(_device_of(candidate))
        if against is None or against in (TRANSFORMERS, MINIBERT):
            raise MinibertError("against: a module is compared with a checkpoint or with another module")
        if options.engine is not None or options.module is not None:
            raise MinibertError("engine and module: they are for a checkpoint, got a module")
        reference = _reference(against, dtype=wide, **common)
        own = sides.of_module(candidate, options.names, dtype=options.dtype, head=reference.head, **common)
        return _checked(own, reference, options.names)
    head = sides.head_of(candidate)
    if options.module is not None:
        return _of_user(candidate, against, head, options, common, wide)
    if options.names is not None:
        raise MinibertError("mapping: it names the modules of a model of your own; give module=FILE.py:NAME, too")
    target = against if _is_place(against) else candidate
    if _is_place(against) and sides.head_of(against) != head:
        head = "BertModel"  # which both have
    built = torch.float32 if options.engine is not None else options.dtype
    mine, missing = sides.in_minibert(candidate, head, dtype=built, engine=options.engine, **common)
    if isinstance(against, nn.Module):
        return mine, sides.of_module(against, None, dtype=wide, head=head, **common)
    if against in (None, TRANSFORMERS):
        reference = sides.in_transformers(candidate, head, dtype=wide, **common)
        sides.share_missing(mine, reference, missing)
    else:
        reference, absent = sides.in_minibert(target, head, dtype=wide, **common)
        sides.share_missing(mine, reference, [name for name in missing if name in absent])
    return mine, reference


def _of_user(
    place: Place,
    against: Place | nn.Module | None,
    head: str,
    options: _Options,
    common: dict[str, Any],
    wide: torch.dtype,
) -> tuple[Side, Side]:
    if options.engine is not None:
        raise MinibertError("engine: it is for minibert's models, got a module of your own")
    if against in (None, MINIBERT):
        reference, _ = sides.in_minibert(place, head, dtype=wide, **common)
    elif against == TRANSFORMERS:
        reference = sides.in_transformers(place, head, dtype=wide, **common)
    else:
        reference = _reference(against, dtype=wide, **common)
    names = options.names or Names()
    assert options.module is not None
    model = sides.load_own(options.module, place, names, reference.parameters()).to(options.device or "cpu")
    own = sides.of_module(model, names, dtype=options.dtype, head=head, **common)
    return _checked(own, reference, options.names)


def _reference(against: Any, *, dtype: torch.dtype, attention: str, device: str | None) -> Side:
    if isinstance(against, nn.Module):
        return sides.of_module(against, None, dtype=dtype, device=device, attention=attention)
    side, _ = sides.in_minibert(against, sides.head_of(against), dtype=dtype, attention=attention, device=device)
    return side


def _checked(own: Side, reference: Side, names: Names | None) -> tuple[Side, Side]:
    """Refuses a mapping with names that are nowhere."""
    if names is not None:
        known = {name.removeprefix("bert.") for name, _ in reference.model.named_modules() if name}
        config = sides.config_of(reference)
        known |= {point.name for point in points(config.num_hidden_layers if config is not None else 0)}
        names.check([name for name, _ in own.model.named_modules()], known)
    return own, reference


def _device_of(model: nn.Module) -> torch.device:
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


class _Run:
    """Two models, and the reference in another precision, over batches: differences are kept, all else is let go."""

    def __init__(self, mine: Side, reference: Side, config: Any, bound: Bound, grad: bool) -> None:
        self.mine, self.reference, self.config, self.bound, self.grad = mine, reference, config, bound, grad
        # What tells the reference's own error; in half precision it is the reference itself that is wider.
        other = {torch.float32: torch.float64}.get(bound.dtype, bound.dtype)
        self.other = None
        if bound.tolerance is None and bound.dtype != torch.float64:
            self.other = dataclasses.replace(reference, dtype=other)
        self.places = points(config.num_hidden_layers)
        self.batches: list[Batch] = []
        self.rows: dict[str, Difference] = {}
        self.gradients: list[dict[str, Tensor]] = [{} for _ in self._sides()]  # sums over batches

    def _sides(self) -> list[Side]:
        return [side for side in (self.mine, self.reference, self.other) if side is not None]

    def _traced_in_all(self, batch: Batch) -> list[Trace]:
        try:
            return self._traces(self._sides(), batch, grad=self.grad)
        except MinibertError:
            if self.other is None or self.other.dtype != torch.float64 or self.batches:
                raise
        self.other = None  # a module of somebody's that has float32 written into it, or a device without float64
        del self.gradients[2:]
        return self._traces(self._sides(), batch, grad=self.grad)

    def _traces(self, models: Sequence[Side], batch: Batch, *, grad: bool = False) -> list[Trace]:
        own_loss = all(side.accepts(batch.labels) for side in models)
        return [trace(side, batch, self.places, own_loss=own_loss, grad=grad) for side in models]

    def add(self, batch: Batch) -> None:
        """One more batch."""
        mine, reference, *others = traces = self._traced_in_all(batch)
        for sums, one in zip(self.gradients, traces, strict=True):
            sums.update({name: sums[name] + x if name in sums else x for name, x in one.gradients.items()})
        number = len(self.batches)
        self.batches.append(batch)
        depths = {place.name: place.depth for place in self.places}
        order = [name for name in depths if name in mine.values]
        order += sorted((name for name in mine.values if name not in depths), key=lambda name: name == "loss")
        for name in order:
            if name not in reference.values:
                continue
            row = self.rows.setdefault(name, Difference(name, depths.get(name, self.config.num_hidden_layers + 1)))
            if mine.values[name].shape != reference.values[name].shape:
                row.mismatched(mine.values[name], reference.values[name], number)
                continue
            row.add(mine.values[name], reference.values[name], number)
            for other in others:
                if name in other.values:
                    row.add_own(other.values[name], reference.values[name])

    def report(self, start: float) -> Report:
        """Everything that was found, with the cause of the first difference."""
        rows = list(self.rows.values())
        for row in rows:
            self.bound.allow(row)
        gradients = self._gradients() if self.grad else []
        first = next((row for row in rows if not row.is_within), None)
        finding, notes = causes.Finding(), self._notes()
        if first is not None:
            finding = self._explain(first)
        else:
            first = next((row for row in reversed(gradients) if not row.is_within), None)
            if first is not None:
                finding = self._explain_gradient(first)
        return Report(
            candidate=self.mine.title,
            reference=self.reference.title,
            dtype=str(self.bound.dtype).removeprefix("torch."),
            device=str(_device_of(self.mine.model)),
            num_texts=sum(len(batch.real) for batch in self.batches),
            num_tokens=sum(int(batch.real.sum()) for batch in self.batches),
            rows=rows,
            gradients=gradients,
            first=first,
            finding=finding,
            notes=notes,
            seconds=time.perf_counter() - start,
        )

    def _gradients(self) -> list[Difference]:
        mine, reference, *others = self.gradients
        rows = []
        for name, wanted in reference.items():
            if name not in mine:
                continue
            parts = name.split(".")
            layer = int(parts[2]) + 1 if name.startswith("encoder.layer.") else self.config.num_hidden_layers + 1
            row = Difference(name, 0 if name.startswith("embeddings.") else layer)
            if mine[name].shape != wanted.shape:
                row.mismatched(mine[name], wanted)
            else:
                row.add(mine[name], wanted)
                for other in others:
                    row.add_own(other[name], wanted)
            rows.append(row)
        largest = max((row.scale for row in rows), default=0.0)
        for row in rows:
            self.bound.allow_gradient(row, largest)
        return sorted(rows, key=lambda row: row.depth)

    def _explain(self, row: Difference) -> causes.Finding:
        """Looks for the cause, in float64 if the models can: there no rounding hides what a hypothesis gives."""
        models = [self.mine, self.reference]
        if self.bound.dtype == torch.float32 and self.mine.is_plain:
            try:
                wide = [dataclasses.replace(side, dtype=torch.float64) for side in models]
                return self._find(row, wide, ROUNDING * max(1.0, row.scale))
            except MinibertError:  # a module of somebody's that has float32 written into it
                pass
        return self._find(row, models, row.allowed)

    def _find(self, row: Difference, models: Sequence[Side], allowed: float) -> causes.Finding:
        batch = self.batches[row.worst_batch]
        mine, reference = self._traces(models, batch)
        again = self._traces(models[:1], batch)[0].values.get(row.name)
        config = self.config if isinstance(self.config, BertConfig) else _converted(self.config)
        own, parameters = (side.parameters() for side in models)
        evidence = Evidence(batch, config, mine, reference, parameters, self.reference.head, own)
        return causes.find(row.name, evidence, again, allowed, row.largest)

    def _explain_gradient(self, row: Difference) -> causes.Finding:
        mine, wanted = (sums[row.name] for sums in self.gradients[:2])
        return causes.of_gradient(mine, wanted, row.allowed)

    def _notes(self) -> list[str]:
        """Config fields that differ: seldom by intention."""
        mine, reference = (sides.config_of(side) for side in (self.mine, self.reference))
        if mine is None or reference is None:
            return []
        return [
            f"config: {name} is {getattr(mine, name)!r} in the candidate, {getattr(reference, name)!r} in the reference"
            for name in CONFIG_FIELDS
            if hasattr(mine, name) and hasattr(reference, name) and getattr(mine, name) != getattr(reference, name)
        ]


def _converted(config: Any) -> Any:
    """Another library's config as ours, if it can be one."""
    try:
        return BertConfig.from_dict(config.to_dict())
    except (MinibertError, AttributeError):
        return config
