"""Labelled files of every kind there is, read without losing or shifting anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from minibert import DataError
from minibert.train.data import read_dataset, read_examples


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
        ("张\tB-PER\n三\tM-PER\n李\tI-PER\n", "line 2: tag 'M-PER': not of the scheme BIO, as most tags are"),
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
        ('{"a": 1}\n[]', "2 faults:\n  - line 1: expected text with entities"),
        ("张\tO\n李\tO\tB-PER\n四\tO\n", "line 2: expected 2 columns, as in most lines, got 3: '李 O B-PER'"),
        ("张\tO\n\tO\n", "line 2: expected a token and its tag"),
        ("张\n三\n", "2 faults:\n  - line 1: expected a token and its tag, got '张'"),
        ("张\tB-PER\n三\tPER\n四\tI-PER\n五\tO\n", "line 2: tag 'PER': not of the scheme BIO"),
        (b"\xff\xfe5\x00", "expected UTF-8, got UTF-16"),
        ('{"text": "a", "label": [[0, 1]]}', "line 1: expected text with entities"),
        ('{"text": "a", "label": [[0, 1, ""]]}', "line 1: label: expected a name, got ''"),
        (
            '{"text": "ab", "entities": [{"label": "X", "start": 0, "end": 1, "text": "b"}]}',
            "expected 'b', the text has 'a'",
        ),
        (
            '{"text": "a", "label": [{"start": 0, "end": 1, "labels": ["A", "B"]}]}',
            "expected one label for each entity",
        ),
        ('[{"text": "a", "entities": []},\n\n {"text": 3, "entities": []}]', "line 3: text: expected a string, got 3"),
        ('[{"text": "a", "entities": []},\n {"text": ]', "line 2: not JSON"),
        ('{"tokens": ["a", ""], "tags": ["O", "O"]}', "expected no empty token"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad", content)
    with pytest.raises(DataError) as caught:
        read_examples(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=r"cannot be read \("):
            read_examples(path)
    with pytest.raises(DataError, match="format: expected auto, conll, jsonl, got 'xml'"):
        read_examples(tmp_path, "xml")


@pytest.mark.parametrize("separator", ["\t", " ", "   "])
@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("token tag", {}),
        ("tag token", {}),
        ("token pos chunk tag", {}),  # as in CoNLL-2003
        ("index token tag annotator", {}),  # as in Universal NER
        ("token tag pos", {}),
        ("tag pos token", {"token_column": -1}),
        ("token tag other", {"tag_column": 1}),
        ("other tag token", {"token_column": 2, "tag_column": -2}),
    ],
)
def test_columns_in_any_order(separator: str, order: str, options: dict[str, int], tmp_path: Path) -> None:
    columns = {
        "token": ["张", "三", "在", "北京"],
        "tag": ["B-PER", "I-PER", "O", "B-LOC"],
        "chunk": ["B-NP", "I-NP", "O", "B-NP"],
        "other": ["B-X", "O", "O", "O"],
        "pos": ["NR", "NR", "P", "NR"],
        "index": ["1", "2", "3", "4"],
        "annotator": ["-"] * 4,
    }
    rows = zip(*(columns[name] for name in order.split()), strict=True)
    lines = ["-DOCSTART-" + separator + "O", "", *(separator.join(row) for row in rows)]
    (example,) = read_examples(write(tmp_path / "a", "\n".join(lines)), **options)
    assert example.words == ("张", "三", "在", "北京")
    assert example.tags == ("B-PER", "I-PER", "O", "B-LOC")


def test_columns_that_cannot_be_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "张\tO\n")
    with pytest.raises(DataError, match="tag_column 2: the file has 2 columns, 0 to 1"):
        read_examples(path, tag_column=2)
    with pytest.raises(DataError, match="expected two columns, got 1 for both"):
        read_examples(path, tag_column=1, token_column=-1)


def test_lines_of_two_words_in_one_are_no_words_and_a_bom_no_character(tmp_path: Path) -> None:
    content = "\ufeff1-2\tdámelo\t_\n1\tda\tO\n2\tmelo\tB-PER\n2.1\t_\tO\n"
    (example,) = read_examples(write(tmp_path / "a", content))
    assert example.words == ("da", "melo")


TEXT = "😀张三在\n北京"
STUDIO = [("PER", 2, 4, "张三"), ("LOC", 6, 8, "北京")]  # counted as browsers do: the face is two


def task(*annotations: Any, **more: Any) -> dict[str, Any]:
    return {"id": 7, "data": {"text": TEXT, "meta": 3}, "annotations": list(annotations), **more}


def annotation(spans: Any = STUDIO, **more: Any) -> dict[str, Any]:
    result: list[dict[str, Any]] = [
        {"type": "labels", "value": {"start": s, "end": e, "text": text, "labels": [label]}}
        for label, s, e, text in spans
    ]
    return {"result": [*result, {"type": "choices", "value": {"choices": ["good"]}}], **more}


@pytest.mark.parametrize(
    "data",
    [
        [task(annotation())],
        [task(annotation([("PER", 1, 3, "张三"), ("LOC", 5, 7, "北京")]))],  # in characters, as newer versions do
        [task(annotation([("PER", 1, 3, None), ("LOC", 5, 7, None)]))],
        [task(annotation([("PER", 1, 3, "张三")]), annotation(ground_truth=True), predictions=[annotation()])],
        [task(annotation([], was_cancelled=True), annotation())],
        [{"text": TEXT, "label": [{"start": s, "end": e, "text": t, "labels": [name]} for name, s, e, t in STUDIO]}],
        {"text": TEXT, "label": [[5, 7, "LOC"], [1, 3, "PER"]]},  # doccano
        {"text": TEXT, "labels": [[1, 3, "PER"], [5, 7, "LOC "], [5, 7, "LOC"]], "meta": {}},
        {
            "text": TEXT,
            "entities": [
                {"id": 1, "label": "PER", "start_offset": 1, "end_offset": 3},
                {"id": 2, "label": "LOC", "start_offset": 5, "end_offset": 7},
            ],
            "relations": [],
            "Comments": [],
        },
    ],
)
def test_what_annotation_tools_export(data: Any, tmp_path: Path) -> None:
    for indent in (None, 2) if isinstance(data, list) else (None,):
        path = write(tmp_path / "a.json", json.dumps(data, ensure_ascii=False, indent=indent))
        (example,) = read_examples(path, overlapping="error")
        assert example.text == TEXT
        assert example.entities == (("PER", 1, 3), ("LOC", 5, 7))


def test_an_entity_across_a_line_s_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps([task(annotation([("X", 3, 7, "三在\\n北")]))]))
    assert read_examples(path)[0].entities == (("X", 2, 6),)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (task(), "task 7: expected one annotation, got 0"),
        (task(annotation(was_cancelled=True)), "task 7: expected one annotation, got 0"),
        (task(annotation(), annotation()), "task 7: expected one annotation, got 2; label it, leave it out"),
        ({"data": {"a": "x", "b": "y"}, "annotations": [annotation()]}, "data: expected text, got a, b"),
        (task(annotation([("PER", 2, 4, "李四")])), "entity PER 2..4: expected '李四', the text has '三在'"),
        (task(annotation([("PER", 2, 44, "张三")])), "entity PER 2..44: not within the 7 characters"),
    ],
)
def test_a_task_that_says_nothing_sure_is_named(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_examples(write(tmp_path / "a.json", json.dumps([data])))


def test_faults_are_named_together_up_to_a_limit(tmp_path: Path) -> None:
    lines = ["张\tB-PER", "张\tI-PER", "张\tO", "三", "三\tM-PER", "三\tO\tO", "", "张\tB-PER"]
    with pytest.raises(DataError) as caught:
        read_examples(write(tmp_path / "a", "\n".join(lines)))
    assert str(caught.value).splitlines() == [
        f"{tmp_path / 'a'}: 3 faults:",
        "  - line 4: expected a token and its tag, got '三'",
        "  - line 5: tag 'M-PER': not of the scheme BIO, as most tags are",
        "  - line 6: expected 2 columns, as in most lines, got 3: '三 O O'",
    ]
    with pytest.raises(DataError) as caught:
        read_examples(write(tmp_path / "a", "张\tB-PER\n" * 50 + "三\n" * 30))
    assert "20 faults (the first 20; there may be more)" in str(caught.value)
    assert str(caught.value).count("\n") == 20
    with pytest.raises(
        DataError, match=r"2 faults:\n  - line 1: not UTF-8 at byte 0 .*\n  - line 3: not UTF-8 at byte 6 "
    ):
        read_examples(write(tmp_path / "a", b"\xff\tO\na\t\xfe\n"[:4] + b"a\n\xff\n"))


def test_overlapping_entities_are_named_where_a_tagger_is_to_learn_them(tmp_path: Path) -> None:
    data = {"text": "北京大学在", "label": [[0, 4, "ORG"], [0, 2, "LOC"], [4, 5, "X"]]}
    path = write(
        tmp_path / "a.jsonl", json.dumps(data) + "\n" + json.dumps({**data, "label": [[0, 1, "A"], [1, 2, "B"]]})
    )
    assert len(read_examples(path)[0].entities) == 3
    with pytest.raises(DataError, match=r"line 1: ORG 0\.\.4 and LOC 0\.\.2 overlap; expected one label"):
        read_examples(path, overlapping="error")
    assert (
        len(
            read_examples(
                write(tmp_path / "b.jsonl", json.dumps({**data, "label": [[0, 1, "A"], [1, 2, "B"]]})),
                overlapping="error",
            )[0].entities
        )
        == 2
    )
    with pytest.raises(DataError, match="overlapping: expected error, keep, got 'longest'"):
        read_examples(path, overlapping="longest")


def rows_of(tokens: bool) -> Any:
    if not tokens:
        return datasets.Dataset.from_list(
            [{"text": "张三在", "entities": [{"label": "PER", "start": 0, "end": 2}]}, {"text": "好", "entities": []}]
        )
    names = datasets.ClassLabel(names=["O", "B-PER", "I-PER", "B-LOC"])
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(names)})
    rows = [{"tokens": ["张", "三", "在"], "ner_tags": [1, 2, 0]}, {"tokens": ["好"], "ner_tags": [0]}]
    return datasets.Dataset.from_list(rows, features=features)


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("kind", ["saved", "saved whole", "files"])
def test_a_data_set_by_name(kind: str, tokens: bool, tmp_path: Path) -> None:
    rows, folder = rows_of(tokens), tmp_path / "set"
    if kind == "files":
        folder.mkdir()
        rows.to_parquet(folder / "train.parquet")
    else:
        (rows if kind == "saved" else datasets.DatasetDict({"train": rows})).save_to_disk(folder)
    examples, declared = read_dataset(str(folder), "train")
    assert [(e.text, e.entities) for e in examples] == [("张三在", (("PER", 0, 2),)), ("好", ())]
    assert examples[1].place == f"{folder} train, row 1"
    assert declared == (["O", "B-PER", "I-PER", "B-LOC"] if tokens else [])


def test_a_data_set_on_the_hub_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: (asked.append((args, more)), rows_of(True))[1])
    assert len(read_dataset("someone/ner", "validation", "zh")[0]) == 2
    assert asked == [(("someone/ner", "zh"), {"split": "validation"})]


def test_a_data_set_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none, split train: cannot be loaded by datasets \("):
        read_dataset(str(tmp_path / "none"), "train")
    datasets.DatasetDict({"train": rows_of(True)}).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match="set, split dev: cannot be loaded"):
        read_dataset(str(tmp_path / "set"), "dev")
    bad = datasets.Dataset.from_list([{"sentence": "a"}, {"sentence": "b"}])
    bad.save_to_disk(tmp_path / "bad")
    with pytest.raises(DataError, match=r"bad train: 2 faults:\n  - row 0: expected text with entities"):
        read_dataset(str(tmp_path / "bad"), "train")
