"""The CRF's loss is minus the log of a probability over all paths, and its best path the decoder's."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from minibert import BertConfig, BertForTokenClassification, MinibertError, TokenClassifier
from minibert.model.crf import BertCrfForTokenClassification, LinearChainCRF
from minibert.text.decoding import PathScores, best_paths
from tagger import write_checkpoint

SIZES = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def random_crf(num_labels: int) -> LinearChainCRF:
    crf = LinearChainCRF(num_labels).double()
    for parameter in crf.parameters():
        torch.nn.init.normal_(parameter)
    return crf


def score(crf: LinearChainCRF, logits: torch.Tensor, path: tuple[int, ...]) -> float:
    steps = sum(crf.transitions[a, b] for a, b in itertools.pairwise(path))
    emitted = sum(logits[t, label] for t, label in enumerate(path))
    return (crf.start_transitions[path[0]] + steps + emitted + crf.end_transitions[path[-1]]).item()


@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_probabilities_of_all_paths_sum_to_one(length: int) -> None:
    crf, logits = random_crf(3), torch.randn(length, 3)
    losses = []
    for path in itertools.product(range(3), repeat=length):
        loss = float(crf(logits[None], torch.tensor([path])).detach())
        losses.append(loss)
        paths = itertools.product(range(3), repeat=length)
        total = torch.logsumexp(torch.tensor([score(crf, logits, other) for other in paths]), 0)
        assert loss == pytest.approx(float(total) - score(crf, logits, path), abs=1e-4)
    assert np.exp(-np.array(losses)).sum() == pytest.approx(1, abs=1e-5)


def test_a_batch_is_the_sum_of_its_sequences() -> None:
    crf, logits = random_crf(5), torch.randn(3, 7, 5)
    labels = torch.randint(0, 5, (3, 7))
    labels[1, 4:] = labels[2, 1:] = -100
    alone = 0.0
    for row, length in ((0, 7), (1, 4), (2, 1)):
        alone += crf(logits[row : row + 1, :length], labels[row : row + 1, :length]).item()
    assert crf(logits, labels).item() == pytest.approx(alone, abs=1e-4)
    labels[2] = -100
    assert float(crf(logits, labels).detach()) == pytest.approx(float(crf(logits[:2], labels[:2]).detach()), abs=1e-4)


def test_the_decoder_finds_the_path_of_the_smallest_loss() -> None:
    crf, logits = random_crf(4), torch.randn(5, 4)
    parts = (crf.start_transitions, crf.transitions, crf.end_transitions)
    scores = PathScores(*(part.detach().float().numpy() for part in parts))
    (path,) = best_paths([logits.softmax(-1).numpy()], scores)
    best = max(itertools.product(range(4), repeat=5), key=lambda other: score(crf, logits, other))
    assert tuple(path) == best


def test_the_loss_sees_labelled_tokens_only_and_its_gradient_is_right() -> None:
    torch.manual_seed(1)
    model = BertCrfForTokenClassification(BertConfig(**SIZES, num_labels=3)).eval()
    ids = torch.randint(1, 30, (2, 6))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    labels = torch.tensor([[-100, 1, -100, 2, 0, -100], [-100, 0, 1, -100, 2, 2]])  # labels at padding are none
    output = model(ids, attention_mask=mask, labels=labels)
    chained = torch.stack([output.logits[0, [1, 3, 4]], output.logits[1, [1, 2, 2]]])
    expected = model.crf(chained, torch.tensor([[1, 2, 0], [0, 1, -100]])) / 5
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    divided = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=10)
    assert divided.loss.item() == pytest.approx(expected.item() / 2, abs=1e-5)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.crf.parameters())
    empty = model(ids, attention_mask=mask, labels=torch.full_like(labels, -100)).loss  # E05
    assert empty.item() == 0.0
    model.zero_grad()
    empty.backward()
    assert all(p.grad is not None for p in model.parameters())  # what training on several devices waits for


def test_chains_that_lie_in_one_row_are_those_of_a_padded_batch() -> None:
    model = BertCrfForTokenClassification(BertConfig(**SIZES, num_labels=3)).eval()
    torch.nn.init.normal_(model.crf.transitions)
    ids, labels = torch.randint(1, 30, (2, 6)), torch.randint(0, 3, (2, 6))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]]).bool()
    padded = model(ids, attention_mask=mask, labels=labels)
    packed = model(ids[mask][None], labels=labels[mask][None], sequence_lengths=torch.tensor([6, 4]))
    torch.testing.assert_close(packed.loss, padded.loss)
    torch.testing.assert_close(packed.logits[0], padded.logits[mask])


def test_a_scheme_forbids_to_begin_with() -> None:
    crf = LinearChainCRF(2)
    crf.forbid(torch.tensor([True, False]), torch.tensor([[True, True], [False, True]]), torch.tensor([True, True]))
    assert crf.start_transitions.tolist() == [0, -10]
    assert crf.transitions.tolist() == [[0, 0], [-10, 0]]
    assert crf.end_transitions.tolist() == [0, 0]


def test_its_checkpoint_is_a_taggers_with_the_crf_besides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path)
    config = BertConfig.from_pretrained(tmp_path)
    model = BertCrfForTokenClassification(config).eval()
    torch.nn.init.normal_(model.crf.transitions, std=3.0)
    model.config.decoder = "crf"
    model.save_pretrained(tmp_path)
    again = BertCrfForTokenClassification.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    caplog.clear()
    plain = BertForTokenClassification.from_pretrained(tmp_path)
    assert "the CRF is left out" in caplog.text
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(5, 30, (1, 9))
    with torch.no_grad():
        for other in (again, plain, theirs):
            torch.testing.assert_close(other(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    text = "张三住在北京医院我喜欢上海"
    by_crf, by_argmax = (TokenClassifier.from_pretrained(tmp_path, decoder=decoder) for decoder in (None, "argmax"))
    assert (by_crf.decoder, by_argmax.decoder) == ("crf", "argmax")
    assert by_crf.tag_characters([text]) != by_argmax.tag_characters([text])


def test_a_checkpoint_without_a_crf_is_no_crf(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(MinibertError, match="no trained token-classification head"):
        TokenClassifier.from_pretrained(tmp_path, decoder="crf")
    fresh = BertCrfForTokenClassification.from_pretrained(tmp_path)
    assert fresh.crf.transitions.abs().sum() == 0  # not whatever was in memory
    classifier = TokenClassifier.from_pretrained(tmp_path)
    with pytest.raises(MinibertError, match="the model has no CRF; expected argmax or viterbi"):
        TokenClassifier(classifier.model, classifier.tokenizer, decoder="crf")
