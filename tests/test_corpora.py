"""Public Chinese and English data: every token read, aligned with bert-base-chinese's tokeniser, and read back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minibert import BertConfig, BertForTokenClassification, BertModel, TokenClassifier
from minibert.text.alignment import labels_from_spans, spans_from_labels, tokenize
from minibert.text.labels import LabelSet
from minibert.text.tokenizer import load_tokenizer
from minibert.train.data import read_examples
from minibert.train.recipe import Recipe
from minibert.train.training import train
from tagger import LABELS, write_checkpoint

CONFIGS = Path(__file__).parent.parent / "configs"
# file: sentences, tokens (characters where it has none), entities, of these not spelled by the tokens of the whole text
# (their edge falls inside a token, or two share one) and by those of each character (nested in another; a word joiner).
CORPORA = {
    "cluener2020/dev.json": (1343, 50260, 3072, 7, 0),
    "cluener2020/train.json": (10748, 401764, 23971, 51, 2),
    "msra_ner/dev.char.bmes": (4365, 202984, 4080, 2, 0),
    "msra_ner/test.bio": (4631, 172601, 6192, 0, 0),
    "msra_ner/test.char.bmes": (4365, 172601, 6181, 0, 0),
    "peoples_daily_ner/example.dev": (2318, 109870, 3819, 0, 0),
    "peoples_daily_ner/example.test": (4636, 219197, 7707, 0, 0),
    "resume_ner/train.char.bmes": (3821, 124099, 13440, 0, 0),
    "resume_ner/dev.char.bmes": (463, 13890, 1497, 0, 0),
    "resume_ner/test.char.bmes": (477, 15100, 1630, 0, 0),
    "uner_en_ewt/en_ewt-ud-dev.iob2": (2001, 25149, 966, 0, 0),
    "uner_en_ewt/en_ewt-ud-test.iob2": (2077, 25097, 1088, 0, 0),
    "uner_zh_gsdsimp/zh_gsdsimp-ud-train.iob2": (3997, 98616, 6118, 0, 0),
    "uner_zh_gsdsimp/zh_gsdsimp-ud-dev.iob2": (500, 12663, 753, 0, 0),
    "uner_zh_gsdsimp/zh_gsdsimp-ud-test.iob2": (500, 12012, 763, 0, 0),
    "weibo_ner/weiboNER_2nd_conll.train": (1350, 73778, 1895, 2, 0),
    "weibo_ner/weiboNER_2nd_conll.dev": (270, 14509, 389, 2, 0),
    "weibo_ner/weiboNER_2nd_conll.test": (270, 14842, 418, 0, 0),
    "wnut17/wnut17train.conll": (3394, 62730, 1975, 0, 0),
    "wnut17/emerging.dev.conll": (1009, 15733, 836, 1, 1),
    "wnut17/emerging.test.annotated": (1287, 23394, 1079, 0, 0),
}


@pytest.mark.parametrize("name", CORPORA)
def test_every_gold_entity_is_recovered_or_counted(name: str, data_dir: Path) -> None:
    examples = read_examples(data_dir / name)
    sentences, num_tokens, num_entities, lost_in_text, lost_in_characters = CORPORA[name]
    assert len(examples) == sentences
    assert sum(len(example.words or example.text) for example in examples) == num_tokens
    assert sum(len(example.entities) for example in examples) == num_entities
    tokenizer = load_tokenizer(data_dir / "bert-base-chinese")
    types = sorted({span.label for example in examples for span in example.entities})
    labels = LabelSet(["O", *(f"{letter}-{label}" for label in types for letter in "BI")])
    for split_mode, expected in (("text", lost_in_text), ("characters", lost_in_characters)):
        lost = 0
        for example, tokens in zip(
            examples, tokenize(tokenizer, [example.text for example in examples], split_mode), strict=True
        ):
            assert [example.text[start:end] for start, end in example.offsets] == list(example.words or ())
            spans = example.in_text(example.entities)
            ids, not_spelled = labels_from_spans(tokens, spans, labels)
            assert set(spans) - set(not_spelled) <= set(spans_from_labels(tokens, ids, labels)), example.place
            lost += len(not_spelled)
        assert lost == expected, split_mode


NOVEL = """
import itertools, re, resource, sys, time
from pathlib import Path
from minibert import TokenClassifier
classifier = TokenClassifier.from_pretrained(sys.argv[1])
text = Path(sys.argv[2]).read_bytes().decode("utf-8")  # with its CRLF
classifier(text[:20_000])
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
before, start = peak(), time.perf_counter()
entities = classifier(text)
seconds = time.perf_counter() - start
assert all(text[e.start : e.end] == e.text for e in entities)
assert all(one.end <= other.start for one, other in itertools.pairwise(entities))
print(len(text), len(entities), entities[-1].end, peak() - before, round(seconds, 1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_novel_as_one_text(data_dir: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vocab_size=21128, max_position_embeddings=512)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((data_dir / "bert-base-chinese" / name).read_bytes())
    novel = data_dir / "text" / "sanguoyanyi.txt"
    done = subprocess.run(
        [sys.executable, "-c", NOVEL, str(tmp_path), str(novel)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)  # noqa: T201
    length, found, last, grown, _seconds = map(float, done.stdout.split())
    assert length > 590_000
    assert found > 100_000
    assert last > length - 50
    assert grown < 600  # MiB, for every token's distribution and 100,000 entities and more


def test_all_but_the_model_is_a_small_part_of_the_time_and_linear_in_the_text(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against one forward of a BERT-base on the same texts. With -s the figures are shown."""
    write_checkpoint(tmp_path, vocab_size=21128, max_position_embeddings=512)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((data_dir / "bert-base-chinese" / name).read_bytes())
    lines = (data_dir / "text" / "wiki_lines_zh.txt").read_text(encoding="utf-8").splitlines()[:128]
    config = BertConfig(vocab_size=21128, id2label=dict(enumerate(LABELS)))
    spent = 0.0

    def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            result = forward(*arguments, **options)
            spent += time.perf_counter() - start
            return result

        return run

    for decoder in ("argmax", "viterbi"):
        classifier = TokenClassifier.from_pretrained(tmp_path, decoder=decoder)
        classifier.model = BertForTokenClassification(config).eval()
        monkeypatch.setattr(classifier.model, "forward", timed(classifier.model.forward))
        with torch.inference_mode():
            classifier(lines[:8])
        shares = []
        for _ in range(2):
            spent, start = 0.0, time.perf_counter()
            classifier(lines)
            shares.append((time.perf_counter() - start - spent) / spent)
        print(f"{decoder}: {min(shares):.2%} of the model's {spent:.1f} s")  # noqa: T201
        assert min(shares) <= 0.05
    # Linear: four times the text takes about four times as long, the model left out.
    classifier = TokenClassifier.from_pretrained(tmp_path, decoder="viterbi")
    labels = len(classifier.labels.names)
    uniform = torch.full((1, 1, labels), 1 / labels).numpy()
    monkeypatch.setattr(classifier, "_run", lambda rows: [uniform[0].repeat(len(ids), axis=0) for ids in rows])
    text = "".join(lines)
    seconds = {}
    for times in (4, 16, 4, 16):
        start = time.perf_counter()
        classifier(text * times)
        seconds[times] = min(seconds.get(times, 1e9), time.perf_counter() - start)
    assert seconds[16] < 8 * seconds[4]


@pytest.mark.parametrize(
    ("recipe", "settings", "labels"),
    [
        ("bert-base-chinese-cluener", ["data.train=cluener2020/dev.json"], 21),
        ("bert-base-chinese-resume", ["data.train=resume_ner/dev.char.bmes"], 17),
        ("bert-base-chinese-weibo", ["data.train=weibo_ner/weiboNER_2nd_conll.dev"], 17),
        ("bert-base-chinese-msra", ["data.train=msra_ner/test.char.bmes"], 7),
        ("resume-from-scratch", ["data.train=resume_ner/dev.char.bmes"], 18),
    ],
)
def test_the_recipes_run_on_the_data_they_are_for(
    recipe: str, settings: list[str], labels: int, data_dir: Path, tmp_path: Path
) -> None:
    """A step or two of each, with a tiny model in place of bert-base-chinese."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=21128, **sizes)).save_pretrained(tmp_path / "base")
    shutil.copy(data_dir / "bert-base-chinese" / "vocab.txt", tmp_path / "base")
    content = (CONFIGS / f"{recipe}.toml").read_text(encoding="utf-8")
    content = content.replace('"google-bert/bert-base-chinese"', '"base"').replace('"bert-base-chinese"', '"base"')
    (tmp_path / "recipe.toml").write_text(content, encoding="utf-8")
    (tmp_path / "tiny-4-layer.json").write_text(json.dumps({**sizes, "vocab_size": 21128}))
    for folder in ("cluener2020", "resume_ner", "weibo_ner", "msra_ner"):
        (tmp_path / folder).symlink_to(data_dir / folder)
    settings = [*settings, "training.epochs=0.02", "training.report_to=[]", "training.max_tokens_per_batch=1000"]
    model = train(Recipe.from_file(tmp_path / "recipe.toml", settings))
    assert model.config.num_labels == labels
    (out,) = (tmp_path / "runs").iterdir()
    figures = json.loads((out / "training.json").read_text())
    assert figures["scores"]["validation"]["examples"] == figures["texts"]["validation"] > 200
