"""Labelled files of every kind there is, read without losing or shifting anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minibert import DataError
from minibert.train.data import read_examples


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("separator", ["\t", " "])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("between", ["", "\t", " "])
def test_columns(separator: str, ending: str, between: str, tmp_path: Path) -> None:
    rows = ["张 B-PER", "三 I-PER", "在 O", "", "北 B-LOC", "京 I-LOC", "", ""]
    lines = [row.replace(" ", separator) if row else between for row in rows]
    examples = read_examples(write(tmp_path / "a.txt", ending.join(lines)))
    assert [(e.text, e.entities) for e in examples] == [("张三在", (("PER", 0, 2),)), ("北京", (("LOC", 0, 2),))]
    assert examples[1].place == f"{tmp_path / 'a.txt'}, line 5"
    assert examples[0].tags == ("B-PER", "I-PER", "O")


def test_a_space_may_be_a_token_and_a_hash_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "上\tB-LOC\n \tI-LOC\n海\tI-LOC\n#\tO\n\n#tag\tO\nyes\tO\n")
    first, second = read_examples(path)
    assert (first.text, first.entities) == ("上 海#", (("LOC", 0, 3),))
    assert second.words == ("#tag", "yes")


def test_characters_with_their_place_in_the_word(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "科0\tB-ORG.NAM\n技1\tI-ORG.NAM\nt10\tO\n\ufffd\ufffd0\tO\n")
    (example,) = read_examples(path)
    assert example.words == ("科", "技", "t", "\ufffd")
    assert example.entities == (("ORG.NAM", 0, 2),)


def test_a_token_with_a_number_is_not_cut_where_others_have_none(tmp_path: Path) -> None:
    (example,) = read_examples(write(tmp_path / "a.txt", "在\tO\nG20\tB-ORG\n"))
    assert example.words == ("在", "G20")


def test_universal_ner(tmp_path: Path) -> None:
    content = "# newdoc id = a\n# sent_id = 1\n# text = 我爱New York。\n1\t我\tO\t-\t-\n2\t爱\tO\t-\t-\n"
    content += "3\tNew\tB-LOC\t-\tx\n4\tYork\tI-LOC\t-\t-\n5\t。\tO\t-\t-\n\n# text = other\n1\t北京\tB-LOC\t-\t-\n\n"
    content += "# text = 我 爱\n1\t我\tO\t-\t-\n2\t爱\tO\t-\t-\n\n1\t我\tO\t-\t-\n2\t爱\tO\t-\t-\n"
    first, second, third, fourth = read_examples(write(tmp_path / "a.iob2", content))
    assert first.text == "我爱New York。"
    assert first.offsets == ((0, 1), (1, 2), (2, 5), (6, 10), (10, 11))
    assert first.entities == (("LOC", 2, 4),)  # among the words
    assert second.text == "北京"  # the comment is of something else
    assert (third.text, fourth.text) == ("我 爱", "我爱")  # and a comment is of one sentence only


def test_words_are_joined_as_their_script_is_written(tmp_path: Path) -> None:
    (example,) = read_examples(write(tmp_path / "a", "New\tB-LOC\nYork\tI-LOC\n很\tO\n大\tO\nyes\tO\nok\tO\n"))
    assert example.text == "New York很大yes ok"
    assert all(
        example.text[slice(*place)] == word for place, word in zip(example.offsets, example.words or (), strict=True)
    )


@pytest.mark.parametrize(
    "data",
    [
        {
            "text": "张三在北京",
            "entities": [{"label": "PER", "start": 0, "end": 2}, {"label": "LOC", "start": 3, "end": 5}],
        },
        {
            "text": "张三在北京",
            "spans": [{"label": "LOC", "start": 3, "end": 5}, {"label": "PER", "start": 0, "end": 2}],
        },
        {"text": "张三在北京", "label": {"LOC": {"北京": [[3, 4]]}, "PER": {"张三": [[0, 1]]}}},
    ],
)
def test_json_lines(data: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", "\n" + json.dumps(data, ensure_ascii=False) + "\n\n")
    (example,) = read_examples(path)
    assert example.entities == (("PER", 0, 2), ("LOC", 3, 5))
    assert (example.words, example.place) == (None, f"{path}, line 2")


@pytest.mark.parametrize("name", ["tags", "ner_tags"])
def test_json_lines_of_tokens(name: str, tmp_path: Path) -> None:
    data = {"tokens": ["张", "三", "在"], name: ["B-PER", "I-PER", "O"]}
    (example,) = read_examples(write(tmp_path / "a.jsonl", json.dumps(data)))
    assert (example.text, example.entities, example.words) == ("张三在", (("PER", 0, 2),), ("张", "三", "在"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no examples"),
        ("\n\n", "holds no examples"),
        ("张\tO\n三\n", "line 2: expected a token and its tag, got '三'"),
        ("张\tO\n三\t\n", "line 2: expected a token and its tag"),
        ("张\tB-PER\n三\tM-PER\n李\tI-PER\n", "line 1: labels: the prefixes B, I, M belong to no one scheme"),
        (b"a\tO\n\xff\tO\n", "line 2: not UTF-8 at byte 4 of the file"),
        ('{"text": "a"', "line 1: not JSON"),
        ('{"text": "a"}', "line 1: expected text with entities"),
        ('{"text": 5, "entities": []}', "line 1: text: expected a string, got 5"),
        (
            '{"text": "a", "entities": [{"label": "X", "start": 0, "end": 2}]}',
            "entity X 0..2: not within the 1 characters",
        ),
        ('{"text": "a", "entities": [{"label": "X", "start": "0", "end": 1}]}', "entity X 0..1: not within"),
        ('{"tokens": ["a"], "tags": []}', "expected one tag, a string, for each of 1 tokens, got 0"),
        ('{"tokens": ["a"], "tags": [3]}', "expected one tag, a string"),
        ('{"a": 1}\n[]', "line 1: expected text with entities"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad", content)
    with pytest.raises(DataError, match=message) as caught:
        read_examples(path)
    assert str(path) in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=r"cannot be read \("):
            read_examples(path)
    with pytest.raises(DataError, match="format: expected auto, conll, jsonl, got 'xml'"):
        read_examples(tmp_path, "xml")
