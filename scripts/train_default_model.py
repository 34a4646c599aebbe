"""Make the model that ships with the package: generate its data, train it by its recipe, score it, write its card.

python scripts/train_default_model.py [--sentences 450000] [--seed 0] [--resume | --score] [--data FOLDER] [--install]

Everything it needs is here: templates and lists written for this project, in scripts/default_model. The result is
build/default-model/model; with --install it takes the place of the one in the package. With --data naming a folder of
public data, the Resume NER test set is scored too, once at the end; nothing is chosen by it.
"""

import argparse
import json
import shutil
import statistics
import string
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from default_model.card import Facts, card
from default_model.generate import Generator, Text
from default_model.marks import read_marked
from default_model.start import initial_model
from default_model.words import common_characters

from minibert import BertConfig, TokenClassifier
from minibert.bench.measure import machine
from minibert.bench.processes import predict_command, timed
from minibert.hub import DEFAULT_MODEL
from minibert.model.crf import BertCrfForTokenClassification
from minibert.train.data import read_examples
from minibert.train.evaluate import Evaluation, evaluate
from minibert.train.recipe import Recipe
from minibert.train.training import train

NOVELTY = 0.2  # of a part of a name in training: how often it is of characters that no list has
HELD_OUT_SEED = 7
STARTS = ROUNDS = 5  # of which the card has the median
ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "default-model"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# As people type it, with the curly quotes and dashes that bert-base-chinese lacks, in both widths.
PUNCTUATION = (
    string.punctuation
    + "，。、；：？！…—–·•～“”‘’「」『』《》〈〉（）【】〔〕［］｛｝￥$€£%‰°℃©®™×÷±≤≥≈＋－＝／＼＠＃＆＊＿｜＾％"
)


def vocabulary() -> list[str]:
    wide = [chr(ord(c) + 0xFEE0) for c in string.digits + string.ascii_letters]
    signs = [*string.digits, *string.ascii_letters, *wide, *PUNCTUATION, *"○●◎★☆■□▲△→←↑↓①②③④⑤⑥⑦⑧⑨⑩ⅠⅡⅢⅣⅤⅥ〇零"]
    return list(dict.fromkeys([*SPECIAL, *signs, *common_characters()]))


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 256}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_jsonl(path: Path, texts: Iterable[Text]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            entities = [{"label": label, "start": start, "end": end} for label, start, end in text.spans]
            file.write(json.dumps({"text": text.text, "entities": entities}, ensure_ascii=False) + "\n")


def generate(sentences: int, seed: int) -> None:
    """Training and validation data from the same lists and templates; a held-out set from others."""
    BUILD.mkdir(parents=True, exist_ok=True)
    write_jsonl(BUILD / "train.jsonl", Generator("training", seed, novelty=NOVELTY).sentences(sentences))
    write_jsonl(BUILD / "validation.jsonl", Generator("training", seed + 1_000_000, novelty=NOVELTY).sentences(1500))
    write_jsonl(BUILD / "heldout.jsonl", Generator("heldout", HELD_OUT_SEED, novelty=0.0).sentences(2000))


def pack(run: Path, folder: Path) -> None:
    """The trained model in half precision, with its tokeniser: what ships."""
    shutil.rmtree(folder, ignore_errors=True)
    BertCrfForTokenClassification.from_pretrained(run, dtype=torch.float16).save_pretrained(folder)


def scores(folder: Path, data: Path | None) -> dict[str, Evaluation]:
    classifier = TokenClassifier.from_pretrained(folder)
    hand_written = BUILD / "hand-written.jsonl"
    write_jsonl(hand_written, read_marked(ROOT / "tests" / "default_model_sentences.txt"))
    sets = {"generated, held out": BUILD / "heldout.jsonl", "hand-written": hand_written}
    if data is not None:
        sets["Resume NER, test"] = data / "resume_ner" / "test.char.bmes"
    return {name: evaluate(classifier, read_examples(path)) for name, path in sets.items()}


def first_answer(folder: Path) -> float:
    """Seconds from a cold start to the entities of one sentence; the median of a few."""
    command = predict_command(str(folder))
    return statistics.median(timed(command, torch.get_num_threads())[0] for _ in range(STARTS))


def rate(folder: Path) -> float:
    """Characters a second over the hand-written sentences; the median of a few passes, the first not counted."""
    classifier = TokenClassifier.from_pretrained(folder)
    texts = [text.text for text in read_marked(ROOT / "tests" / "default_model_sentences.txt")]
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        classifier(texts)
        times.append(time.perf_counter() - start)
    return sum(map(len, texts)) / statistics.median(times[1:])


def hardware() -> str:
    """The processor by name, and how many threads PyTorch uses of it."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' if threads > 1 else ''} of {machine(threads)['processor']}"


def facts(folder: Path, training: dict[str, Any]) -> Facts:
    config = BertConfig.from_pretrained(folder)
    made = Generator("training", training["seed"], novelty=NOVELTY)
    return Facts(
        **training,
        templates=sum(map(len, made.templates.values())),
        words=sum(map(len, made.words.lists.values())),
        parameters=BertCrfForTokenClassification.from_pretrained(folder, dtype=torch.float16).num_parameters(),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        megabytes=sum(path.stat().st_size for path in folder.iterdir()) / 1e6,
        hardware=hardware(),
        first=first_answer(folder),
        starts=STARTS,
        rate=rate(folder),
        rounds=ROUNDS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=450_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint of a run that was stopped"
    )
    parser.add_argument("--score", action="store_true", help="only score what was trained, and write its card anew")
    parser.add_argument("--data", type=Path, help="a folder with resume_ner/test.char.bmes")
    parser.add_argument("--install", action="store_true", help="put the result in the package")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    options = parser.parse_args()
    if not options.score:
        make(options)
    folder = BUILD / "model"
    evaluations = scores(folder, options.data)
    for name, evaluation in evaluations.items():
        print(f"== {name} ==", *evaluation.lines(), sep="\n")
        evaluation.write_page(BUILD / f"{name}.html", name)
    found = facts(folder, json.loads((BUILD / "training.json").read_text(encoding="utf-8")))
    (folder / "README.md").write_text(card(found, evaluations), encoding="utf-8")
    if options.install:
        shutil.rmtree(DEFAULT_MODEL, ignore_errors=True)
        shutil.copytree(folder, DEFAULT_MODEL)
    print(f"{folder}: trained in {found.minutes:.0f} minutes")


def make(options: argparse.Namespace) -> None:
    """Data, training, and the model as it ships; what the card says of them."""
    start = time.time()
    if not options.resume:
        shutil.rmtree(BUILD, ignore_errors=True)
        initial_model(
            BertConfig.from_pretrained(ROOT / "configs" / "default-model.json"), options.seed
        ).save_pretrained(BUILD / "start")
        write_tokenizer(BUILD / "start")
        generate(options.sentences, options.seed)
    settings = [f"training.seed={options.seed}", *options.settings]
    recipe = Recipe.from_file(ROOT / "configs" / "default-model.toml", settings)
    train(recipe, resume=options.resume)
    pack(Path(recipe.training.output_dir), BUILD / "model")
    told = {"sentences": options.sentences, "seed": options.seed, "minutes": (time.time() - start) / 60}
    told["trained_on"] = hardware()
    (BUILD / "training.json").write_text(json.dumps(told) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
