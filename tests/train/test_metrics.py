"""Entity scores: seqeval's figures, from rules of our own."""

from __future__ import annotations

import random

import pytest
from seqeval.metrics import accuracy_score, classification_report
from seqeval.scheme import BILOU, IOB2, IOBES

from minibert import DataError
from minibert.train.metrics import entity_scores
from text.test_labels import names_of, translated

AVERAGES = {"micro": "micro avg", "macro": "macro avg", "weighted": "weighted avg"}
KEYS = {"precision": "precision", "recall": "recall", "f1": "f1-score", "support": "support"}


def corpus(scheme: str, seed: int) -> tuple[list[list[str]], list[list[str]]]:
    """Gold tags, and predictions that repeat three quarters of them."""
    rng = random.Random(seed)
    names = names_of(scheme, ("PER", "LOC", "a-b"))
    gold = [rng.choices(names, k=rng.randint(1, 15)) for _ in range(2000)]
    return gold, [[tag if rng.random() < 0.75 else rng.choice(names) for tag in tags] for tags in gold]


@pytest.mark.parametrize("mode", ["lenient", "strict"])
@pytest.mark.parametrize(("scheme", "theirs"), [("BIO", IOB2), ("BIOES", IOBES), ("BMES", IOBES), ("BILOU", BILOU)])
def test_the_figures_are_seqevals_on_2000_sequences(scheme: str, theirs: type, mode: str) -> None:
    gold, predicted = corpus(scheme, 1)
    ours = entity_scores(gold, predicted, scheme, mode)
    given = (gold, predicted)
    if mode == "lenient" or scheme == "BMES":
        given = tuple([translated(tags) for tags in corpus] for corpus in given)
    options = {"mode": "strict", "scheme": theirs} if mode == "strict" else {}
    report = classification_report(*given, output_dict=True, zero_division=0, **options)
    for name, their_name in [*AVERAGES.items()]:
        assert {key: ours[name][key] for key in KEYS} == pytest.approx(
            {key: report[their_name][their_key] for key, their_key in KEYS.items()}, abs=1e-12
        )
    assert ours["types"].keys() == report.keys() - AVERAGES.values()
    for label, scores in ours["types"].items():
        assert scores == pytest.approx({key: report[label][their_key] for key, their_key in KEYS.items()}, abs=1e-12)
    assert ours["token_accuracy"] == pytest.approx(accuracy_score(gold, predicted))
    assert (ours["scheme"], ours["mode"]) == (scheme, mode)


def test_lenient_or_strict() -> None:  # E01
    gold, predicted = [["B-Phone", "I-Phone"]], [["I-Phone", "I-Phone"]]
    assert entity_scores(gold, predicted, mode="lenient")["micro"]["f1"] == 1.0
    assert entity_scores(gold, predicted, mode="strict")["micro"]["f1"] == 0.0
    assert entity_scores(gold, predicted)["mode"] == "strict"


def test_high_accuracy_and_no_entity() -> None:  # E04
    gold = ["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "I-MISC", "O"]
    predicted = [*gold[:5], "B-MISC", "I-MISC", "O"]
    scores = entity_scores([gold], [predicted])
    assert scores["micro"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1}
    assert scores["token_accuracy"] == 0.875
    nothing = entity_scores([["O", "O"]], [["O", "O"]])
    assert nothing["micro"] == nothing["macro"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}
    assert entity_scores([], [])["token_accuracy"] == 0.0


def test_lengths_must_agree() -> None:
    with pytest.raises(DataError, match="as many predicted sentences as gold ones, 1, got 0"):
        entity_scores([["O"]], [])
    with pytest.raises(DataError, match="sentence 0: 1 gold tags, 2 predicted"):
        entity_scores([["O"]], [["O", "O"]])
