"""Recipes: what is read is what runs, and what cannot be is named, all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from minibert import ConfigError
from minibert.train.recipe import Recipe

GOOD = """
[model]
name_or_path = "base"
[data]
train = "train.txt"
validation = "../dev.txt"
split_mode = "characters"
[training]
output_dir = "out"
learning_rate = 1
"""


FROM_SCRATCH = ["model.config=x.json", "model.tokenizer=x"]
WEIGHTS = 'training.class_weights={"B-人" = 2.5, O = 1}'


def write(folder: Path, content: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(content, encoding="utf-8")
    return path


def test_paths_are_the_recipes_and_names_of_the_hub_stay(tmp_path: Path) -> None:
    recipe = Recipe.from_file(write(tmp_path, GOOD))
    assert recipe.data.train == str(tmp_path / "train.txt")
    assert recipe.data.validation == str(tmp_path / ".." / "dev.txt")
    assert recipe.training.output_dir == str(tmp_path / "out")
    assert recipe.model.name_or_path == "base"  # nothing of that name is here
    (tmp_path / "base").mkdir()
    assert Recipe.from_file(write(tmp_path, GOOD)).model.name_or_path == str(tmp_path / "base")


def test_every_value_can_be_set_on_the_command_line(tmp_path: Path) -> None:
    settings = ["training.epochs=5", "training.seed = 7", 'data.format="conll"', "data.train=/a b.txt"]
    settings += ['model.labels=["O", "B-A", "I-A"]', "training.patience=2"]
    recipe = Recipe.from_file(write(tmp_path, GOOD), settings)
    assert (recipe.training.epochs, recipe.training.seed, recipe.training.patience) == (5, 7, 2)
    assert (recipe.data.format, recipe.data.train) == ("conll", "/a b.txt")
    assert recipe.model.labels == ["O", "B-A", "I-A"]


def test_a_setting_without_a_value_puts_the_default_back(tmp_path: Path) -> None:
    recipe = Recipe.from_file(
        write(tmp_path, GOOD), ["data.validation=", "training.learning_rate=", "model.name_or_path=", *FROM_SCRATCH]
    )
    assert (recipe.data.validation, recipe.training.learning_rate, recipe.model.name_or_path) == (None, 3e-5, None)


def test_the_resolved_recipe_reads_as_itself(tmp_path: Path) -> None:
    recipe = Recipe.from_file(
        write(tmp_path, GOOD), ["model.name_or_path=类/型", 'model.labels=["O", "B-人"]', WEIGHTS]
    )
    again = Recipe.from_file(write(tmp_path, recipe.to_toml()))
    assert again == recipe
    assert "layer_decay = 1.0" in recipe.to_toml()  # what was not said is said


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    bad = """
    [model]
    [data]
    trian = "x"
    max_length = "long"
    split_mode = "words"
    [training]
    epochs = true
    [other]
    """
    with pytest.raises(ConfigError) as caught:
        Recipe.from_file(write(tmp_path, bad))
    message = str(caught.value)
    for part in (
        "[other]: not a section",
        "data.trian: no such key; did you mean train?",
        "data.max_length: expected int, got 'long'",
        "training.epochs: expected float, got True",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.config=x.json", "model: expected one of name_or_path and config"),
        ("data.train=", "data.train: missing"),
        ("data.split_mode=words", "data.split_mode: expected text, characters, got 'words'"),
        ("model.scheme=IOB1", "model.scheme: expected BIO"),
        ("training.layer_decay=1.5", "training.layer_decay: expected 1e-06 to 1, got 1.5"),
        ("training.patience=0", "training.patience: expected 1 to"),
        ("training.max_tokens_per_batch=0", "training.max_tokens_per_batch: expected 1 to"),
        ("training.loss=hinge", "training.loss: expected cross_entropy, focal, dice, got 'hinge'"),
        ("training.adversarial=pgb", "training.adversarial: expected fgm, pgd, got 'pgb'"),
        ("training.schedule=step", "training.schedule: expected linear, cosine, constant, got 'step'"),
        ("training.class_weights={PER = -1}", "training.class_weights: PER: expected a positive number, got -1"),
        ('training.class_weights={PER = "2"}', "training.class_weights: PER: expected a positive number, got '2'"),
        ('training.report_to=["wandb"]', "training.report_to: expected of tensorboard, trackio, got 'wandb'"),
        ("data.label_pieces=last", "data.label_pieces: expected first, all, got 'last'"),
        ("data.overlapping=longest", "data.overlapping: expected error, keep"),
        ("data.format=xml", "data.format: expected auto, conll, jsonl"),
        ("data.scheme=IOB1", "data.scheme: expected auto, BIO"),
        ("data.subset=zh", "data.subset: of which data.dataset"),
        ("training.batch_size=0", "training.batch_size: expected 1 to"),
        ("data.max_length=2", "data.max_length: expected 3 to"),
        ("epochs=3", r"--set epochs=3: expected SECTION\.KEY=VALUE"),
        ("training.epochs", r"--set training\.epochs: expected"),
    ],
)
def test_a_value_that_cannot_be_is_named(setting: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe.from_file(write(tmp_path, GOOD), [setting])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["model.decoder=crf", "training.loss=dice"],
            "training.loss: of single tokens, but decoder crf learns sequences",
        ),
        (
            ["model.decoder=crf", "training.class_weights={A = 2}", "training.label_smoothing=0.1"],
            "training.class_weights, label_smoothing: of single tokens",
        ),
        (["training.loss=focal", "training.label_smoothing=0.1"], "label_smoothing: of the loss cross_entropy only"),
    ],
)
def test_values_that_do_not_go_together_are_named(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe.from_file(write(tmp_path, GOOD), settings)


def test_a_data_set_s_splits_are_names_and_not_paths(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name, resolved in (("set", str(tmp_path / "set")), ("someone/ner", "someone/ner")):
        settings = [f"data.dataset={name}", "data.train=train", "data.validation=dev", "data.subset=zh"]
        data = Recipe.from_file(write(tmp_path, GOOD), settings).data
        assert (data.dataset, data.train, data.validation, data.subset) == (resolved, "train", "dev", "zh")


def test_a_file_that_is_no_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.toml: not a recipe in TOML"):
        Recipe.from_file(write(tmp_path, "[model"))
    with pytest.raises(ConfigError, match="not a recipe in TOML"):
        Recipe.from_file(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"\[model\]: expected a table, got 5"):
        Recipe.from_file(write(tmp_path, "model = 5"))
    for setting in ("model.decoder=crf", "model.decoder="):
        with pytest.raises(ConfigError, match=r"\[model\]: expected a table, got 5"):
            Recipe.from_file(write(tmp_path, "model = 5"), [setting])


@pytest.mark.parametrize("path", sorted((Path(__file__).parent.parent.parent / "configs").glob("*.toml")), ids=str)
def test_the_recipes_that_come_along_can_be_read(path: Path) -> None:
    assert Recipe.from_file(path).training.epochs > 0
