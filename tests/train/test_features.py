"""Texts to rows and batches: nothing cut, labels where their tokens are, and a cache that knows what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer

from minibert import BertConfig, BertForTokenClassification, DataError
from minibert.text.labels import LabelSet, Span
from minibert.text.tokenizer import load_tokenizer
from minibert.train.data import Example
from minibert.train.features import Collator, PackingCollator, TokenBatches, as_dataset, batches_by_tokens, features
from minibert.train.optimizer import parameter_groups
from tagger import write_checkpoint

LABELS = LabelSet(["O", "B-TIME", "I-TIME", "B-PER", "I-PER"])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_checkpoint(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


def example(text: str, *spans: tuple[str, int, int], place: str = "a.txt, line 1") -> Example:
    return Example(text, tuple(Span(*span) for span in spans), None, None, (), place)


def test_rows_have_a_label_for_every_token(tokenizer: Tokenizer) -> None:
    rows = features(as_dataset([example("住院 2024年", ("TIME", 3, 8)), example("")]), tokenizer, LABELS)
    assert rows.column_names == ["input_ids", "labels", "length", "unspelled"]
    assert [tokenizer.decode(rows[0]["input_ids"], skip_special_tokens=False)] == ["[CLS] 住 院 2024 年 [SEP]"]
    assert rows[0]["labels"] == [-100, 0, 0, 1, 2, -100]
    assert (rows[1]["labels"], rows["length"]) == ([-100, -100], [6, 2])


def test_how_text_is_split_and_what_cannot_be_spelled(tokenizer: Tokenizer) -> None:
    dataset = as_dataset([example("2024年", ("TIME", 2, 5))])
    assert features(dataset, tokenizer, LABELS)["unspelled"] == [1]
    by_character = features(dataset, tokenizer, LABELS, split_mode="characters")
    assert (by_character["labels"], by_character["unspelled"]) == ([[-100, 0, 0, 1, 2, 2, -100]], [0])


def test_a_word_of_several_pieces(tokenizer: Tokenizer) -> None:  # Z14
    text = "iphone16 好"
    dataset = as_dataset([example(text, ("PROD", 0, 8))])
    bio, bioes = LabelSet(["O", "B-PROD", "I-PROD"]), LabelSet(["O", "B-PROD", "I-PROD", "E-PROD", "S-PROD"])
    rows = features(dataset, tokenizer, bio)
    assert tokenizer.decode(rows[0]["input_ids"], skip_special_tokens=False) == "[CLS] iphone ##16 好 [SEP]"
    assert rows[0]["labels"] == [-100, 1, -100, 0, -100]
    assert features(dataset, tokenizer, bio, label_pieces="all")[0]["labels"] == [-100, 1, 2, 0, -100]
    assert features(dataset, tokenizer, bioes)[0]["labels"] == [-100, 4, -100, 0, -100]
    assert features(dataset, tokenizer, bioes, label_pieces="all")[0]["labels"] == [-100, 1, 3, 0, -100]
    part = as_dataset([example(text, ("PROD", 0, 6))])  # a piece alone can be labelled only where all are
    assert features(part, tokenizer, bio)["unspelled"] == [1]
    assert features(part, tokenizer, bio, label_pieces="all")["unspelled"] == [0]
    with pytest.raises(DataError, match="label_pieces: expected first or all, got 'last'"):
        features(dataset, tokenizer, bio, label_pieces="last")


def test_a_text_longer_than_a_row_is_parted_and_not_cut(tokenizer: Tokenizer) -> None:  # Z13
    text = "我住在北京。" * 30 + "张三" + "好" * 18
    rows = features(as_dataset([example(text, ("PER", 180, 182))]), tokenizer, LABELS, max_length=50)
    assert all(length <= 50 for length in rows["length"])
    labels = [label for row in rows["labels"] for label in row if label != -100]
    assert len(labels) == len(text)
    assert [place for place, label in enumerate(labels) if label] == [180, 181]
    texts = [tokenizer.decode(ids) for ids in rows["input_ids"][:-1]]
    assert all(text.endswith("。") for text in texts[:2])  # a row ends with a sentence where it can


def test_an_unknown_type_is_named_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"a\.txt, line 7: type 'LOC' is not among PER, TIME"):
        features(as_dataset([example("北京", ("LOC", 0, 2), place="a.txt, line 7")]), tokenizer, LABELS)


def test_the_cache_hits_for_the_same_and_misses_for_anything_else(tokenizer: Tokenizer, tmp_path: Path) -> None:
    dataset = as_dataset([example("住院 2024年", ("TIME", 3, 8))])
    same = [features(dataset, tokenizer, LABELS, 20)._fingerprint for _ in range(2)]
    assert same[0] == same[1]
    reordered = LabelSet(["O", "B-PER", "I-PER", "B-TIME", "I-TIME"])
    write_checkpoint(tmp_path / "other")
    with (tmp_path / "other" / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write("新\n")
    others = [
        features(dataset, tokenizer, reordered, 20),
        features(dataset, tokenizer, LABELS, 21),
        features(dataset, tokenizer, LABELS, 20, "characters"),
        features(dataset, tokenizer, LABELS, 20, label_pieces="all"),
        features(dataset, load_tokenizer(tmp_path / "other"), LABELS, 20),
        features(as_dataset([example("住院 2023年", ("TIME", 3, 8))]), tokenizer, LABELS, 20),
    ]
    assert len({same[0], *(other._fingerprint for other in others)}) == 7


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_labels_are_padded_with_their_tokens(side: str, multiple: int, kind: Any) -> None:  # E15
    rows = [{"input_ids": kind([2, 9, 3]), "labels": kind([-100, 1, -100])}]
    rows.append({"input_ids": kind([2, 7, 8, 9, 3]), "labels": kind([-100, 0, 1, 2, -100])})
    batch = Collator(5, side, multiple)(rows)
    width = 5 if multiple == 1 else 8
    assert {name: tensor.shape for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), torch.Size([2, width])
    )
    cells = slice(width - 3, width) if side == "left" else slice(0, 3)
    assert batch["labels"][0, cells].tolist() == [-100, 1, -100]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 5).all()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    nested = Collator(5, side, multiple)([rows])
    assert all(torch.equal(tensor, nested[name]) for name, tensor in batch.items())
    for collator in (Collator(), PackingCollator()):
        with pytest.raises(DataError, match="row 1 of the batch: 1 labels for 2 tokens"):
            collator([rows[0], {"input_ids": [2, 3], "labels": [1]}])


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_packed_rows_lie_one_behind_another(kind: Any) -> None:
    rows = [{"input_ids": kind([2, 9, 3]), "labels": kind([-100, 1, -100])}]
    rows.append({"input_ids": kind([2, 7, 8, 9, 3]), "labels": kind([-100, 0, 1, 2, -100])})
    for given in (rows, [rows]):
        batch = PackingCollator()(given)
        assert {name: tensor.tolist() for name, tensor in batch.items()} == {
            "input_ids": [[2, 9, 3, 2, 7, 8, 9, 3]],
            "labels": [[-100, 1, -100, -100, 0, 1, 2, -100]],
            "sequence_lengths": [3, 5],
        }
    assert set(PackingCollator()([{"input_ids": [2, 3]}])) == {"input_ids", "sequence_lengths"}


def test_batches_by_tokens_hold_every_row_once() -> None:
    lengths = torch.randint(2, 100, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    runs = [list(batches_by_tokens(lengths, 1000, torch.Generator().manual_seed(seed))) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    for batches in runs:
        assert sorted(row for batch in batches for row in batch) == list(range(500))
        assert all(sum(lengths[row] for row in batch) <= 1000 for batch in batches)
        real = sum(lengths)
        assert sum(max(lengths[row] for row in batch) * len(batch) for batch in batches) < 1.25 * real
    assert list(batches_by_tokens([5000, 2], 1000)) == [[0], [1]]
    assert batches_by_tokens([3, 5, 4], 9) == [[1, 2], [0]]


def rows_of(lengths: list[int]) -> datasets.Dataset:
    columns = {"input_ids": [[n] * length for n, length in enumerate(lengths)], "length": lengths}
    return datasets.Dataset.from_dict({**columns, "labels": columns["input_ids"]})


@pytest.mark.parametrize("multiple", [1, 2, 7])
def test_token_batches_are_other_ones_each_epoch_but_as_many(multiple: int) -> None:
    lengths = torch.randint(2, 100, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    epochs = []
    batches = TokenBatches(rows_of(lengths), 500, epochs=5, seed=3, multiple_of=multiple)
    for epoch in range(5):
        batches.set_epoch(epoch)
        items = [batches[n] for n in range(len(batches))]
        assert len(items) == len(batches) == len(batches.batches)
        assert len(batches) % multiple == 0
        assert sorted(row["input_ids"][0] for item in items for row in item) == list(range(200))
        assert all(sum(row["length"] for row in item) <= 500 for item in items)
        assert all(item for item in items)
        epochs.append(batches.batches)
    assert epochs[0] != epochs[1]
    again = TokenBatches(rows_of(lengths), 500, epochs=5, seed=3, multiple_of=multiple)
    again.set_epoch(4)
    assert again.batches == epochs[4]
    assert len(batches) < 1.2 * sum(lengths) / 500 + multiple


def test_there_are_no_more_batches_than_rows() -> None:
    batches = TokenBatches(rows_of([3, 2, 900]), 500, multiple_of=4)
    assert sorted(map(len, batches.batches)) == [1, 1, 1]


def test_every_parameter_learns_in_one_group_at_its_own_rate() -> None:
    model = BertForTokenClassification(
        BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
    )
    model.bert.embeddings.token_type_embeddings.weight.requires_grad_(requires_grad=False)
    groups = parameter_groups(model, 1e-3, 0.1, layer_decay=0.5, head_learning_rate=1e-2)
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rates)
    for name, parameter in model.named_parameters():
        if "token_type" in name:
            assert id(parameter) not in rates
            continue
        rate, decay = rates[id(parameter)]
        expected = (
            1e-2 if "classifier" in name else 1e-3 * 0.5 ** (3 if "embeddings" in name else 2 - int(name.split(".")[3]))
        )
        assert rate == pytest.approx(expected), name
        assert decay == (0.0 if name.endswith("bias") or "LayerNorm" in name else 0.1), name
    (plain,) = {group["lr"] for group in parameter_groups(model, 1e-3, 0.1)}
    assert plain == 1e-3
