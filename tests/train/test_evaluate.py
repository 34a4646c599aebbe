"""`minibert evaluate`: figures that can be worked out by hand, and the pages and tables made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minibert import DataError, TokenClassifier
from minibert.train.data import read_examples
from minibert.train.evaluate import evaluate
from minibert.train.metrics import entity_scores
from tagger import write_checkpoint
from test_predict import scripted

LABELS = {
    "张": "B-PER",
    "三": "I-PER",
    "北": "B-LOC",
    "京": "I-LOC",
    "上": "I-LOC",
    "2024": "B-TIME",
    "iphone": "B-PROD",
}


@pytest.fixture
def classifier(tmp_path: Path) -> TokenClassifier:
    write_checkpoint(tmp_path / "model")
    return scripted(TokenClassifier.from_pretrained(tmp_path / "model"), lambda token: LABELS.get(token, "O"))


def columns(path: Path, *sentences: str) -> Path:
    rows = "\n\n".join("\n".join(word.replace("/", "\t") for word in sentence.split()) for sentence in sentences)
    path.write_text(rows + "\n", encoding="utf-8")
    return path


def test_figures_that_can_be_worked_out_by_hand(classifier: TokenClassifier, tmp_path: Path) -> None:
    path = columns(
        tmp_path / "gold.txt",
        "张/B-PER 三/I-PER 住/O 北/B-LOC 京/I-LOC",  # both found
        "张/B-PER 住/O 上/B-LOC 海/I-LOC",  # PER found; LOC with other edges, and strictly not at all
        "北/B-ORG 京/I-ORG 好/O 医/B-ORG 院/I-ORG",  # another type; and nothing
        "好/O 三/O",  # a PER that is none, and strictly not one
    )
    steps: list[int] = []
    result = evaluate(classifier, read_examples(path), progress=steps.append)
    assert sum(steps) == result.num_examples == 4
    lenient, strict = result.scores["lenient"], result.scores["strict"]
    assert lenient["micro"] == {"precision": 3 / 6, "recall": 3 / 6, "f1": 0.5, "support": 6}
    assert strict["micro"]["precision"] == 3 / 4
    assert strict["types"]["LOC"] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2}
    assert result.token_accuracy == 9 / 16
    assert sorted(result.confusions) == [
        ("LOC", "LOC (other edges)", 1),
        ("ORG", "LOC", 1),
        ("ORG", "nothing", 1),
        ("nothing", "PER", 1),
    ]
    assert len(result.errors) == 3
    predicted = [["B-PER", "I-PER", "O", "B-LOC", "I-LOC"], ["B-PER", "O", "I-LOC", "O"]]
    predicted += [["B-LOC", "I-LOC", "O", "O", "O"], ["O", "I-PER"]]
    gold = [list(example.tags or ()) for example in read_examples(path)]
    for mode in ("lenient", "strict"):
        scores = entity_scores(gold, predicted, "BIO", mode)
        assert {key: scores[key] for key in ("micro", "macro", "weighted", "types")} == result.scores[mode]
        assert scores["token_accuracy"] == result.token_accuracy


def test_data_in_json_and_in_another_scheme(classifier: TokenClassifier, tmp_path: Path) -> None:
    path = tmp_path / "gold.jsonl"
    data = {"text": "张三 住在2024年", "entities": [{"label": "PER", "start": 0, "end": 2}]}
    nested = {
        "text": "北京医院",
        "entities": [{"label": "ORG", "start": 0, "end": 4}, {"label": "LOC", "start": 0, "end": 2}],
    }
    path.write_text(f"{json.dumps(data)}\n{json.dumps(nested)}\n", encoding="utf-8")
    scores = evaluate(classifier, read_examples(path)).scores["strict"]
    assert scores["types"]["PER"]["f1"] == scores["types"]["LOC"]["f1"] == 1.0
    assert scores["types"]["ORG"]["recall"] == 0.0  # of nested entities one is missed, and counted
    assert scores["types"]["TIME"]["precision"] == 0.0
    other = columns(tmp_path / "bmes.txt", "张/B-PER 三/E-PER 好/O")
    assert evaluate(classifier, read_examples(other)).scores["strict"]["micro"]["f1"] == 1.0


def test_words_get_one_label_each(classifier: TokenClassifier, tmp_path: Path) -> None:
    path = columns(tmp_path / "words.txt", "iphone16/B-PROD 张三/B-PER \u200b/O 住在/O")
    result = evaluate(classifier, read_examples(path))
    assert result.scores["strict"]["micro"]["f1"] == 1.0
    assert result.token_accuracy == 1.0


def test_an_entity_far_inside_a_long_text_counts(classifier: TokenClassifier, tmp_path: Path) -> None:  # Z13
    words = ["好/O"] * 150 + ["张/B-PER", "三/I-PER"] + ["好/O"] * 48
    path = columns(tmp_path / "long.txt", " ".join(words))
    assert evaluate(classifier, read_examples(path)).scores["strict"]["micro"] == pytest.approx(
        {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1}
    )


def test_a_type_that_the_model_does_not_know_is_named_with_its_place(
    classifier: TokenClassifier, tmp_path: Path
) -> None:
    path = columns(tmp_path / "gold.txt", "好/O", "张/B-FOO")
    with pytest.raises(DataError, match=r"gold\.txt, line 3: type 'FOO': the model knows BOOK, GAME"):
        evaluate(classifier, read_examples(path))


def test_the_table_the_object_and_the_page(classifier: TokenClassifier, tmp_path: Path) -> None:
    path = columns(tmp_path / "gold.txt", "张/B-PER 三/I-PER", "<b>/O 上/B-ORG")
    result = evaluate(classifier, read_examples(path))
    lines = list(result.lines())
    assert lines[0] == "2 examples, scheme BIO, token accuracy 0.7500"
    assert lines[2].split() == ["all", "(micro)", "1.0000", "0.5000", "0.6667", "0.5000", "2"]
    assert any(line.split() == ["1", "ORG", "->", "LOC"] for line in lines)
    figures = json.loads(result.to_json())
    assert figures["strict"]["micro"]["f1"] == pytest.approx(2 / 3)
    assert figures["confusions"] == [{"gold": "ORG", "predicted": "LOC", "count": 1}]
    result.write_page(tmp_path / "errors.html", "errors")
    page = (tmp_path / "errors.html").read_text(encoding="utf-8")
    assert "1 of 2 texts with errors" in page
    assert "&lt;b&gt;" in page
    assert "gold.txt, line 4" in page
