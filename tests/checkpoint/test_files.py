"""Which weight files are taken, that every format gives the same model, and what a bad file is told to be."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import minibert
from minibert import BertConfig, CheckpointError
from minibert.checkpoint.files import WeightFiles
from minibert.hub import Source
from reference import fields_of

State = dict[str, Tensor]


@pytest.fixture
def state(tmp_path: Path) -> State:
    """A tagger's weights; `tmp_path` holds its config.json and no weights."""
    model = minibert.BertForTokenClassification(BertConfig(**fields_of("BertForTokenClassification")))
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    return model.state_dict()


def load(directory: Path, **options: Any) -> Any:
    return minibert.BertForTokenClassification.from_pretrained(directory, **options)


def assert_loads(directory: Path, state: State) -> None:
    loaded = load(directory).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def as_safetensors(directory: Path, state: State) -> None:
    save_file(state, directory / "model.safetensors")


def as_pickle(directory: Path, state: State) -> None:
    torch.save(state, directory / "pytorch_model.bin")


def as_old_pickle(directory: Path, state: State) -> None:
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_shards(directory: Path, state: State, stem: str = "model", ending: str = "safetensors") -> None:
    names = list(state)
    weight_map = {}
    for number in range(3):
        file_name = f"{stem}-{number + 1:05}-of-00003.{ending}"
        part = {name: state[name] for name in names[number::3]}
        weight_map |= dict.fromkeys(part, file_name)
        if ending == "bin":
            torch.save(part, directory / file_name)
        else:
            save_file(part, directory / file_name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / f"{stem}.{ending}.index.json").write_text(json.dumps(index), encoding="utf-8")


def as_pickle_shards(directory: Path, state: State) -> None:
    as_shards(directory, state, "pytorch_model", "bin")


FORMATS = (as_safetensors, as_shards, as_pickle, as_old_pickle, as_pickle_shards)


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_model(write: Callable[[Path, State], None], tmp_path: Path, state: State) -> None:
    write(tmp_path, state)
    assert_loads(tmp_path, state)


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("wrapper", ["module.", "model.", "_orig_mod.", "module.model.", "module._orig_mod."])
def test_one_wrapper_prefix_is_left_off_and_said(
    write: Callable[[Path, State], None], wrapper: str, tmp_path: Path, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {wrapper + name: tensor for name, tensor in state.items()})
    assert_loads(tmp_path, state)
    assert f"every name begins with {wrapper}, which is left off" in caplog.text


def test_a_prefix_that_only_some_names_have_is_left_alone(tmp_path: Path, state: State) -> None:
    as_safetensors(tmp_path, {("module." if "layer.0" in n else "") + n: tensor for n, tensor in state.items()})
    with pytest.raises(CheckpointError, match=r"unexpected \(16\): module\.bert\.encoder\.layer\.0"):
        load(tmp_path)


def test_safetensors_come_before_pickles_and_one_file_before_shards(tmp_path: Path, state: State) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    as_pickle_shards(tmp_path, zeros)
    assert_loads(tmp_path, zeros)
    ones = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    as_pickle(tmp_path, ones)
    assert_loads(tmp_path, ones)
    twos = {name: torch.full_like(tensor, 2) for name, tensor in state.items()}
    as_shards(tmp_path, twos)
    assert_loads(tmp_path, twos)
    as_safetensors(tmp_path, state)
    assert_loads(tmp_path, state)


def test_a_damaged_file_is_never_replaced_by_an_older_one(tmp_path: Path, state: State) -> None:
    as_pickle(tmp_path, state)
    as_safetensors(tmp_path, state)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: incomplete or corrupt"):
        load(tmp_path)


# Shards.


@pytest.mark.parametrize("write", [as_shards, as_pickle_shards])
@pytest.mark.parametrize("gone", [1, 3])
def test_a_missing_shard_is_an_error_in_every_mode(
    write: Callable[[Path, State], None], gone: int, tmp_path: Path, state: State
) -> None:
    write(tmp_path, state)
    shards = sorted(tmp_path.glob("*-of-00003.*"))
    for shard in shards[:gone]:
        shard.unlink()
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(CheckpointError, match="not in the directory") as caught:
            load(tmp_path, **options)
        assert all(shard.name in str(caught.value) for shard in shards[:gone])
        assert str(tmp_path) in str(caught.value)


def test_a_stale_index_or_shard_is_an_error(tmp_path: Path, state: State) -> None:
    as_shards(tmp_path, state)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    name = "classifier.bias"
    other = next(shard for shard in set(index["weight_map"].values()) if shard != index["weight_map"][name])
    for change, message in (
        ({name: other}, rf"{name} is in {index['weight_map'][name]}, by the index in {other}"),
        ({"bert.other": "model-00001-of-00003.safetensors"}, "bert.other is in none of them"),
        ({name: None}, r"classifier\.bias is in model-.*, by the index in none"),
    ):
        weight_map = {k: v for k, v in (index["weight_map"] | change).items() if v is not None}
        path.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)


def test_one_tensor_in_two_shards_is_an_error(tmp_path: Path, state: State) -> None:
    as_shards(tmp_path, state)
    second = tmp_path / "model-00002-of-00003.safetensors"
    save_file(load_file(second) | {"bert.embeddings.word_embeddings.weight": torch.zeros(99, 20)}, second)
    with pytest.raises(CheckpointError, match=r"word_embeddings\.weight is in model-0000\d-of-00003\.safetensors too"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "../model.safetensors", "/etc/passwd", "a/b", "..", "", "a\\b"])
def test_an_index_may_not_point_outside_its_directory(name: str, tmp_path: Path, state: State) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    as_safetensors(tmp_path, state)
    shutil.copy(tmp_path / "config.json", inside)
    index = {"weight_map": dict.fromkeys(state, name)}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match="not the plain name of a file beside the index"):
        load(inside)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "{}", "[" * 99999]
)
def test_an_index_that_is_none_is_named(content: str, tmp_path: Path, state: State) -> None:
    assert state
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"not a JSON file|expected weight_map|expected a JSON object") as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)


# Pickles.


class Exploit:
    """What a malicious file holds: unpickled without care, it makes a marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(zipped: bool, tmp_path: Path, state: State) -> None:
    marker = tmp_path / "marker"
    torch.save({**state, "x": Exploit(marker)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="refused, it holds more than tensors and could run code") as caught:
        load(tmp_path)
    assert str(tmp_path / "pytorch_model.bin") in str(caught.value)
    assert not marker.exists()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit(marker)))
    with pytest.raises(CheckpointError):
        load(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"a": 5}, {"state": {"a": torch.zeros(1)}}, torch.zeros(2)])
def test_a_pickle_of_something_else_is_named(content: Any, tmp_path: Path, state: State) -> None:
    assert state
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="expected a dictionary of tensors by name"):
        load(tmp_path)


def test_a_pickle_with_the_weights_one_level_down_says_where(tmp_path: Path, state: State) -> None:
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="they seem to be in 'state_dict', save that alone"):
        load(tmp_path)


@pytest.mark.parametrize("change", [{"classifier.weight": torch.eye(18, 20).to_sparse()}, {1: torch.zeros(1)}])
def test_a_pickle_of_tensors_that_are_not_plain_is_refused(change: Any, tmp_path: Path, state: State) -> None:
    torch.save(state | change, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"expected plain tensors by name, got .* for {next(iter(change))!r}"):
        load(tmp_path)


def test_parameters_that_share_memory_in_a_pickle_are_parted(tmp_path: Path, state: State) -> None:
    query, key = (f"bert.encoder.layer.0.attention.self.{name}.weight" for name in ("query", "key"))
    state[key] = state[query]
    state["classifier.bias"] = torch.ones(1).expand(18)
    torch.save(state, tmp_path / "pytorch_model.bin")
    model = load(tmp_path)
    assert_loads(tmp_path, state)
    with torch.no_grad():
        model.get_parameter(query).zero_()
        model.classifier.bias[0] = 7
    assert torch.equal(model.get_parameter(key), state[key])
    assert model.classifier.bias.tolist() == [7.0] + [1.0] * 17


@pytest.mark.parametrize("write", [as_safetensors, as_pickle])
def test_a_file_without_tensors_says_so(write: Callable[[Path, State], None], tmp_path: Path, state: State) -> None:
    assert state
    write(tmp_path, {})
    with pytest.raises(CheckpointError, match="holds no tensors"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 10, 1000, 0.6])
@pytest.mark.parametrize("write", [as_pickle, as_old_pickle])
def test_a_truncated_pickle_is_named(
    keep: float, write: Callable[[Path, State], None], tmp_path: Path, state: State
) -> None:
    write(tmp_path, state)
    path = tmp_path / "pytorch_model.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)


# Files that are something else.


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def one(offsets: str, shape: str = "[1]") -> bytes:
    return f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}'.encode()


BAD_FILES = {
    "empty": (b"", "the file is empty"),
    "seven bytes": (b"1234567", "incomplete or corrupt, 7 bytes"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "Git LFS pointer.*git lfs pull",
    ),
    "HTML": (b"<!DOCTYPE html><html>404</html>", "HTML page"),
    "header beyond the file": (struct.pack("<Q", 10**15) + b"{}", "header"),
    "header longer than the file": (struct.pack("<Q", 1000) + b"{}", "header"),
    "header of 100 MB": (with_header(b"{" + b" " * 100_000_100 + b"}"), "header too large"),
    "no JSON": (with_header(b"{not json}"), "JSON"),
    "not UTF-8": (with_header(b'{"\xff":' + one("[0,4]")[5:], b"\0" * 4), "UTF-8"),
    "data beyond the file": (with_header(one("[0,400]"), b"\0" * 4), "offset"),
    "data before the start": (with_header(one("[-4,0]"), b"\0" * 4), "JSON"),
    "a hole": (with_header(one("[4,8]"), b"\0" * 8), "offset"),
    "data nobody names": (with_header(one("[0,4]"), b"\0" * 400), "not fully covered"),
    "negative shape": (with_header(one("[0,4]", "[-1]"), b"\0" * 4), "JSON"),
    "shape beyond 64 bits": (with_header(one("[0,4]", "[99999999999999999999]"), b"\0" * 4), "JSON"),
    "one name twice": (with_header(one("[0,4]")[:-1] + b"," + one("[0,4]")[1:], b"\0" * 4), "a is in its header twice"),
    "overlapping data": (
        with_header(one("[0,8]", "[2]")[:-1] + b"," + one("[4,12]", "[2]")[1:].replace(b'"a"', b'"b"'), b"\0" * 12),
        "offset",
    ),
    "shape and bytes differ": (with_header(one("[0,4]", "[2]"), b"\0" * 4), "shape"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_told_what_it_is_in_under_a_second(kind: str, tmp_path: Path, state: State) -> None:
    assert state
    content, message = BAD_FILES[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert time.perf_counter() - start < 1
    assert str(path) in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_bad_file_takes_no_more_memory_than_its_own_size(tmp_path: Path, state: State) -> None:
    assert state
    code = """
import re, sys
from pathlib import Path
from checkpoint.test_files import BAD_FILES
from minibert import BertForTokenClassification, CheckpointError

folder, kind = Path(sys.argv[1]), sys.argv[2]
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

content = BAD_FILES[kind][0]
path = folder / "model.safetensors"
def attempt():
    path.write_bytes(content)
    try:
        BertForTokenClassification.from_pretrained(folder)
    except CheckpointError:
        pass

small, content = content, b"1234567"
attempt()  # what any load needs
content = small
del small
before = peak()
attempt()
print(peak() - before - path.stat().st_size)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    for kind in ("header of 100 MB", "header beyond the file", "data beyond the file", "shape and bytes differ"):
        command = [sys.executable, "-c", code, str(tmp_path), kind]
        grown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert int(grown) < 2_000_000, kind


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "model.ckpt.index"])
def test_other_frameworks_are_recognised_and_refused_with_advice(name: str, tmp_path: Path, state: State) -> None:
    assert state
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"{name}: .* weights are not read; convert them with transformers"):
        load(tmp_path)


def test_a_symlink_loop_is_named(tmp_path: Path, state: State) -> None:
    assert state
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \(.*symbolic links"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("../../blobs/0123")  # a Hub cache's folder, copied without the rest
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: cannot be read \(a link to a file that is not there"
    ):
        load(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are POSIX's")
@pytest.mark.parametrize("mode", [0o000, 0o111, 0o444])
def test_an_unreadable_directory_or_file_is_named(mode: int, tmp_path: Path, state: State) -> None:
    as_safetensors(tmp_path, state)
    (tmp_path / "model.safetensors").chmod(0o644)
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "model.safetensors"):
        before = path.stat().st_mode
        if path.is_file() and mode == 0o444:
            continue  # a file that can be read
        path.chmod(mode)
        as_root = os.geteuid() == 0
        try:
            if as_root:
                for parent in list(tmp_path.parents)[:2]:
                    parent.chmod(0o755)
                os.seteuid(65534)  # root may read everything
            if mode == 0o111 and path == tmp_path:
                load(tmp_path)  # files whose names are known can be read; only a list of them cannot
            else:
                with pytest.raises(minibert.MinibertError, match=r"cannot be read \(Permission denied\)"):
                    load(tmp_path)
        finally:
            if as_root:
                os.seteuid(0)
            path.chmod(before)


def test_tensors_without_dimensions_or_elements_are_no_trouble(tmp_path: Path) -> None:
    save_file({"a": torch.tensor(3.0), "b": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    with WeightFiles(Source(str(tmp_path))) as files:
        assert {name: tensor.shape for name, tensor in files.tensors.items()} == {"a": (), "b": (0, 3)}
        assert files.tensors["a"].read().item() == 3.0
        assert files.tensors["b"].read().shape == (0, 3)
