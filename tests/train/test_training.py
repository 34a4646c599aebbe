"""From a recipe to a checkpoint: it learns, goes on where it was stopped, and leaves what others can load."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from click.testing import CliRunner
from huggingface_hub import ModelCard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from minibert import BertForTokenClassification, ConfigError, DataError, TokenClassifier
from minibert.cli import main
from minibert.train.recipe import Recipe
from minibert.train.training import train
from tagger import write_checkpoint

SENTENCES = [
    "张/B-PER 三/I-PER 住/O 在/O 北/B-LOC 京/I-LOC 。/O",
    "我/O 喜/O 欢/O 上/B-LOC 海/I-LOC 。/O",
    "李/B-PER 四/I-PER 今/O 天/O 住/O 院/O",
    "北/B-LOC 京/I-LOC 天/O 气/O 很/O 好/O",
    "上/B-ORG 海/I-ORG 医/I-ORG 院/I-ORG 很/O 好/O",
    "张/B-PER 李/I-PER 和/O 三/B-PER 四/I-PER 在/O 上/B-LOC 海/I-LOC",
    "我/O 在/O 北/B-ORG 京/I-ORG 医/I-ORG 院/I-ORG 住/O 院/O",
    "今/O 天/O 气/O 很/O 好/O",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "base", initializer_range=0.05)
    text = "\n\n".join("\n".join(word.replace("/", " ") for word in sentence.split()) for sentence in SENTENCES)
    (tmp_path / "train.txt").write_text(text + "\n", encoding="utf-8")
    return tmp_path


def recipe(folder: Path, **changes: Any) -> Recipe:
    """Fine-tuning the tiny checkpoint on eight sentences; changes are of a section, or of one key, section__key."""
    data: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": "base"},
        "data": {"train": "train.txt", "validation": "train.txt", "split_mode": "characters"},
        "training": {"output_dir": "out", "epochs": 40, "batch_size": 4, "learning_rate": 5e-3, "warmup_ratio": 0.0},
    }
    data["training"]["report_to"] = []
    for name, value in changes.items():
        section, dot, key = name.partition("__")
        if dot:
            data[section][key] = value
        else:
            data[section] = value
    return Recipe.from_dict(data, folder)


def spans(classifier: TokenClassifier, text: str) -> list[tuple[str, int, int]]:
    return [(e.label, e.start, e.end) for e in classifier(text)]


@pytest.mark.parametrize("decoder", ["argmax", "viterbi", "crf"])
def test_eight_sentences_are_learnt_by_heart(decoder: str, folder: Path) -> None:
    start = time.perf_counter()
    train(recipe(folder, model__decoder=decoder))
    assert time.perf_counter() - start < 60
    assert max(entry.get("eval_f1", 0) for entry in history(folder / "out")) == 1.0
    classifier = TokenClassifier.from_pretrained(folder / "out")
    assert (classifier.decoder, classifier.split_mode) == (decoder, "characters")
    assert classifier.labels.names == ["O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER"]
    assert spans(classifier, "张李和三四在上海") == [("PER", 0, 2), ("PER", 3, 5), ("LOC", 6, 8)]
    for directory in (folder / "out", max((folder / "out" / "checkpoints").iterdir())):
        theirs = transformers.AutoModelForTokenClassification.from_pretrained(directory, dtype=torch.float32).eval()
        assert theirs.config.id2label == classifier.model.config.id2label
        assert theirs.config.architectures == ["BertForTokenClassification"]
        ids = torch.randint(5, 80, (1, 9))
        mine = TokenClassifier.from_pretrained(directory).model
        with torch.no_grad():
            torch.testing.assert_close(theirs(ids).logits, mine(ids).logits, atol=1e-5, rtol=0)
    again = Recipe.from_file(folder / "out" / "recipe.toml")
    assert again == recipe(folder, model__decoder=decoder)


def test_the_best_model_is_kept_and_not_the_last(folder: Path) -> None:
    seen: list[float] = []

    class Spoil(transformers.TrainerCallback):
        """Wrecks the model after the best evaluation."""

        def on_epoch_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            if seen and max(seen) == 1.0:
                with torch.no_grad():
                    model.classifier.weight.zero_()

        def on_evaluate(self, *_: Any, metrics: Any = None, **__: Any) -> None:
            seen.append(metrics["eval_f1"])

    train(recipe(folder, training__patience=12), callbacks=[Spoil()])
    assert seen[-1] < 1.0
    assert len(seen) < 40  # stopped early
    assert spans(TokenClassifier.from_pretrained(folder / "out"), "北京天气很好") == [("LOC", 0, 2)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(BertForTokenClassification.from_pretrained(folder).state_dict())


def history(folder: Path) -> list[dict[str, Any]]:
    """What a run logged, without its times and without the last entry, which is of the process and not of the run."""
    entries: list[dict[str, Any]] = json.loads((folder / "training.json").read_text())["history"]
    logged = [entry for entry in entries if "train_loss" not in entry]
    return [
        {key: value for key, value in entry.items() if "second" not in key and "time" not in key} for entry in logged
    ]


KILLED = """
import os, signal, sys
from pathlib import Path
import transformers
from minibert.train.recipe import Recipe
from minibert.train.training import train

at, saves = int(sys.argv[1]), transformers.TrainerState.save_to_json

class Killed(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == at:
            os.kill(os.getpid(), signal.SIGKILL)

def save(state, path):
    if state.global_step == -at:  # everything else of the checkpoint is there
        Path(path).write_text("{")
        os.kill(os.getpid(), signal.SIGKILL)
    saves(state, path)

transformers.TrainerState.save_to_json = save
train(Recipe.from_file(Path("killed.toml")), callbacks=[Killed()])
"""
ROBUST = {"max_tokens_per_batch": 24, "r_drop": 0.5, "adversarial": "fgm"}


@pytest.mark.parametrize(("at", "options"), [(3, {}), (5, {}), (-8, {}), (7, ROBUST)])
def test_a_killed_run_goes_on_as_if_it_had_not_been(at: int, options: dict[str, Any], folder: Path) -> None:
    for name in ("whole", "killed"):
        settings = {"output_dir": name, "epochs": 3, "batch_size": 2, "learning_rate": 1e-3, "logging_steps": 3}
        made = recipe(folder, training={**settings, "report_to": [], **options}).to_toml()
        (folder / f"{name}.toml").write_text(made, encoding="utf-8")
    assert CliRunner().invoke(main, ["train", str(folder / "whole.toml")]).exit_code == 0
    done = subprocess.run([sys.executable, "-c", KILLED, str(at)], cwd=folder, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not (folder / "killed" / "config.json").exists()
    refused = CliRunner().invoke(main, ["train", str(folder / "killed.toml")])
    assert (refused.exit_code, "holds a run already" in refused.output) == ((1, True) if at != 3 else (0, False))
    if at != 3:  # there was a checkpoint
        resumed = CliRunner().invoke(main, ["train", "--resume", str(folder / "killed.toml")])
        assert resumed.exit_code == 0, resumed.output
    one, other = weights(folder / "whole"), weights(folder / "killed")
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert history(folder / "whole") == history(folder / "killed")
    assert sum("loss" in entry for entry in history(folder / "whole")) >= 6


def test_a_run_is_resumed_by_its_own_recipe_only(folder: Path) -> None:
    train(recipe(folder, training__epochs=1))
    with pytest.raises(ConfigError, match=r"another recipe: training\.epochs was 1 and is 2; training\.seed was 0"):
        train(recipe(folder, training__epochs=2, training__seed=5), resume=True)
    train(recipe(folder, training__epochs=1, training__patience=9), resume=True)  # nothing is left to do
    (folder / "out" / "checkpoints" / "checkpoint-2" / "trainer_state.json").unlink()
    train(recipe(folder, training__epochs=1), resume=True)


def test_ten_losses_of_a_small_run_stay_what_they_are(folder: Path) -> None:
    write_checkpoint(folder / "base", initializer_range=0.05, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    train(recipe(folder, training__epochs=5, training__logging_steps=1))
    losses = [entry["loss"] for entry in history(folder / "out") if "loss" in entry]
    pinned = [2.1647, 1.9141, 1.645, 1.4934, 1.412, 1.3599, 1.3619, 1.2302, 1.3282, 1.1504]
    assert losses == pytest.approx(pinned, abs=2e-3)


ONE_LINE: list[dict[str, Any]] = [
    {"loss": "focal"},
    {"loss": "dice"},
    {"class_weights": {"PER": 3.0, "O": 0.5}},
    {"label_smoothing": 0.1},
    {"r_drop": 1.0},
    {"adversarial": "fgm"},
    {"adversarial": "pgd"},
    {"layer_decay": 0.5},
    {"head_learning_rate": 1e-2},
    {"weight_decay": 0.5},
    {"adam_beta1": 0.5},
    {"adam_beta2": 0.9},
    {"adam_epsilon": 1e-3},
    {"schedule": "cosine"},
    {"schedule": "constant"},
    {"warmup_ratio": 0.5},
    {"max_grad_norm": 0.01},
    {"max_tokens_per_batch": 20},
    {"gradient_accumulation_steps": 2},
    {"bf16": True},
    {"seed": 1},
]


def test_every_option_is_one_line_and_changes_what_is_learnt(folder: Path) -> None:
    def learnt(name: str, **options: Any) -> torch.Tensor:
        settings = {"output_dir": name, "epochs": 1, "batch_size": 2, "learning_rate": 1e-3, "report_to": [], **options}
        model = train(recipe(folder, training=settings))
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    plain = learnt("plain")
    results = {str(options): learnt(str(number), **options) for number, options in enumerate(ONE_LINE)}
    assert [name for name, weights in results.items() if torch.equal(weights, plain)] == []
    assert torch.equal(learnt("checkpointed", gradient_checkpointing=True), plain)  # the same with less memory


def test_the_report_has_the_figures_of_the_model_that_is_kept(folder: Path) -> None:
    (folder / "private").mkdir()
    (folder / "train.txt").rename(folder / "private" / "train.txt")
    files = {"train": "private/train.txt", "validation": "private/train.txt", "test": "private/train.txt"}
    train(
        recipe(
            folder, data={**files, "split_mode": "characters"}, training__epochs=12, training__report_to=["tensorboard"]
        )
    )
    out = folder / "out"
    figures = json.loads((out / "training.json").read_text(encoding="utf-8"))
    scored = CliRunner().invoke(main, ["evaluate", str(out), str(folder / "private" / "train.txt"), "--json"])
    assert figures["scores"]["validation"] == figures["scores"]["test"] == json.loads(scored.stdout)
    best = max(entry.get("eval_f1", 0) for entry in figures["history"])
    assert figures["scores"]["validation"]["strict"]["micro"]["f1"] == pytest.approx(best)
    card = ModelCard.load(out / "README.md")
    results = {(r.dataset_split, r.metric_type): r.metric_value for r in card.data.eval_results or []}
    assert results["test", "f1"] == pytest.approx(best, abs=1e-4)
    assert card.data.base_model is None  # a folder here is none on the Hub
    page = (out / "report.html").read_text(encoding="utf-8")
    support = figures["scores"]["test"]["strict"]["types"]["PER"]["support"]
    assert f"<td>{support}</td>" in page
    for text in (page, card.content):
        assert "PER" in text
        assert f"{best:.4f}" in text
    assert str(folder) not in card.content  # where it was made is nobody's business
    picture = (out / "learning-curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert base64.b64encode(picture).decode() in page
    events = EventAccumulator(str(out / "logs"))
    events.Reload()
    assert [event.value for event in events.Scalars("eval/f1")] == pytest.approx(
        [entry["eval_f1"] for entry in figures["history"] if "eval_f1" in entry]
    )


def test_trackio_is_told_and_standard_output_is_not(folder: Path) -> None:
    settings = {"output_dir": "out", "epochs": 1, "report_to": ["trackio"]}
    (folder / "a.toml").write_text(recipe(folder, training=settings).to_toml(), encoding="utf-8")
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    command = [sys.executable, "-m", "minibert.cli", "train", str(folder / "a.toml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"{folder / 'out'}\n"
    assert any(path.is_file() for path in (folder / "trackio").rglob("minibert*"))
    assert re.search(
        r"epoch 1 of 1: loss \d\.\d{4}, F1 \d\.\d{4} \(best \d\.\d{4}\), 0:00:\d\d gone, 0:00:00 left", done.stderr
    )
    assert "\r" not in done.stderr  # no bar where there is no terminal


def test_what_is_not_installed_is_done_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = importlib.util.find_spec
    absent = {"tensorboard", "trackio", "matplotlib"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    train(recipe(folder, training__epochs=1))
    assert not (folder / "out" / "logs").exists()
    assert not (folder / "out" / "learning-curve.png").exists()
    assert "learning-curve" not in (folder / "out" / "README.md").read_text(encoding="utf-8")
    assert "matplotlib is not installed" in caplog.text


def test_a_folder_that_cannot_be_written_to_is_named(folder: Path) -> None:
    (folder / "file").write_text("")
    (folder / "a.toml").write_text(recipe(folder, training__output_dir="file/out").to_toml(), encoding="utf-8")
    done = CliRunner().invoke(main, ["train", str(folder / "a.toml")])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith(f"Error: {folder / 'file' / 'out'}: ")


def test_without_the_extra_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.toml").write_text(recipe(folder).to_toml(), encoding="utf-8")
    monkeypatch.delitem(sys.modules, "minibert.train.training")
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = CliRunner().invoke(main, ["train", str(folder / "a.toml")])
    assert (done.exit_code, done.stderr) == (1, "Error: training needs transformers: pip install 'minibert[train]'\n")


def test_without_validation_the_last_model_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(recipe(folder, data={"train": "train.txt"}, training__epochs=2))
    assert "epoch 2 of 2: loss" in capsys.readouterr().err
    card = (folder / "out" / "README.md").read_text(encoding="utf-8")
    assert "neither validated nor tested" in card
    assert "the last model" in card


def test_a_data_set_by_name_gives_its_labels(folder: Path) -> None:
    names = datasets.ClassLabel(names=["O", "B-PER", "I-PER", "B-ZOO", "I-ZOO"])
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(names)})
    rows = datasets.Dataset.from_list([{"tokens": ["张", "三", "在"], "ner_tags": [1, 2, 0]}] * 4, features=features)
    datasets.DatasetDict({"train": rows, "dev": rows}).save_to_disk(folder / "set")
    data = {"dataset": "set", "train": "train", "validation": "dev"}
    model = train(recipe(folder, data=data, training__epochs=1))
    assert list(model.config.id2label.values()) == ["O", "B-PER", "I-PER", "B-ZOO", "I-ZOO"]


def test_overlapping_entities_are_an_error_unless_they_are_kept(folder: Path) -> None:
    line = {"text": "北京医院", "label": [[0, 4, "ORG"], [0, 2, "LOC"]]}
    (folder / "train.txt").write_text(json.dumps(line), encoding="utf-8")
    with pytest.raises(DataError, match=r"train\.txt, line 1: ORG 0\.\.4 and LOC 0\.\.2 overlap"):
        train(recipe(folder))
    train(recipe(folder, data__overlapping="keep", training__epochs=1))


def test_two_runs_of_one_seed_are_the_same_and_of_two_are_not(folder: Path) -> None:
    states = []
    for seed in (1, 1, 2):
        train(recipe(folder, training__epochs=2, training__seed=seed, training__output_dir=f"{len(states)}/out"))
        states.append(weights(folder / str(len(states)) / "out"))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not torch.equal(states[0]["classifier.weight"], states[2]["classifier.weight"])


def test_labels_that_the_recipe_does_not_list_are_named(folder: Path) -> None:  # E13
    with pytest.raises(DataError, match=r"train: 2 faults:\n  - .*txt, line 1: type 'PER' is not among the recipe's"):
        train(recipe(folder, model__labels=["O", "B-LOC", "I-LOC"]))
    with pytest.raises(DataError, match=r"none\.txt: cannot be read"):
        train(recipe(folder, data__train="none.txt"))


def test_a_model_from_scratch_needs_a_table_for_its_tokeniser(folder: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 32}))
    data = {
        "model": {"config": "config.json", "tokenizer": "base"},
        "data": {"train": "train.txt"},
        "training": {"output_dir": "out", "epochs": 1},
    }
    with pytest.raises(ConfigError, match="more entries than vocab_size"):
        train(Recipe.from_dict(data, folder))
    (folder / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 32, "vocab_size": 200}))
    train(Recipe.from_dict(data, folder))
    assert TokenClassifier.from_pretrained(folder / "out").labels.scheme == "BIO"


def test_the_short_script_does_the_same_with_the_librarys_parts(folder: Path) -> None:
    script = Path(__file__).parent.parent.parent / "scripts" / "finetune_ner.py"
    files = [str(folder / name) for name in ("base", "train.txt", "train.txt", "out")]
    done = subprocess.run([sys.executable, str(script), *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "== viterbi ==\n8 examples, scheme BIO" in done.stdout
    assert TokenClassifier.from_pretrained(folder / "out").split_mode == "characters"
