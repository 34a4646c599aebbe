"""Text in, entities out: whole, in order, and the same whatever comes along."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.normalizers import Replace

from minibert import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    CheckpointError,
    DataError,
    Entity,
    MinibertError,
    TokenClassifier,
)
from minibert.text.tokenizer import load_tokenizer
from tagger import LABELS, VOCABULARY, write_checkpoint


@pytest.fixture
def classifier(tmp_path: Path) -> TokenClassifier:
    write_checkpoint(tmp_path)
    return TokenClassifier.from_pretrained(tmp_path)


def of_a_plain_model(folder: Path) -> TokenClassifier:
    write_checkpoint(folder)
    return TokenClassifier(BertForTokenClassification.from_pretrained(folder), load_tokenizer(folder))


def scripted(classifier: TokenClassifier, label_of: Callable[[str], str], score: float = 0.9) -> TokenClassifier:
    """A stand-in for the model: each token's label by its text, whatever stands around it."""
    names = classifier.labels.names

    def run(sequences: list[np.ndarray]) -> list[np.ndarray]:
        results = []
        for ids in sequences:
            rows = np.full((len(ids), len(names)), (1 - score) / (len(names) - 1), dtype=np.float32)
            for row, number in enumerate(ids.tolist()):
                rows[row, names.index(label_of(classifier.tokenizer.id_to_token(number)))] = score
            results.append(rows)
        return results

    classifier._run = run  # type: ignore[method-assign]
    return classifier


def spans(entities: list[Entity]) -> list[tuple[str, int, int]]:
    return [(entity.label, entity.start, entity.end) for entity in entities]


def test_labels_and_scores_are_the_models(classifier: TokenClassifier) -> None:
    text = "我住在北京。"
    ids = [2, *(VOCABULARY.index(character) for character in text), 3]
    with torch.no_grad():
        probabilities = classifier.model(torch.tensor([ids])).logits[0, 1:-1].softmax(-1)
    classifier.aggregation_strategy = "none"
    entries = classifier(text)
    best = [LABELS[index] for index in probabilities.argmax(-1).tolist()]
    wanted = [i for i, label in enumerate(best) if label not in ("O", "[PAD]")]
    assert len(wanted) > 2
    assert [(e.label, e.start, e.end, e.text) for e in entries] == [(best[i], i, i + 1, text[i]) for i in wanted]
    assert [e.score for e in entries] == pytest.approx(probabilities.max(-1).values[wanted].tolist(), abs=1e-6)


def test_the_text_of_an_entity_is_the_callers(classifier: TokenClassifier) -> None:  # D09, Z10
    scripted(classifier, lambda piece: "B-PER" if piece in "上张qx" else "I-PER")
    text = "  上海，QX-AV\n张𠮷三"
    entities = classifier(text)
    assert [entity.text for entity in entities] == ["上海，", "QX-AV", "张𠮷三"]
    assert all(text[e.start : e.end] == e.text for e in entities)
    assert all(type(e.start) is type(e.end) is int for e in entities)  # D16


def test_nothing_comes_from_special_tokens(classifier: TokenClassifier) -> None:  # Z12
    labels = {"张": "B-PER", "三": "I-PER"}
    scripted(classifier, lambda token: labels.get(token, "B-LOC"))
    assert spans(classifier("张三")) == [("PER", 0, 2)]
    assert classifier("") == []
    assert classifier(" \n\u200b") == []


def test_adjacent_entities_of_one_type_are_two(classifier: TokenClassifier) -> None:  # D01
    scripted(classifier, lambda piece: "B-LOC" if piece in "上北" else "I-LOC")
    assert spans(classifier("上海北京")) == [("LOC", 0, 2), ("LOC", 2, 4)]


def test_inside_without_begin_is_an_entity_unless_only_legal_tags_are_wanted(
    classifier: TokenClassifier,
) -> None:  # D02
    scripted(classifier, lambda piece: "I-PER" if piece in "张三" else "O", score=0.4)
    assert spans(classifier("我张三住")) == [("PER", 1, 3)]
    assert spans(classifier("张三")) == [("PER", 0, 2)]
    classifier.decoder = "viterbi"
    assert spans(classifier("我张三住")) == [("PER", 1, 3)]  # B-PER I-PER is the likeliest of the legal sequences
    assert classifier("我张三住")[0].score < 0.3  # but B-PER was not what the model said


def test_any_scheme(tmp_path: Path) -> None:  # D05
    for letters in ("BMES", "BIES", "BILU"):
        begin, inside, end, single = letters
        names = ["O", *(f"{letter}-{label}" for label in ("PER", "LOC") for letter in letters)]
        write_checkpoint(tmp_path, id2label=dict(enumerate(names)))
        labels = {"张": f"{begin}-PER", "三": f"{inside}-PER", "李": f"{end}-PER", "京": f"{single}-LOC"}
        for decoder in ("argmax", "viterbi"):
            classifier = TokenClassifier.from_pretrained(tmp_path, decoder=decoder)
            scripted(classifier, lambda token, labels=labels: labels.get(token, "O"))  # type: ignore[misc]
            assert spans(classifier("张三李京京我")) == [("PER", 0, 3), ("LOC", 3, 4), ("LOC", 4, 5)]


@pytest.mark.parametrize(("device", "cells"), [("cpu", 2048), ("cuda", 16384)])
def test_batches_are_larger_on_a_gpu(
    device: str, cells: int, classifier: TokenClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BertForTokenClassification, "device", torch.device(device))
    assert TokenClassifier(classifier.model, classifier.tokenizer).max_tokens_per_batch == cells
    assert TokenClassifier(classifier.model, classifier.tokenizer, max_tokens_per_batch=7).max_tokens_per_batch == 7


def test_a_batch_gives_what_each_text_gives_alone_in_order(classifier: TokenClassifier) -> None:  # D14
    texts = ["北京好", "我喜欢上海和北京" * 5, "", "张三住医院和京", "今天" * 150]
    alone = [classifier(text) for text in texts]
    assert sum(map(len, alone)) > 50
    for budget in (1, 100, 4096):
        classifier.max_tokens_per_batch = budget
        for together in (classifier(texts), list(classifier.stream(iter(texts)))):
            assert [spans(entities) for entities in together] == [spans(entities) for entities in alone]
            scores = [[e.score for e in entities] for entities in (*alone, *together)]
            for one, other in zip(scores[:5], scores[5:], strict=True):
                assert one == pytest.approx(other, abs=1e-5)
    assert classifier([]) == []
    assert classifier(["北京好"]) == [alone[0]]


def test_a_text_longer_than_the_model_is_answered_whole(classifier: TokenClassifier) -> None:  # A13, D12
    scripted(classifier, lambda token: {"北": "B-LOC", "京": "I-LOC"}.get(token, "O"))
    text = "好" * 250 + "北京" + "好" * 48
    assert spans(classifier(text)) == [("LOC", 250, 252)]
    text = "我住在北京医院今天天气好" * 167  # 2,004 characters, 64 positions
    assert spans(classifier(text)) == [("LOC", 12 * i + 3, 12 * i + 5) for i in range(167)]
    tags = classifier.tag_characters([text])[0]
    assert len(tags) == len(text)


def test_a_long_text_can_be_refused_and_is_never_cut(tmp_path: Path) -> None:  # D12
    write_checkpoint(tmp_path)
    classifier = TokenClassifier.from_pretrained(tmp_path, allow_windows=False)
    assert len(classifier.tag_characters(["好" * 62])[0]) == 62
    with pytest.raises(DataError, match="a text of 63 tokens is longer than the 62 that the model reads at once"):
        classifier(["好", "好" * 63])


@pytest.mark.parametrize("stride", [0, 1, 7, 31])
def test_every_entity_of_a_long_text_is_found_once_and_whole(stride: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    classifier = TokenClassifier.from_pretrained(tmp_path, stride=stride)
    scripted(classifier, lambda token: {"北": "B-LOC", "京": "I-LOC", "上": "I-LOC", "海": "I-LOC"}.get(token, "O"))
    rng = random.Random(stride)
    text = "".join(rng.choice(["好", "好。", "北京上海", " ", "iphone16"]) for _ in range(800))
    expected = [("LOC", match.start(), match.end()) for match in re.finditer("北京上海", text)]
    assert len(expected) > 100
    assert spans(classifier(text)) == expected


def test_the_time_grows_with_the_text_and_not_with_its_square(classifier: TokenClassifier) -> None:
    scripted(classifier, lambda token: "B-LOC")
    start = time.perf_counter()
    assert len(classifier("北京" * 50_000)) == 100_000
    assert time.perf_counter() - start < 20


def test_a_text_that_just_fits_is_read_at_once(classifier: TokenClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[Any] = []
    original = classifier.model.forward
    monkeypatch.setattr(
        classifier.model, "forward", lambda ids, *r, **k: (widths.append(ids.shape), original(ids, *r, **k))[1]
    )
    classifier("好" * 62)
    classifier("好" * 63)
    assert widths[0] == torch.Size([1, 64])
    assert len(widths) == 2
    assert widths[1][0] == 2


def test_padding_is_a_small_part_of_the_batches(
    classifier: TokenClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:  # P08
    texts = ["好" * 5] * 60 + ["好" * 60] * 4
    random.Random(0).shuffle(texts)
    cells = real = 0
    original = classifier.model.forward

    def forward(ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
        nonlocal cells, real
        cells, real = cells + mask.numel(), real + int(mask.sum())
        return original(ids, mask, **options)

    monkeypatch.setattr(classifier.model, "forward", forward)
    classifier.max_tokens_per_batch = 16 * 62
    assert [len("".join(e.text for e in entities)) <= 60 for entities in classifier(texts)] == [True] * 64
    assert real == 60 * 7 + 4 * 62
    assert cells <= 1.3 * real


def test_an_endless_stream_is_read_a_little_ahead(classifier: TokenClassifier) -> None:
    scripted(classifier, lambda token: "B-LOC")
    classifier.max_tokens_per_batch = 64
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            assert read < 5000  # an endless stream must not be read to its end
            yield "北京" if read % 2 else "好"

    stream = classifier.stream(texts())
    for number, entities in enumerate(stream, 1):
        assert len(entities) == (2 if number % 2 else 1)
        assert read < number + 600
        if number == 3000:
            break


def test_one_label_a_word_always(classifier: TokenClassifier) -> None:
    labels = {"张": "B-PER", "三": "I-PER", "iphone": "B-PROD", "##16": "I-LOC"}
    scripted(classifier, lambda token: labels.get(token, "O"))
    sentences = [["张", " ", "三", "我", "iphone16", "\u200b"], [], [" "], ["张三", "张"]]
    expected = [["B-PER", "I-PER", "I-PER", "O", "B-PROD", "O"], [], ["O"], ["B-PER", "B-PER"]]
    assert classifier.tag_words(sentences) == expected
    long = [["好", "张三"] * 100]
    assert classifier.tag_words(long) == [["O", "B-PER"] * 100]
    for wrong in (["张三"], [[5]], [None]):
        with pytest.raises(TypeError):
            classifier.tag_words(wrong)  # type: ignore[arg-type]


def test_one_label_a_character_always(classifier: TokenClassifier) -> None:
    labels = {"住": "B-PER", "2024": "B-TIME", "年": "I-TIME", "iphone": "I-PROD"}
    scripted(classifier, lambda token: labels.get(token, "O"))
    text = " 住 2024 年iphone16。"
    assert classifier.tag_characters([text, ""]) == [
        ["O", "B-PER", "O", "B-TIME", *["I-TIME"] * 5, *["I-PROD"] * 8, "O"],
        [],
    ]


def test_how_text_was_split_in_training_is_used_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    seen: list[int] = []
    for mode, tokens in ((None, 2), ("text", 2), ("characters", 4)):
        (tmp_path / "config.json").write_text(json.dumps(config | ({} if mode is None else {"split_mode": mode})))
        classifier = TokenClassifier.from_pretrained(tmp_path)
        assert classifier.split_mode == (mode or "text")
        scripted(classifier, lambda token: "B-LOC")
        classifier.aggregation_strategy = "none"
        seen.append(len(classifier("2024年" if mode != "characters" else "202年")))
        assert seen[-1] == tokens
    assert TokenClassifier.from_pretrained(tmp_path, split_mode="text").split_mode == "text"
    (tmp_path / "config.json").write_text(json.dumps(config | {"split_mode": "words"}))
    with pytest.raises(MinibertError, match="split_mode: expected text, characters, got 'words'"):
        TokenClassifier.from_pretrained(tmp_path)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_left_as_found(training: bool, tmp_path: Path) -> None:  # A15
    classifier = of_a_plain_model(tmp_path)
    classifier.model.train(training)
    first, second = (classifier("张三住在北京") for _ in range(2))
    assert first == second  # no dropout
    assert classifier.model.training is training


def test_several_threads_get_what_one_gets(tmp_path: Path) -> None:
    classifier = of_a_plain_model(tmp_path)
    classifier.model.train()
    texts = [f"张三住在北京{'好' * number}" for number in range(40)]
    expected = [classifier(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for text, entities in zip(texts, pool.map(classifier, texts), strict=True):
            assert spans(entities) == spans(expected[texts.index(text)])
    assert classifier.model.training


def test_what_is_not_a_string_is_a_type_error(classifier: TokenClassifier) -> None:
    for wrong in (None, 5):
        with pytest.raises(TypeError):
            classifier(wrong)  # type: ignore[call-overload]
    for wrong in (None, 5, b"x", ["x"]):
        with pytest.raises(TypeError, match="expected a string, got"):
            classifier([wrong])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="expected an iterable of strings, got the string '上海'"):
        next(classifier.stream("上海"))


def test_half_a_surrogate_pair_is_an_error(classifier: TokenClassifier) -> None:
    with pytest.raises(DataError, match=r"surrogate pair in '北\\ud83d'"):
        classifier(["北\ud83d"])


def test_an_entity_is_plain_json(classifier: TokenClassifier) -> None:  # D17
    entities = classifier("张三住在北京")
    assert entities
    for entity in entities:
        data = json.loads(json.dumps(entity.to_dict(), ensure_ascii=False))
        assert data == {"label": entity.label, "start": entity.start, "end": entity.end} | {
            "text": entity.text,
            "score": entity.score,
        }
        assert type(entity.score) is float
        assert 0 <= entity.score <= 1
        with pytest.raises(AttributeError):
            entity.label = "X"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation_strategy": "last"}, "aggregation_strategy: expected none, simple, .* got 'last'"),
        ({"decoder": "beam"}, "decoder: expected argmax, viterbi, crf, got 'beam'"),
        ({"scheme": "IOB1"}, "scheme: expected auto"),
        ({"scheme": "BIOES"}, None),
        ({"scheme": "BMES"}, "I-PER.*: not of the scheme BMES"),
        ({"stride": 32}, "stride: expected an overlap of 0 to 31 tokens"),
        ({"stride": -1}, "stride: expected"),
        ({"max_tokens_per_batch": 0}, "max_tokens_per_batch: expected at least 1, got 0"),
        ({"precision": "fp8"}, "precision: expected fp32, int8, bf16, fp16, got 'fp8'"),
        ({"threads": 0}, "threads: expected at least 1, got 0"),
    ],
)
def test_an_option_that_is_none_is_refused(options: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    if message is None:
        assert TokenClassifier.from_pretrained(tmp_path, **options).labels.scheme == options["scheme"]
        return
    with pytest.raises(MinibertError, match=message):
        TokenClassifier.from_pretrained(tmp_path, **options)


def test_labels_without_names_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_labels=18)
    with pytest.raises(DataError, match=r"still LABEL_0 to LABEL_17.*id2label"):
        TokenClassifier.from_pretrained(tmp_path)
    names = dict(enumerate(LABELS))
    assert TokenClassifier.from_pretrained(tmp_path, id2label=names).labels.scheme == "BIO"


def test_what_runs_is_shown(classifier: TokenClassifier) -> None:
    threads = torch.get_num_threads()
    assert repr(classifier) == (
        f"TokenClassifier(18 labels in BIO, 2 layers of 32, float32 on cpu, fp32 by prepacked oneDNN, "
        f"{threads} threads, "
        "first, argmax, split by text)"
    )


def test_weights_that_are_no_numbers_are_an_error_and_no_labels(classifier: TokenClassifier) -> None:
    with torch.no_grad():
        classifier.model.classifier.bias[3] = float("nan")
    with pytest.raises(MinibertError, match="the model gives NaN"):
        classifier("张三")


def test_a_vocabulary_without_capitals_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # Z04
    write_checkpoint(tmp_path)
    TokenClassifier.from_pretrained(tmp_path)
    assert caplog.messages == []
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    TokenClassifier.from_pretrained(tmp_path)
    assert "lower_case=True (--lower-case) lower-cases them" in caplog.text
    caplog.clear()
    classifier = TokenClassifier.from_pretrained(tmp_path, lower_case=True)
    assert caplog.messages == []
    scripted(classifier, lambda token: {"a": "B-ORG", "##a": "I-ORG"}.get(token, "O"))
    assert [(e.label, e.text) for e in classifier("AAA上海")] == [("ORG", "AAA")]


def test_a_tokeniser_without_offsets_is_refused(classifier: TokenClassifier) -> None:  # D16
    classifier.tokenizer.normalizer = Replace(" ", "xx")
    with pytest.raises(CheckpointError, match="does not say where its tokens stand"):
        TokenClassifier(classifier.model, classifier.tokenizer)


def test_a_model_without_room_for_text_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, max_position_embeddings=2)
    with pytest.raises(CheckpointError, match="max_position_embeddings 2 leaves no room"):
        TokenClassifier.from_pretrained(tmp_path)
    write_checkpoint(tmp_path, max_position_embeddings=3)
    assert len(TokenClassifier.from_pretrained(tmp_path).tag_characters(["张三住在北京"])[0]) == 6


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
    names = {0: "O", 1: "B-PER", 2: "I-PER"}
    classifier = TokenClassifier.from_pretrained(tmp_path, allow_untrained_head=True, id2label=names)
    assert set(classifier.tag_characters(["张三住在北京"])[0]) <= set(names.values())
    assert "untrained; its labels are random" in caplog.text


def test_a_tokenizer_larger_than_the_embeddings_is_refused_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with (tmp_path / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write("新\n")
    with pytest.raises(CheckpointError, match=rf"largest id is {len(VOCABULARY)} but .* {len(VOCABULARY)} rows"):
        TokenClassifier.from_pretrained(tmp_path)


def test_a_tokenizer_smaller_than_the_embeddings_is_fine(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vocab_size=len(VOCABULARY) + 100)
    assert len(TokenClassifier.from_pretrained(tmp_path).tag_characters(["张三"])[0]) == 2


def test_a_loaded_model_is_saved_with_its_tokeniser(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "one")
    (tmp_path / "one" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    model = BertForTokenClassification.from_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "two")
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names == {"config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json"}
    again = TokenClassifier.from_pretrained(tmp_path / "two")
    assert again("张三Q住在北京") == TokenClassifier.from_pretrained(tmp_path / "one")("张三Q住在北京")
    (tmp_path / "two" / "vocab.txt").write_text("another's")
    model.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two" / "vocab.txt").read_text() == "another's"  # not ours to replace
    shutil.rmtree(tmp_path / "one")
    model.save_pretrained(tmp_path / "three")  # saved all the same, and said
    assert {path.name for path in (tmp_path / "three").iterdir()} == {"config.json", "model.safetensors"}
    assert "tokeniser's files were not copied" in caplog.text


def test_a_path_of_any_characters(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "一 个 'path'")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "一 个 'path'")
    for directory in (tmp_path / "一 个 'path'", link):
        assert len(TokenClassifier.from_pretrained(directory).tag_characters(["张三"])[0]) == 2
    shutil.rmtree(tmp_path / "一 个 'path'")
