"""The benchmark compares like with like: the same weights and inputs, peers in turn, numbers checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from minibert import BertConfig, BertForTokenClassification, MinibertError, TokenClassifier
from minibert.bench import measure as measuring
from minibert.bench import workers
from minibert.bench.measure import REFERENCE, bench, write_bert_base
from minibert.bench.peers import PEERS, Setting
from minibert.bench.processes import timed
from minibert.bench.training import rows_of_workload
from minibert.bench.workers import Worker, timed_turn
from minibert.bench.workloads import WORKLOADS, Workload, batched, padded, workloads
from minibert.cli import main
from minibert.quiet import quiet
from tagger import write_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 256, "num_labels": 18,
}  # fmt: skip
OURS = ("minibert plain", "minibert fp32", "minibert int8", "transformers sdpa")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    BertForTokenClassification(BertConfig(**SIZES, initializer_range=0.1)).save_pretrained(folder)
    return folder


def test_workloads_are_those_that_are_described_and_always_the_same() -> None:
    made = {workload.name: workload for workload in workloads(21128)}
    assert tuple(made) == WORKLOADS
    shapes = {name: [batch.ids.shape for batch in workload.batches] for name, workload in made.items()}
    assert shapes["lat32"] == [(1, 32)]
    assert shapes["b8x128"] == [(8, 128)]
    lengths = [int(length) for batch in made["mixed"].batches for length in batch.mask.sum(1)]
    assert len(lengths) == 64
    assert min(lengths) >= 8
    assert max(lengths) <= 256
    assert 35 < np.median(lengths) < 55
    assert made["mixed"].tokens == made["sorted"].tokens == sum(lengths)
    assert made["sorted"].padding < made["mixed"].padding / 2
    for workload in made.values():
        for batch in workload.batches:
            assert ((batch.ids == 0) == (batch.mask == 0)).all()
    (again,) = workloads(21128, ["mixed"])
    assert all(np.array_equal(one.ids, two.ids) for one, two in zip(again.batches, made["mixed"].batches, strict=True))


def test_padding_is_behind_and_no_sequence_is_lost() -> None:
    first, second = batched([np.array([5]), np.array([6, 7, 8]), np.array([9])], 2)
    assert first.ids.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert first.mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert second.ids.tolist() == [[9]]


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_gives_the_logits_of_the_same_model(name: str, checkpoint: Path, tmp_path: Path) -> None:
    batches = [padded([np.arange(5, 30), np.arange(7, 11)]), padded([np.arange(100, 132)])]
    setting = Setting(checkpoint, tmp_path, 1)
    reference = PEERS[REFERENCE](setting)
    try:
        with quiet():
            run = PEERS[name](setting)
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    for batch in batches:
        ours, theirs, real = run(batch), reference(batch), batch.mask.astype(bool)
        difference = np.abs(ours[real] - theirs[real]).max()
        assert difference < (0.3 * np.abs(theirs).max() if "int8" in name else 1e-4)
        assert ours.shape == (*batch.ids.shape, 18)


def test_peers_take_turns_and_each_begins_a_round(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    calls: list[str] = []
    made: list[str] = []

    class Recorded:
        def __init__(self, name: str, _: Setting) -> None:
            self.name = name
            made.append(name)

        def logits(self, workload: Workload) -> Any:
            return np.zeros((workload.tokens, 18), np.float32)

        def turn(self, _: Workload) -> tuple[float, float]:
            calls.append(self.name)
            return len(calls) / 10, 100.0

        def close(self) -> None:
            made.remove(self.name)

    monkeypatch.setattr(measuring, "PEERS", dict.fromkeys("abc"))
    monkeypatch.setattr(measuring, "Worker", Recorded)
    monkeypatch.setattr(measuring, "PAUSE", 0)
    (section,) = bench(checkpoint, ["lat32"], rounds=3).sections
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert {name: timing.seconds for name, timing in section.timings.items()} == {
        "a": [0.1, 0.6, 0.8], "b": [0.2, 0.4, 0.9], "c": [0.3, 0.5, 0.7],
    }  # fmt: skip
    assert {timing.megabytes for timing in section.timings.values()} == {100.0}
    assert made == []  # all were closed


def test_a_turn_repeats_what_is_short_and_does_not_what_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    monkeypatch.setattr(workers.time, "perf_counter", lambda: sum(calls))
    monkeypatch.setattr(workers, "TURN", 4)
    assert timed_turn(lambda: calls.append(8)) == 8
    assert calls == [8]
    assert timed_turn(lambda: calls.append(1 if len(calls) > 1 else 3)) == 1
    assert calls == [8, 3, 1, 1, 1, 1]  # the first of a turn is not counted


def test_a_peer_that_fails_says_why(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(MinibertError, match=r"minibert fp32 failed:\n(?s:.*)CheckpointError: .*nowhere"):
        Worker("minibert fp32", Setting(tmp_path / "nowhere", tmp_path, 1))
    worker = Worker("minibert fp32", Setting(checkpoint, tmp_path, 1))
    worker.process.kill()
    (workload,) = workloads(300, ["lat32"])
    with pytest.raises(MinibertError, match="minibert fp32: its process ended with status -9"):
        worker.logits(workload)


def test_a_peer_that_is_not_installed_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "onnx.py").write_text("raise ModuleNotFoundError('No module named onnx', name='onnx')")
    monkeypatch.syspath_prepend(tmp_path)  # which a new process is given, too
    results = bench(checkpoint, ["lat32"], ["minibert fp32", "onnxruntime fp32"], rounds=1)
    assert results.left_out.keys() == {"onnxruntime fp32"}
    assert "is not installed" in results.left_out["onnxruntime fp32"]
    assert results.sections[0].timings.keys() == {"minibert fp32"}
    assert any(line.startswith("left out: onnxruntime fp32 (onnx") for line in results.lines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["big"]}, "workload: expected lat32, .* got 'big'"),
        ({"peers": ["tf"]}, "peer: expected minibert plain, .* got 'tf'"),
    ],
)
def test_a_name_that_is_none_is_refused(options: dict[str, Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(MinibertError, match=message):
        bench(checkpoint, **options)


def test_the_command_prints_tables_and_a_last_line_of_json(checkpoint: Path) -> None:
    peers = [argument for name in OURS for argument in ("--peer", name)]
    arguments = ["bench", "--model", str(checkpoint), "--workload", "lat32", "--workload", "mixed", "--rounds", "2"]
    before = torch.get_num_threads()
    result = CliRunner().invoke(main, [*arguments, *peers, "--threads", "1"], catch_exceptions=False)
    torch.set_num_threads(before)
    *lines, last = result.stdout.splitlines()
    found = json.loads(last)
    assert found["machine"]["threads"] == "1"
    assert found["machine"]["torch"] == torch.__version__
    assert [section["name"] for section in found["sections"]] == ["lat32", "mixed"]
    timings = found["sections"][1]["timings"]
    assert found["sections"][1]["amount"] > 2000
    assert timings.keys() == set(OURS)
    assert all(len(peer["seconds"]) == 2 for peer in timings.values())
    assert timings["transformers sdpa"]["difference"] is None
    assert timings["minibert fp32"]["difference"] < 1e-5
    assert timings["minibert int8"]["difference"] > 1e-5
    rows = [line for line in lines if line.startswith("minibert fp32")]
    assert len(rows) == 2


def test_texts_to_entities_and_the_first_answer_are_timed(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("王小明住在北京。\n\n今天天气很好\n上海\n", encoding="utf-8")
    write_checkpoint(tmp_path / "tagger", max_position_embeddings=64)
    arguments = ["bench", "--model", str(tmp_path / "tagger"), "--workload", "text", "--workload", "start"]
    result = CliRunner().invoke(
        main, [*arguments, "--texts", str(texts), "--limit", "2", "--rounds", "1"], catch_exceptions=False
    )
    text, start = json.loads(result.stdout.splitlines()[-1])["sections"]
    assert text["what"] == "2 texts to their entities, 14 characters"
    assert list(text["timings"])[:2] == ["minibert fp32", "minibert int8"]
    assert text["base"].startswith("pipeline, batch ")
    assert list(start["timings"]) == ["floor", "minibert fp32", "minibert int8", "pipeline"]
    for timing in start["timings"].values():
        assert 0 < timing["seconds"][0] < 60
        assert 100 < timing["megabytes"] < 2000
    assert any(line.startswith("floor ") for line in result.stdout.splitlines())
    with pytest.raises(MinibertError, match=r"workload text: expected texts \(--texts FILE\), got none"):
        bench(tmp_path / "tagger", ["text"])


def test_loading_and_training_steps_are_timed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tagger", max_position_embeddings=64)
    gold = tmp_path / "gold.txt"
    gold.write_text("张 B-PER\n三 I-PER\n在 O\n\n北 B-LOC\n京 I-LOC\n\n" * 64, encoding="utf-8")
    arguments = ["bench", "--model", str(tmp_path / "tagger"), "--workload", "load", "--workload", "train"]
    result = CliRunner().invoke(
        main, [*arguments, "--labelled", str(gold), "--rounds", "1", "--threads", "1"], catch_exceptions=False
    )
    load, train = json.loads(result.stdout.splitlines()[-1])["sections"]
    assert list(load["timings"]) == list(train["timings"]) == ["minibert", "transformers"]
    assert load["base"] == train["base"] == "transformers"
    assert all(0 < timing["seconds"][0] < 60 for timing in load["timings"].values())
    assert train["amount"] == 32 * 9 // 2  # five and four tokens, [CLS] and [SEP] among them
    assert {len(timing["seconds"]) for timing in train["timings"].values()} == {4 - measuring.WARM_UP}
    assert train["timings"]["minibert"]["difference"] < 1e-4
    assert train["timings"]["transformers"]["difference"] is None


def test_too_few_rows_to_train_on_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tagger", max_position_embeddings=64)
    gold = tmp_path / "gold.txt"
    gold.write_text("张 B-PER\n三 I-PER\n\n" * 95, encoding="utf-8")
    with pytest.raises(MinibertError, match="workload train: expected at least 96 rows of labelled text, got 95"):
        bench(tmp_path / "tagger", ["train"], labelled=gold)


def test_training_rows_are_random_but_the_same_without_a_file() -> None:
    (mixed,) = workloads(300, ["mixed"])
    rows, again = (rows_of_workload(mixed, 18) for _ in range(2))
    assert rows == again
    assert len(rows) == 32 * 20
    assert all(len(row["input_ids"]) == len(row["labels"]) for row in rows)
    assert {label for row in rows for label in row["labels"]} == set(range(18))
    assert sum(len(row["input_ids"]) for row in rows[:64]) == mixed.tokens


def test_a_process_that_fails_is_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        timed([sys.executable, "-c", "raise SystemExit(3)"], 1)


def test_bert_base_is_written_with_18_labels_and_a_word_for_every_id(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(measuring, "BertConfig", lambda **given: BertConfig(**SIZES | given))
    write_bert_base(tmp_path / "bert")
    words = (tmp_path / "bert" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert len(words) == len(set(words)) == 21128
    assert TokenClassifier.from_pretrained(tmp_path / "bert").labels.scheme == "BIO"


def test_quiet_silences_even_what_is_printed_below_python(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet():
        os.write(1, b"noise\n")
    os.write(1, b"heard\n")
    assert capfd.readouterr().out == "heard\n"


def test_the_memory_of_a_process_is_its_own() -> None:
    ours = bytearray(400_000_000)  # which the child would count if it were forked from here
    _, megabytes = timed([sys.executable, "-S", "-c", "x = bytearray(100_000_000)"], 1)
    assert 100 < megabytes < 200
    assert len(ours) == 400_000_000
