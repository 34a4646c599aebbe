"""Text in, a label for every token out: whole, in order, and the same whatever comes along."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minibert import BertConfig, BertForMaskedLM, BertForSequenceClassification, CheckpointError, DataError
from minibert import predict as predict_module
from minibert.predict import TokenClassifier
from tagger import VOCABULARY, write_checkpoint


@pytest.fixture
def classifier(tmp_path: Path) -> TokenClassifier:
    write_checkpoint(tmp_path)
    return TokenClassifier.from_pretrained(tmp_path)


def test_labels_and_scores_are_the_models(classifier: TokenClassifier) -> None:
    text = "我住在北京。"
    ids = [2, *(VOCABULARY.index(character) for character in text), 3]
    with torch.no_grad():
        probabilities = classifier.model(torch.tensor([ids])).logits[0, 1:-1].softmax(-1)
    tokens = classifier.label_tokens([text])[0]
    assert [token.text for token in tokens] == list(text)
    assert [(token.start, token.end) for token in tokens] == [(i, i + 1) for i in range(6)]
    assert [token.label for token in tokens] == [f"LABEL_{index}" for index in probabilities.argmax(-1).tolist()]
    assert [token.score for token in tokens] == pytest.approx(probabilities.max(-1).values.tolist(), abs=1e-6)


def test_the_text_of_a_token_is_the_callers(classifier: TokenClassifier) -> None:
    text = "  海视通 QX张𠮷三\n"
    tokens = classifier.label_tokens([text])[0]
    assert [token.text for token in tokens] == ["海", "视", "通", "Q", "X", "张", "𠮷", "三"]
    assert all(text[token.start : token.end] == token.text for token in tokens)


def test_special_tokens_have_no_label(classifier: TokenClassifier) -> None:
    assert len(classifier.label_tokens(["张三"])[0]) == 2


def test_a_batch_gives_what_each_text_gives_alone_in_order(
    classifier: TokenClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["北京好", "我喜欢上海和北京" * 5, "", "张三住医院", "今天" * 150]
    alone = [classifier.label_tokens([text])[0] for text in texts]
    for budget in (1, 100, 4096):
        monkeypatch.setattr(predict_module, "MAX_TOKENS_PER_BATCH", budget)
        together = classifier.label_tokens(texts)
        assert [len(tokens) for tokens in together] == [3, 40, 0, 5, 300]
        for one, other in zip(alone, together, strict=True):
            assert [(t.label, t.start, t.end, t.text) for t in one] == [
                (t.label, t.start, t.end, t.text) for t in other
            ]
            assert [t.score for t in one] == pytest.approx([t.score for t in other], abs=1e-5)
    assert classifier.label_tokens([]) == []


def test_a_text_longer_than_the_model_is_answered_whole(classifier: TokenClassifier) -> None:
    text = "我住在北京医院今天天气好" * 167  # 2,004 characters, 64 positions
    tokens = classifier.label_tokens([text])[0]
    assert [(token.start, token.end) for token in tokens] == [(i, i + 1) for i in range(len(text))]
    assert "".join(token.text for token in tokens) == text


def test_the_time_grows_with_the_text_and_not_with_its_square(classifier: TokenClassifier) -> None:
    start = time.perf_counter()
    assert len(classifier.label_tokens(["北京" * 20_000])[0]) == 40_000
    assert time.perf_counter() - start < 20  # minutes when lists are made anew for each token


def test_a_text_that_just_fits_is_read_at_once(classifier: TokenClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[Any] = []
    original = classifier.model.forward
    monkeypatch.setattr(
        classifier.model, "forward", lambda ids, *r, **k: (widths.append(ids.shape), original(ids, *r, **k))[1]
    )
    classifier.label_tokens(["好" * 62])
    classifier.label_tokens(["好" * 63])
    assert widths == [torch.Size([1, 64]), torch.Size([2, 64])]


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_left_as_found(training: bool, classifier: TokenClassifier) -> None:
    classifier.model.train(training)
    first, second = (classifier.label_tokens(["张三住在北京"]) for _ in range(2))
    assert first == second  # no dropout
    assert classifier.model.training is training


def test_what_is_not_a_string_is_a_type_error(classifier: TokenClassifier) -> None:
    for wrong in (None, 5, b"x", ["x"]):
        with pytest.raises(TypeError, match="expected a string, got"):
            classifier.label_tokens([wrong])  # type: ignore[list-item]


def test_texts_may_come_from_any_iterable_but_a_single_string(classifier: TokenClassifier) -> None:
    texts = ["张三住在北京", "好"]
    assert classifier.label_tokens(text for text in texts) == classifier.label_tokens(texts)
    with pytest.raises(TypeError, match="expected a list of strings, got the string '上海'"):
        classifier.label_tokens("上海")


def test_half_a_surrogate_pair_is_an_error(classifier: TokenClassifier) -> None:
    with pytest.raises(DataError, match=r"surrogate pair in '北\\ud83d'"):
        classifier.label_tokens(["北\ud83d"])


def test_a_model_without_room_for_text_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, max_position_embeddings=2)
    with pytest.raises(CheckpointError, match="max_position_embeddings 2 leaves no room"):
        TokenClassifier.from_pretrained(tmp_path)
    write_checkpoint(tmp_path, max_position_embeddings=3)
    assert len(TokenClassifier.from_pretrained(tmp_path).label_tokens(["张三住在北京"])[0]) == 6


def test_a_sequence_classifier_is_no_tagger(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    BertForSequenceClassification(BertConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no trained token-classification head"):
        TokenClassifier.from_pretrained(tmp_path)


def test_a_checkpoint_without_a_head_is_refused_unless_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path)
    config = BertConfig.from_pretrained(tmp_path)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no trained token-classification head of 18 labels"):
        TokenClassifier.from_pretrained(tmp_path)
    assert caplog.text == ""
    classifier = TokenClassifier.from_pretrained(tmp_path, allow_untrained_head=True, num_labels=3)
    assert {token.label for token in classifier.label_tokens(["张三住在北京"])[0]} <= {"LABEL_0", "LABEL_1", "LABEL_2"}
    assert "untrained; its labels are random" in caplog.text


def test_a_tokenizer_larger_than_the_embeddings_is_refused_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with (tmp_path / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write("新\n")
    with pytest.raises(CheckpointError, match=rf"largest id is {len(VOCABULARY)} but .* {len(VOCABULARY)} rows"):
        TokenClassifier.from_pretrained(tmp_path)


def test_a_tokenizer_smaller_than_the_embeddings_is_fine(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vocab_size=len(VOCABULARY) + 100)
    assert len(TokenClassifier.from_pretrained(tmp_path).label_tokens(["张三"])[0]) == 2


def test_a_loaded_model_is_saved_with_its_tokeniser(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "one")
    (tmp_path / "one" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    classifier = TokenClassifier.from_pretrained(tmp_path / "one")
    classifier.model.save_pretrained(tmp_path / "two")
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names == {"config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json"}
    again = TokenClassifier.from_pretrained(tmp_path / "two")
    assert again.label_tokens(["张三Q住在北京"]) == classifier.label_tokens(["张三Q住在北京"])
    (tmp_path / "two" / "vocab.txt").write_text("another's")
    classifier.model.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two" / "vocab.txt").read_text() == "another's"  # not ours to replace
    shutil.rmtree(tmp_path / "one")
    classifier.model.save_pretrained(tmp_path / "three")  # saved all the same, and said
    assert {path.name for path in (tmp_path / "three").iterdir()} == {"config.json", "model.safetensors"}
    assert "tokeniser's files were not copied" in caplog.text


def test_a_path_of_any_characters(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "一 个 'path'")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "一 个 'path'")
    for directory in (tmp_path / "一 个 'path'", link):
        assert len(TokenClassifier.from_pretrained(directory).label_tokens(["张三"])[0]) == 2
    shutil.rmtree(tmp_path / "一 个 'path'")
