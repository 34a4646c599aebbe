"""The checkpoint's own tokeniser: the same ids as transformers', nothing cut, offsets in the caller's string."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers

from minibert import CheckpointError
from minibert.text.tokenizer import cannot_spell_capitals, load_tokenizer
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


ADDED = {"content": "Foo", "special": False, "normalized": True, "lstrip": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [True, False, None])
@pytest.mark.parametrize("han", [True, False])
def test_every_setting_gives_the_ids_of_transformers(
    lower: bool, strip: bool | None, han: bool, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path)
    names = {"unk": "<unk>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "mask": "<mask>"}
    vocabulary = (tmp_path / "vocab.txt").read_text(encoding="utf-8")
    for name, own in names.items():
        vocabulary = vocabulary.replace(f"[{name.upper()}]", own)
    (tmp_path / "vocab.txt").write_text(vocabulary + "上海\né\nA\n", encoding="utf-8")
    count = len(vocabulary.splitlines()) + 3
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lower,
        "strip_accents": strip,
        "tokenize_chinese_chars": han,
        "never_split": ["上海"],  # transformers v5 ignores it
        "added_tokens_decoder": {str(count): ADDED},
        "additional_special_tokens": ["<e>"],
        **{f"{name}_token": own for name, own in names.items()},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.BertTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in (*TEXTS, "上海 É é A a Foo foo xFoox", "e\u0301 \u200b\ufeff\x00 İstanbul ẞ"):
        assert tokenizer.encode(text).ids == reference(text)["input_ids"], text
    assert tokenizer.token_to_id("<e>") == reference.convert_tokens_to_ids("<e>")


@pytest.mark.parametrize("written", ["vocab.txt", "tokenizer.json"])
def test_special_tokens_that_somebody_typed_are_ordinary_text(written: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    if written == "tokenizer.json":
        transformers.BertTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
        assert (tmp_path / "tokenizer.json").exists()
    tokenizer = load_tokenizer(tmp_path)
    encoding = tokenizer.encode("上[SEP]海 [MASK]", add_special_tokens=False)
    assert not {0, 2, 3, 4} & set(encoding.ids)
    assert encoding.offsets[:2] == [(0, 1), (1, 2)]
    assert tokenizer.encode("上").ids[0] == 2  # its own stay


def test_many_threads_get_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    texts = [f"北京{number} 上海wifi" * 20 for number in range(50)]
    expected = [tokenizer.encode(text).ids for text in texts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(lambda text: tokenizer.encode(text).ids, texts)) == expected


@pytest.mark.parametrize("written", ["vocab.txt", "tokenizer.json"])
def test_text_can_be_lower_cased_for_a_model_that_keeps_capitals(written: str, tmp_path: Path) -> None:  # Z04
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    if written == "tokenizer.json":
        transformers.BertTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    kept, lowered = load_tokenizer(tmp_path), load_tokenizer(tmp_path, lower_case=True)
    assert kept.encode("AAA上海", add_special_tokens=False).tokens == ["[UNK]", "上", "海"]
    assert lowered.encode("AAA上海", add_special_tokens=False).tokens == ["a", "##a", "##a", "上", "海"]
    assert lowered.encode("AAA上海", add_special_tokens=False).offsets == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert cannot_spell_capitals(kept)
    assert not cannot_spell_capitals(lowered)


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
        ("vocab.txt", b"a\nb\n", r"\[UNK\], \[CLS\], \[SEP\], \[MASK\] is not in it"),
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
