"""Agreement with `transformers.pipeline("token-classification")` on thousands of real lines, and its known faults."""

from __future__ import annotations

import copy
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.pipelines.token_classification import AggregationStrategy

from minibert import Entity, TokenClassifier
from tagger import write_checkpoint

STRATEGIES = ("none", "simple", "first", "average", "max")
LINES = 2000


@pytest.fixture(scope="module")
def directory(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random tagger with the real vocabulary, lower-casing, and BIO labels."""
    folder = tmp_path_factory.mktemp("chinese")
    names = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC", 5: "B-a-b", 6: "I-a-b"}
    write_checkpoint(folder, vocab_size=21128, max_position_embeddings=512, id2label=names)
    (folder / "vocab.txt").write_bytes((data_dir / "bert-base-chinese" / "vocab.txt").read_bytes())
    return folder


@pytest.fixture(scope="module")
def pipeline(directory: Path) -> Any:
    model = transformers.BertForTokenClassification.from_pretrained(directory, dtype=torch.float32)
    return transformers.pipeline(
        "token-classification", model=model, tokenizer=transformers.BertTokenizer.from_pretrained(directory)
    )


def lines_of(data_dir: Path) -> list[str]:
    """Wikipedia and messy Weibo lines, every kind in its proportion."""
    wiki = (data_dir / "text" / "wiki_lines_zh.txt").read_text(encoding="utf-8").split("\n")
    messy = (data_dir / "text" / "weibo_messy_lines.txt").read_text(encoding="utf-8").split("\n")
    return [line for line in [*messy, *wiki] if line][:LINES]


def comparable(found: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(e.get("entity_group") or e["entity"], int(e["start"]), int(e["end"])) for e in found]


def places(entities: list[Entity]) -> list[tuple[str, int, int]]:
    return [(entity.label, entity.start, entity.end) for entity in entities]


def without_marks(text: str) -> str:
    """An accent that stands by itself belongs to the letter before, which the pipeline overlooks."""
    while text and unicodedata.category(text[-1]) in ("Mn", "Me"):
        text = text[:-1]
    return text


def test_the_pipelines_entities_on_2000_lines(directory: Path, data_dir: Path, pipeline: Any) -> None:
    lines = lines_of(data_dir)
    assert len(lines) == LINES
    ours = {
        strategy: TokenClassifier.from_pretrained(directory, aggregation_strategy=strategy)(lines)
        for strategy in STRATEGIES
    }
    totals: Counter[str] = Counter()
    for number, line in enumerate(lines):
        outputs = [pipeline.forward(inputs) for inputs in pipeline.preprocess(line, is_split_into_words=False)]
        for strategy in STRATEGIES:  # as when it is called with aggregation_strategy=strategy, the model run once
            theirs = pipeline.postprocess(copy.deepcopy(outputs), aggregation_strategy=AggregationStrategy(strategy))
            found = ours[strategy][number]
            trimmed = [(e.label, e.start, e.end - (len(e.text) - len(without_marks(e.text)))) for e in found]
            assert trimmed == comparable(theirs), (strategy, line)
            for one, other in zip(found, theirs, strict=True):
                assert one.score == pytest.approx(float(other["score"]), abs=1e-5)
            totals[strategy] += len(found)
    assert all(totals[strategy] > 50_000 for strategy in STRATEGIES)  # not one difference among them
    assert pipeline(lines[0], aggregation_strategy="first") == pipeline.postprocess(
        [pipeline.forward(inputs) for inputs in pipeline.preprocess(lines[0], is_split_into_words=False)],
        aggregation_strategy=AggregationStrategy("first"),
    )


# Where the pipeline is wrong: docs/entities.md lists these.


def test_the_pipeline_takes_a_letter_with_a_combining_accent_for_a_piece_of_the_word_before(
    directory: Path, pipeline: Any
) -> None:
    text = "cafe\u0301 a\u0301 b\u0301c 上海"  # two code points for each letter with its accent
    theirs = comparable(pipeline(text, aggregation_strategy="first"))
    ours = TokenClassifier.from_pretrained(directory)(text)
    assert theirs == [("LOC", 0, 4), ("PER", 6, 15)]  # "b́c" has the label of "á"
    assert places(ours) == [("LOC", 0, 5), ("PER", 6, 8), ("LOC", 9, 12), ("PER", 13, 15)]


def test_the_pipeline_cuts_a_letter_from_its_combining_accent(directory: Path, pipeline: Any) -> None:
    text = "cafe\u0301 上海"
    assert comparable(pipeline(text, aggregation_strategy="first"))[0][1:] == (0, 4)
    assert TokenClassifier.from_pretrained(directory)(text)[0].text == "cafe\u0301"


def test_the_pipeline_takes_typed_special_tokens_for_its_own(directory: Path, pipeline: Any) -> None:
    text = "上[SEP]海"
    assert [place for _, *place in comparable(pipeline(text))] == [[0, 1], [1, 6], [6, 7]]
    classifier = TokenClassifier.from_pretrained(directory, aggregation_strategy="none")
    assert [place for _, *place in places(classifier(text))] == [[0, 1], [1, 2], [2, 5], [5, 6], [6, 7]]


def test_the_pipeline_knows_one_scheme(directory: Path, pipeline: Any, tmp_path: Path) -> None:
    names = {0: "O", 1: "B-PER", 2: "M-PER", 3: "E-PER", 4: "S-LOC"}
    write_checkpoint(tmp_path, vocab_size=21128, id2label=names)
    (tmp_path / "vocab.txt").write_bytes((directory / "vocab.txt").read_bytes())
    model = transformers.BertForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = transformers.pipeline("token-classification", model=model, tokenizer=pipeline.tokenizer)
    found = comparable(theirs("今天上海很好" * 5, aggregation_strategy="first"))
    assert {label[:2] for label, _, _ in found} & {"M-", "E-", "S-", "PE", "LO"} != {"PE", "LO"}
    entities = TokenClassifier.from_pretrained(tmp_path)("今天上海很好" * 5)
    assert {entity.label for entity in entities} <= {"PER", "LOC"}


def test_the_pipeline_cannot_read_what_is_longer_than_the_model(directory: Path, pipeline: Any) -> None:
    text = "北京" * 300
    with pytest.raises((RuntimeError, IndexError)):
        pipeline(text)
    tags = TokenClassifier.from_pretrained(directory).tag_characters([text])[0]
    assert len(tags) == 600
