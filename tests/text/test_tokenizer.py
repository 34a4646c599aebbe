"""The checkpoint's own tokeniser: the same ids as transformers', nothing cut, offsets in the caller's string."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from minibert import CheckpointError
from minibert.text.tokenizer import load_tokenizer
from tagger import write_checkpoint

TEXTS = (
    "今天天气很好。",
    "AAA上海 wifi app",
    "海视通 QX-AV-HDMI16F 混合矩阵",
    "café naïve",
    "上\u3000海\r\n北京",
    "张𠮷三",
    "",
    "  ",
)


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"do_lower_case": True}, {"strip_accents": False}])
def test_vocab_txt_gives_the_ids_of_transformers(settings: dict[str, bool], tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    reference = transformers.BertTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == reference(text)["input_ids"], text


def test_tokenizer_json_is_preferred_and_gives_the_ids_of_transformers(minilm_dir: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(minilm_dir)
    tokenizer = load_tokenizer(minilm_dir)
    for text in (*TEXTS, "The quick brown fox"):
        assert tokenizer.encode(text).ids == reference(text, truncation=False)["input_ids"]


def test_truncation_and_padding_of_the_file_are_switched_off(minilm_dir: Path) -> None:
    text = "word " * 1000
    assert json.loads((minilm_dir / "tokenizer.json").read_text(encoding="utf-8"))["truncation"] is not None
    assert [len(e.ids) for e in load_tokenizer(minilm_dir).encode_batch([text, "word"])] == [1002, 3]


def test_the_real_chinese_vocabulary(data_dir: Path) -> None:
    tokenizer = load_tokenizer(data_dir / "bert-base-chinese")
    reference = transformers.AutoTokenizer.from_pretrained(data_dir / "bert-base-chinese")
    lines = (data_dir / "text" / "wiki_lines_zh.txt").read_text(encoding="utf-8").splitlines()[:300]
    for line in (*lines, *TEXTS):
        assert tokenizer.encode(line).ids == reference(line)["input_ids"]


def test_offsets_are_code_points_of_the_text_given(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    encoding = load_tokenizer(tmp_path).encode("海视通 QX张𠮷三", add_special_tokens=False)
    assert encoding.offsets == [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "not a tokenizer file"),
        ("tokenizer_config.json", b"{", "not a JSON file"),
        ("tokenizer_config.json", b"[]", "expected a JSON object, got list"),
        ("vocab.txt", b"\xff\xfe\xff", "not a BERT vocabulary"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_no_tokeniser_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.json or vocab\.txt"):
        load_tokenizer(tmp_path)
