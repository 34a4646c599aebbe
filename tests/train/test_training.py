"""From a recipe to a checkpoint: it learns, goes on where it was stopped, and leaves what others can load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

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
    """Fine-tuning the tiny checkpoint on eight sentences."""
    data: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": "base"},
        "data": {"train": "train.txt", "validation": "train.txt", "split_mode": "characters"},
        "training": {"output_dir": "out", "epochs": 40, "batch_size": 4, "learning_rate": 5e-3, "warmup_ratio": 0.0},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        data[section][key] = value
    return Recipe.from_dict(data, folder)


def spans(classifier: TokenClassifier, text: str) -> list[tuple[str, int, int]]:
    return [(e.label, e.start, e.end) for e in classifier(text)]


@pytest.mark.parametrize("decoder", ["argmax", "viterbi", "crf"])
def test_eight_sentences_are_learnt_by_heart(decoder: str, folder: Path) -> None:
    start = time.perf_counter()
    train(recipe(folder, model__decoder=decoder))
    assert time.perf_counter() - start < 60
    history = json.loads((folder / "out" / "training.json").read_text())
    assert max(entry.get("eval_f1", 0) for entry in history["history"]) == 1.0
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
    return dict(BertForTokenClassification.from_pretrained(folder / "out").state_dict())


def test_a_killed_run_goes_on_as_if_it_had_not_been(folder: Path) -> None:
    toml = 'name_or_path = "base"\n[data]\ntrain = "train.txt"\nsplit_mode = "characters"\n[training]\nepochs = 12\n'
    toml += "batch_size = 2\nlearning_rate = 1e-3\n"
    for name in ("whole", "killed"):
        (folder / f"{name}.toml").write_text(f'[model]\n{toml}output_dir = "{name}/out"\n')
    assert CliRunner().invoke(main, ["train", str(folder / "whole.toml")]).exit_code == 0
    command = [sys.executable, "-m", "minibert.cli", "train", str(folder / "killed.toml")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment) as process:
        deadline = time.monotonic() + 60
        while not list(folder.glob("killed/out/checkpoints/checkpoint-*/trainer_state.json")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not (folder / "killed" / "out" / "config.json").exists()
    resumed = CliRunner().invoke(main, ["train", "--resume", str(folder / "killed.toml")])
    assert resumed.exit_code == 0, resumed.output
    one, other = weights(folder / "whole"), weights(folder / "killed")
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    losses = [
        [
            entry["loss"]
            for entry in json.loads((folder / name / "out" / "training.json").read_text())["history"]
            if "loss" in entry
        ]
        for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12


def test_two_runs_of_one_seed_are_the_same_and_of_two_are_not(folder: Path) -> None:
    states = []
    for seed in (1, 1, 2):
        train(recipe(folder, training__epochs=2, training__seed=seed, training__output_dir=f"{len(states)}/out"))
        states.append(weights(folder / str(len(states))))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not torch.equal(states[0]["classifier.weight"], states[2]["classifier.weight"])


def test_labels_that_the_recipe_does_not_list_are_named(folder: Path) -> None:  # E13
    with pytest.raises(DataError, match=r"train: 2 faults:\n  - .*train\.txt, line 1: type 'PER' is not among the recipe's labels"):
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
