"""What is saved: whole whatever happens, and the same here and in transformers."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import minibert.hub
from checkpoint.test_loading import TAGGER, load, write
from minibert import BertConfig, CheckpointError
from reference import HEADS, batch, fields_of, largest_difference


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_loads_in_transformers_and_here(head: str, tied: bool, tmp_path: Path) -> None:
    fields = fields_of(head, tie_word_embeddings=tied)
    if head == TAGGER:
        fields["id2label"] = {index: f"B-类{index}" for index in range(fields.pop("num_labels"))}
    model = getattr(minibert, head)(BertConfig(**fields)).eval()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["architectures"], config["model_type"], config["dtype"]) == ([head], "bert", "float32")
    assert config["torch_dtype"] == "float32"  # for transformers v4
    theirs, info = getattr(transformers, head).from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    again = load(tmp_path, head)
    inputs = batch(head, (7, 3, 5))
    with torch.no_grad():
        expected = model(**inputs)
        key = next(name for name in expected if name != "loss")
        # Not to the bit: kernels take another path for weights that lie at another offset, mapped from the file.
        torch.testing.assert_close(again(**inputs)[key], expected[key], rtol=0, atol=1e-6)
        assert largest_difference(expected[key], theirs.eval()(**inputs)[key], inputs["attention_mask"]) < 1e-5
    if head == TAGGER:
        assert again.config.id2label == theirs.config.id2label == fields["id2label"]
    again.save_pretrained(tmp_path / "second")
    assert (tmp_path / "second" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_non_contiguous_weights_are_saved(tmp_path: Path) -> None:
    model = minibert.BertForTokenClassification(BertConfig(**fields_of(TAGGER)))
    query = model.bert.encoder.layer[0].attention.self.query
    query.weight.data = query.weight.data.t().contiguous().t()
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).bert.encoder.layer[0].attention.self.query.weight, query.weight)


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_weights_beyond_the_shard_size_are_split_and_load_everywhere(tmp_path: Path) -> None:
    model = minibert.BertForTokenClassification(BertConfig(**fields_of(TAGGER))).eval()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = set(index["weight_map"].values())
    assert len(shards) > 3
    assert files_in(tmp_path) == shards | {"config.json", "model.safetensors.index.json"}
    assert all((tmp_path / shard).stat().st_size < 12_000 for shard in shards)
    theirs = transformers.BertForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(load(tmp_path).state_dict()[name], tensor)
        assert torch.equal(theirs.state_dict()[name], tensor)


SAVES = [("10KB", "10KB"), ("10KB", "5GB"), ("5GB", "10KB"), ("5GB", "5GB"), ("10KB", "20KB")]


@pytest.mark.parametrize("sizes", SAVES)
def test_saving_again_leaves_the_new_weights_and_nothing_of_the_old(sizes: tuple[str, str], tmp_path: Path) -> None:
    config = BertConfig(**fields_of(TAGGER))
    (tmp_path / "vocab.txt").write_text("x")
    for size in sizes:
        model = minibert.BertForTokenClassification(config)
        model.save_pretrained(tmp_path, max_shard_size=size)
        loaded = load(tmp_path).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    (tmp_path / "vocab.txt").unlink()
    assert_nothing_else_in(tmp_path)


@pytest.mark.parametrize("sizes", SAVES)
def test_a_save_that_stops_anywhere_leaves_the_old_or_the_new_checkpoint(
    sizes: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = fields_of(TAGGER)
    old = minibert.BertForTokenClassification(BertConfig(**fields))
    changes = {"num_hidden_layers": 3, "hidden_act": "relu", "num_labels": 7}
    new = minibert.BertForTokenClassification(BertConfig(**fields | changes))
    steps = 0

    class Killed(BaseException):
        """As if the process ended here."""

    def counted(original: Any, limit: int) -> Any:
        def step(*args: Any, **named: Any) -> Any:
            nonlocal steps
            if steps == limit:
                raise Killed
            steps += 1
            return original(*args, **named)

        return step

    outcomes = []
    for limit in range(200):
        directory = tmp_path / str(limit)
        old.save_pretrained(directory, max_shard_size=sizes[0])
        steps = 0
        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "rmdir", "mkdir", "touch", "chmod"):
                patch.setattr(Path, name, counted(getattr(Path, name), limit))
            patch.setattr(os, "fsync", counted(os.fsync, limit))
            patch.setattr("shutil.rmtree", lambda *_, **__: None)  # a dead process clears nothing up
            try:
                new.save_pretrained(directory, max_shard_size=sizes[1])
                finished = True
            except Killed:
                finished = False
        outcomes.append(whole(load(directory), old, new))
        assert outcomes[-1] in "on"
        if finished:
            break
        saved_again = old if limit % 2 else new
        saved_again.save_pretrained(directory, max_shard_size=sizes[0])
        assert whole(load(directory), old, new) == "no"[limit % 2]
        assert_nothing_else_in(directory)
    assert outcomes[0] == "o"
    assert outcomes[-1] == "n"
    assert outcomes == sorted(outcomes, reverse=True)  # old up to one moment, new from then on


def whole(loaded: Any, old: Any, new: Any) -> str:
    """Which of the two a loaded model is, config and every weight; "neither" for a mixture."""
    for letter, model in (("o", old), ("n", new)):
        state = model.state_dict()
        if all(getattr(loaded.config, key) == getattr(model.config, key) for key in ("hidden_act", "id2label")) and all(
            torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items()
        ):
            return letter
    return "neither"


def assert_nothing_else_in(directory: Path) -> None:
    """The folder holds what its index names and the config, and transformers can read it."""
    index = directory / "model.safetensors.index.json"
    weights = {"model.safetensors"}
    if index.exists():
        weights = {index.name, *json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    assert files_in(directory) == weights | {"config.json"}


PRELUDE = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)  # no threads, so that forking is safe
from minibert import BertConfig, BertForTokenClassification
from checkpoint.test_saving import assert_nothing_else_in, whole
folder, parent = Path(sys.argv[1]), os.getpid()
sizes = dict(hidden_size=64, num_attention_heads=4, intermediate_size=256, vocab_size=500)
old = BertForTokenClassification(BertConfig(num_hidden_layers=2, num_labels=5, **sizes))
new = BertForTokenClassification(BertConfig(num_hidden_layers=3, num_labels=9, hidden_act="relu", **sizes))
old.save_pretrained(folder)

def start(turns):
    process = os.fork()
    if not process:
        while os.getppid() == parent:
            for model, size in turns:
                model.save_pretrained(folder, max_shard_size=size)
        os._exit(0)
    return process

def stop(process):
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
"""


def run_apart(code: str, directory: Path) -> str:
    """Runs code in a process of its own, which may fork."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    done = subprocess.run([*command, str(directory)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_hundred_kills_at_random_moments_of_a_save(tmp_path: Path) -> None:
    stdout = run_apart(
        """
        random.seed(0)
        interrupted = 0
        for _ in range(100):
            saver = start([(new, "200KB"), (old, "5GB"), (new, "5GB"), (old, "200KB")])
            time.sleep(random.uniform(0.001, 0.06))
            stop(saver)
            interrupted += any(path.name.startswith(".minibert-") for path in folder.iterdir())
            print(whole(BertForTokenClassification.from_pretrained(folder), old, new))
        new.save_pretrained(folder)
        assert_nothing_else_in(folder)
        print(interrupted)
        """,
        tmp_path,
    )
    *states, interrupted = stdout.split()
    assert len(states) == 100
    assert set(states) == {"o", "n"}
    assert int(interrupted) > 30  # most kills came while a save was going on


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and the locks of POSIX")
def test_two_that_save_at_once_and_one_that_loads(tmp_path: Path) -> None:
    stdout = run_apart(
        """
        savers = [start([(new, "200KB"), (new, "5GB")]), start([(old, "200KB"), (old, "5GB")])]
        for _ in range(150):
            print(whole(BertForTokenClassification.from_pretrained(folder), old, new))
        for saver in savers:
            stop(saver)
        old.save_pretrained(folder)
        assert_nothing_else_in(folder)
        """,
        tmp_path,
    )
    assert set(stdout.split()) == {"o", "n"}


def test_a_config_that_cannot_be_written_fails_before_the_weights_are_replaced(tmp_path: Path) -> None:
    state = write(tmp_path)
    model = load(tmp_path)
    model.config.note = "half a pair: \ud83d"  # can be written, in ASCII
    model.save_pretrained(tmp_path)
    assert load(tmp_path).config.note == "half a pair: \ud83d"
    model.config.note = object()
    with torch.no_grad():
        model.classifier.bias.add_(1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).classifier.bias, state["classifier.bias"])


def test_saving_over_an_index_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    model = minibert.BertForTokenClassification(BertConfig(**fields_of(TAGGER)))
    model.save_pretrained(tmp_path)
    assert files_in(tmp_path) == {"config.json", "model.safetensors"}


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_saved_files_have_the_users_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    model = minibert.BertForTokenClassification(BertConfig(**fields_of(TAGGER)))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_only_shards_of_ours_are_removed(tmp_path: Path) -> None:
    model = minibert.BertForTokenClassification(BertConfig(**fields_of(TAGGER)))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] |= {"a": "notes.txt", "b": "pytorch_model.bin", "c": "x" * 5000}
    path.write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "pytorch_model.bin").write_text("mine too")
    with pytest.raises(CheckpointError, match=r"x{5000}"):
        load(tmp_path)
    model.save_pretrained(tmp_path)
    assert files_in(tmp_path) == {"config.json", "model.safetensors", "notes.txt", "pytorch_model.bin"}


@pytest.mark.parametrize("size", [0, -1, True, 1.5, float("nan"), None, "", "0GB", "-1KB", "5GiB", "9" * 400 + "GB"])
def test_a_nonsense_shard_size_is_refused_before_anything_is_written(size: Any, tmp_path: Path) -> None:
    model = minibert.BertForTokenClassification(BertConfig(**fields_of(TAGGER)))
    with pytest.raises(minibert.MinibertError, match="max_shard_size: expected a positive number of bytes"):
        model.save_pretrained(tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("size", [10_000, "10000", "10KB", "10 KB", "10000B"])
def test_spellings_of_one_shard_size(size: int | str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    minibert.BertForTokenClassification(BertConfig(**fields_of(TAGGER))).save_pretrained(tmp_path, max_shard_size=size)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert len(set(index["weight_map"].values())) == 6


def test_weights_that_share_memory_are_saved_under_each_name(tmp_path: Path) -> None:
    model = minibert.BertForTokenClassification(BertConfig(**fields_of(TAGGER)))
    layers = model.bert.encoder.layer
    layers[1].output.dense.weight = layers[0].output.dense.weight
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = minibert.BertForMaskedLM(BertConfig(**fields_of("BertForMaskedLM")))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any("decoder" in name for name in stored)
    loaded = load(tmp_path, "BertForMaskedLM")
    assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight


def test_a_failed_save_leaves_the_old_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minibert.checkpoint import saving

    write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = load(tmp_path)

    def full_disk(_state: Any, path: Path, *_: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(saving, "save_file", full_disk)
    with pytest.raises(CheckpointError, match=r"cannot be written to \(No space left on device\); what was there"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_remembers_where_it_came_from_without_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a" / "ckpt")
    (tmp_path / "a" / "ckpt" / "vocab.txt").write_text("a's")
    write(tmp_path / "b" / "ckpt")
    (tmp_path / "b" / "ckpt" / "vocab.txt").write_text("b's")
    monkeypatch.chdir(tmp_path / "a")
    model = load(Path("ckpt"), **{"token": "hf_secret"})
    assert b"hf_secret" not in pickle.dumps(model)
    assert "hf_secret" not in repr(minibert.hub.Source("ckpt", **{"token": "hf_secret"}))
    monkeypatch.chdir(tmp_path / "b")
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "vocab.txt").read_text() == "a's"


def test_saving_over_the_file_a_model_is_mapped_from(tmp_path: Path) -> None:
    state = write(tmp_path)
    model = load(tmp_path)
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).classifier.weight, state["classifier.weight"])
    assert torch.equal(model.classifier.weight, state["classifier.weight"])
