"""What a run leaves for people: figures as JSON, a page with tables and the learning curve, and a model card."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import logging
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCardData

import minibert
from minibert.formats import html_head
from minibert.model.heads import BertForTokenClassification
from minibert.text.labels import LabelSet
from minibert.train.evaluate import Evaluation
from minibert.train.recipe import Recipe
from minibert.writing import replacing

logger = logging.getLogger("minibert")

HEADER = ("type", "precision", "recall", "F1", "lenient F1", "gold entities")
EXPLANATION = (
    "Precision, recall and F1 are strict: an entity counts if its type, start and end are right and its tags are what "
    "the scheme allows. Lenient reads any tags."
)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    recipe: Recipe
    model: BertForTokenClassification
    evaluations: dict[str, Evaluation]  # of the split's name
    history: list[dict[str, Any]]  # as Trainer logs it
    sizes: dict[str, int]  # texts of each split
    seconds: float
    processes: int

    @property
    def name(self) -> str:
        """Of the folder."""
        return Path(self.recipe.training.output_dir).name

    def facts(self) -> dict[str, str]:
        """What the page and the card say of how it was made; no path of the machine it was made on."""
        model, data, training = self.recipe.model, self.recipe.data, self.recipe.training
        by_tokens = training.max_tokens_per_batch
        best = max((entry for entry in self.history if "eval_f1" in entry), key=lambda e: e["eval_f1"], default=None)
        facts = {
            "starts from": base_name(model.name_or_path) if model.name_or_path else "random weights",
            "parameters": f"{sum(parameter.numel() for parameter in self.model.parameters()):,}",
            "labels": f"{self.model.config.num_labels} ({model.scheme})",
            "decoder": model.decoder,
            "text is split into": "characters" if data.split_mode == "characters" else "the tokeniser's words",
            "texts": ", ".join(f"{split} {size:,}" for split, size in self.sizes.items()),
            "epochs": f"{training.epochs:g}",
            "kept": f"the model after epoch {best['epoch']:g}, of the best validation F1" if best else "the last model",
            "batch": f"{by_tokens:,} tokens" if by_tokens else f"{training.batch_size} texts",
            "learning rate": f"{training.learning_rate:g}",
            "loss": training.loss,
            "seed": str(training.seed),
            "processes": str(self.processes),
            "time": str(timedelta(seconds=round(self.seconds))),
        }
        return facts | versions()


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    names = {"minibert": minibert, "torch": torch, "transformers": transformers}
    return {**{name: str(module.__version__) for name, module in names.items()}, "python": platform.python_version()}


def write_report(folder: Path, run: Run) -> None:
    """Writes `training.json`, `report.html`, `learning-curve.png` (with matplotlib) and the card `README.md`."""
    figures = {
        "history": run.history,
        "scores": {split: json.loads(evaluation.to_json()) for split, evaluation in run.evaluations.items()},
        "texts": run.sizes,
        "seconds": run.seconds,
        "processes": run.processes,
        "versions": versions(),
    }
    picture = learning_curve(run.history)
    contents = {
        "training.json": (json.dumps(figures, indent=1, ensure_ascii=False) + "\n").encode(),
        "report.html": page(run, picture).encode(),
        "README.md": card(run, has_picture=picture is not None).encode(),
    }
    if picture is not None:
        contents["learning-curve.png"] = picture
    with replacing(folder) as write:
        for name, content in contents.items():
            write(name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]


def learning_curve(history: Sequence[dict[str, Any]]) -> bytes | None:
    """Training loss, validation loss and F1 by epoch as a PNG; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("matplotlib is not installed, so there is no picture of the learning curve")
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    losses, scores = figure.subplots(1, 2)
    for axes, curves in (
        (losses, {"loss": "training", "eval_loss": "validation"}),
        (scores, {"eval_f1": "F1", "eval_precision": "precision", "eval_recall": "recall"}),
    ):
        for name, label in curves.items():
            points = [(entry["epoch"], entry[name]) for entry in history if name in entry]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 50 else None)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    losses.set_title("loss")
    scores.set_title("validation, strict")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def page(run: Run, picture: bytes | None) -> str:
    """The report as one HTML page with nothing beside it."""
    body = [html_head(f"{run.name}: training report")]
    for split, evaluation in run.evaluations.items():
        body.append(f"<h2>{split}: {evaluation.num_examples:,} texts</h2>")
        body += _html_table(HEADER, _cells(evaluation))
        body.append(f"<p>Token accuracy {evaluation.token_accuracy:.4f}. {EXPLANATION}</p>")
        if evaluation.confusions:
            body.append("<h3>Most frequent errors</h3>")
            confusions = [(gold, got, f"{count:,}") for gold, got, count in evaluation.confusions[:20]]
            body += _html_table(("gold", "predicted", "times"), confusions)
    if picture is not None:
        data = base64.b64encode(picture).decode()
        body.append(f'<h2>Learning curve</h2>\n<img alt="loss and F1 by epoch" src="data:image/png;base64,{data}">')
    body.append("<h2>How it was made</h2>")
    body += _html_table(("", ""), run.facts().items())
    body.append(f"<h2>Recipe</h2>\n<pre>{escape(run.recipe.to_toml())}</pre>\n</body></html>")
    return "\n".join(body) + "\n"


def card(run: Run, *, has_picture: bool) -> str:
    """The model card: https://huggingface.co/docs/hub/model-cards."""
    results = [
        EvalResult(
            task_type="token-classification",
            dataset_type=run.recipe.data.dataset or "local",
            dataset_name=base_name(run.recipe.data.dataset or getattr(run.recipe.data, split)),
            dataset_split=split,
            metric_type=metric,
            metric_name=f"strict {metric}",
            metric_value=round(evaluation.scores["strict"]["micro"][metric], 4),
        )
        for split, evaluation in run.evaluations.items()
        for metric in ("f1", "precision", "recall")
    ]
    base = run.recipe.model.name_or_path
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="token-classification",
        tags=["minibert", "named-entity-recognition"],
        base_model=base if base and not Path(base).is_absolute() else None,
        model_name=run.name if results else None,
        eval_results=results or None,
    )
    parts = [f"---\n{data.to_yaml()}\n---", f"# {run.name}"]
    types = ", ".join(LabelSet(list(run.model.config.id2label.values()), run.recipe.model.scheme).entity_types)
    parts.append(
        f"Finds entities in text: {types}. Made with `minibert train`; everything below was measured by that run."
    )
    parts.append(
        "```python\nfrom minibert import TokenClassifier\n\n"
        f'classifier = TokenClassifier.from_pretrained("{run.name}")  # this folder\n'
        'classifier("...")\n```'
    )
    for split, evaluation in run.evaluations.items():
        parts.append(f"## {split.capitalize()}: {evaluation.num_examples:,} texts")
        parts.append(_markdown_table(HEADER, _cells(evaluation)))
    parts.append(EXPLANATION if run.evaluations else "It was neither validated nor tested.")
    if has_picture:
        parts.append("![loss and F1 by epoch](learning-curve.png)")
    parts.append("## How it was made")
    parts.append(_markdown_table(("", ""), run.facts().items()))
    parts.append("`recipe.toml` has every setting, `report.html` the frequent errors.")
    return "\n\n".join(parts) + "\n"


def base_name(name: str) -> str:
    """A name on the Hub as it is; of a path only its last part."""
    return Path(name).name if Path(name).is_absolute() else name


def _cells(evaluation: Evaluation) -> Iterator[tuple[str, ...]]:
    for name, scores, lenient_f1 in evaluation.rows():
        figures = (scores["precision"], scores["recall"], scores["f1"], lenient_f1)
        yield (name, *(f"{figure:.4f}" for figure in figures), f"{scores['support']:,}")


def _html_table(header: Sequence[str], rows: Any) -> Iterator[str]:
    yield "<table>"
    if any(header):
        yield "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in header) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"


def _markdown_table(header: Sequence[str], rows: Any) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
