"""Why a point differs: usual faults are tried on what was recorded, and one that gives the candidate's value is it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minibert.parity import weights
from minibert.parity.hypotheses import hypotheses
from minibert.parity.replay import Evidence, Replay

EXPLAINED = 0.02  # of a difference may be left by a cause that explains it
ROUNDED = 0.1  # if what is left is not more than rounding

USUAL = {  # ends of points' names: where to look
    "word_embeddings": "the table, another vocabulary, a scale by sqrt(hidden size)",
    "token_type_embeddings": "token types ignored or always 0, the table",
    "position_embeddings": "position offset (RoBERTa's begin behind padding_idx), positions that skip padding",
    "embeddings": "eps, position offset, token types, a summand left out, normalisation",
    "query": "transposed weight, swapped query/key, weights of another layer, missing bias, pre-norm",
    "scores": "mask (polarity, added 0/1, ignored), scale 1 / sqrt(head size), order of heads, softmax axis",
    "context": "mask, scale, order of heads when they are split or merged, swapped key/value",
    "output.dense": "transposed weight, missing bias, weights of another layer",
    "output": "eps, residual connection (left out, another tensor, behind the norm), pre-norm, another norm",
    "intermediate.dense": "transposed weight, missing bias, input that is not the attention's output",
    "intermediate": "activation (GELU by erf or by tanh, ReLU, none)",
    "pooler": "tanh, another token than the first, transposed weight",
    "transform": "activation, eps, normalisation left out",
    "logits": "weights of the head, missing bias, order of labels, softmax applied already, input of the head",
    "loss": "padding counted, sum instead of mean",
}


@dataclass(frozen=True)
class Finding:
    """What is known of a difference: causes that were decided, else where one would look."""

    causes: list[str] = field(default_factory=list)
    usual: str = ""
    extent: str = ""  # heads, texts or tokens that it is confined to
    are_alternatives: bool = False  # whether the numbers fit each of the causes alone


def find(target: str, evidence: Evidence, again: Tensor | None, allowed: float, largest: float) -> Finding:
    """Looks for what makes the candidate's value at a point what it is.

    Args:
        target: the first point that fails; everything recorded before it is as in the reference.
        again: the candidate's value in a second run on the same batch.
        allowed: how large a difference counts as rounding in what was recorded.
        largest: the difference to be explained, maybe found in a lower precision than what was recorded.
    """
    got, wanted = evidence.candidate.values[target], evidence.reference.values[target]
    usual = _usual(target)
    if got.shape != wanted.shape:
        return Finding(_shape_causes(got, wanted, evidence), usual)
    if again is not None and not _equal(again, got):
        return Finding(["two runs on the same batch differ: dropout is active, or something else is random"], usual)
    if _distance(got.double(), wanted.double()) < EXPLAINED * largest:
        return Finding(["rounding: in float64 both agree; something is computed in a lower precision"], usual)
    extent = _extent(target, got, wanted, evidence, allowed)
    try:
        replay = Replay(evidence, target)
        replay.result()
    except KeyError:  # a value that BERT does not have, or parameters that cannot be had
        return Finding([], usual, extent)
    stored = _stored(target, replay.needed, evidence)
    if stored:
        return Finding(stored, usual, extent)
    found = _replayed(target, replay.needed, evidence, got.double(), wanted.double(), allowed)
    return Finding(found, usual, extent, are_alternatives=len(found) > 1)


def _usual(target: str) -> str:
    return next((said for end, said in USUAL.items() if target.endswith(end)), USUAL["query"])


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).logical_or(a.isnan() & b.isnan()).all())


def _shape_causes(got: Tensor, wanted: Tensor, evidence: Evidence) -> list[str]:
    real = evidence.batch.real
    if got.shape[1:] == wanted.shape[1:] and got.shape[0] == int((~real).sum()):
        return ["mask: its polarity is inverted, so that padding is taken for the text"]
    if got.dim() == wanted.dim() == 3 and got.shape[1] != wanted.shape[1]:
        return [f"{got.shape[1]} attention heads instead of {wanted.shape[1]}"]
    return []


def _stored(target: str, needed: list[str], evidence: Evidence) -> list[str]:
    """Parameters between the last recorded values and the target that are not the reference's."""
    own, reference = evidence.own_parameters, evidence.parameters
    if target.startswith("encoder.layer."):
        whole = weights.describe_layer(".".join(target.split(".")[:3]) + ".", own, reference)
        if whole:
            return [whole]
    used = {name: tensor for name, tensor in own.items() if any(_belongs(name, point) for point in needed)}
    changed = weights.changed_parameters(used, reference)
    absent = [name for name in reference if any(_belongs(name, p) for p in needed) and name not in own]
    said = [weights.describe(name, own, reference, evidence.config) for name in changed]
    if own and len(absent) < len(reference) / 4:
        said += [f"the candidate has no parameter {name}" for name in absent]
    return list(dict.fromkeys(said))


def _belongs(parameter: str, point: str) -> bool:
    """Whether a parameter takes part in a point's own formula."""
    module = parameter.rpartition(".")[0]
    if point.endswith(("logits",)):
        return module in (
            "classifier",
            "qa_outputs",
            "cls.seq_relationship",
            "cls.predictions.decoder",
            "cls.predictions",
        )
    if point == "pooler":
        return module == "pooler.dense"
    norm = point.endswith((".output", ".transform")) or point == "embeddings"
    return module == (f"{point}.LayerNorm" if norm else point)


def _replayed(
    target: str, needed: list[str], evidence: Evidence, got: Tensor, wanted: Tensor, allowed: float
) -> list[str]:
    """The hypotheses that give the candidate's value, best first."""
    difference = _distance(got, wanted)
    bound = allowed
    if math.isfinite(difference):
        bound = max(EXPLAINED * difference, min(10 * allowed, ROUNDED * difference))
    found: dict[str, float] = {}
    for point in needed:
        for said, formula in hypotheses(point, evidence, got if point == target else None):
            try:
                left = _distance(Replay(evidence, target, (point, formula)).result(), got)
            except (RuntimeError, KeyError, IndexError):  # a hypothesis that does not fit these sizes
                continue
            if left <= bound and left < found.get(said, math.inf):
                found[said] = left
    best = min(found.values(), default=0.0)
    # What explains a hundred times less than the best is a near miss, such as another eps.
    return sorted((said for said, left in found.items() if left <= 10 * best + allowed / 100), key=found.__getitem__)[
        :3
    ]


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    both_nan = a.isnan() & b.isnan()
    distance = (a - b).abs().masked_fill(both_nan, 0)
    return float(distance.max()) if bool(distance.isfinite().all()) else math.inf


def _extent(target: str, got: Tensor, wanted: Tensor, evidence: Evidence, allowed: float) -> str:
    """Which heads, texts or token types a difference is confined to, if it is not everywhere."""
    if target == "loss" or got.shape[0] != int(evidence.batch.real.sum()):
        return ""
    wrong = ~((got.double() - wanted.double()).abs() <= allowed)
    rows = torch.arange(len(evidence.batch.real), device=wrong.device)[:, None].expand_as(evidence.batch.real)
    by_token = wrong.flatten(1).any(1)
    padded = ~evidence.batch.real.all(1)
    said = []
    for title, group in (
        ("texts", rows[evidence.batch.real]),
        ("token types", evidence.batch.types[evidence.batch.real]),
    ):
        every, hit = set(group.tolist()), set(group[by_token].tolist())
        if hit and hit != every:
            only_padded = title == "texts" and hit == set(rows[:, 0][padded].tolist())
            listed = "those with padding" if only_padded else ", ".join(map(str, sorted(hit)[:8]))
            said.append(f"{title}: {listed}")
    num_heads = evidence.config.num_attention_heads
    heads = wrong if target.endswith(".scores") else None
    if target.endswith((".query", ".key", ".value", ".context")):
        heads = wrong.unflatten(-1, (num_heads, -1))
    if heads is not None and heads.dim() == 3:
        hit = set(heads.any(-1).any(0).nonzero().flatten().tolist())
        if hit and len(hit) < num_heads:
            said.append(f"heads: {', '.join(map(str, sorted(hit)))}")
    return "; ".join(said)


def of_gradient(got: Tensor, wanted: Tensor, allowed: float) -> Finding:
    """What a gradient is in terms of the reference's, when every value of the forward pass is right."""
    usual = "a factor of the loss, detached tensors, frozen parameters, padding rows, dropout"
    if got.shape != wanted.shape:
        return Finding([], usual)
    mine, theirs = got.double(), wanted.double()
    if not bool(mine.any()):
        return Finding(["it is zero: detached, or frozen"], usual)
    factor = float((mine * theirs).sum() / theirs.square().sum().clamp(min=1e-300))
    if float((mine - factor * theirs).abs().max()) <= max(allowed, 1e-6 * float(mine.abs().max())):
        return Finding([f"it is {factor:.6g} times the reference's"], usual)
    return Finding([], usual)
