"""Make the model that is to ship with the package: generate its data, train it by its recipe, score it.

python scripts/train_default_model.py [--sentences 80000] [--seed 0] [--resume] [--data FOLDER]

Everything it needs is here: templates and lists written for this project, in scripts/default_model. The result is
build/default-model/run; it does not ship yet. With --data naming a folder of public data, the Resume NER test set is
scored too, once at the end; nothing is chosen by it.
"""

import argparse
import json
import shutil
import string
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from default_model.generate import HERE, Generator, Text, common_characters
from default_model.marks import read_marked

from minibert import TokenClassifier
from minibert.train.data import read_examples
from minibert.train.evaluate import Evaluation, evaluate
from minibert.train.recipe import Recipe
from minibert.train.training import train

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
    lists, templates = HERE / "lists.toml", HERE / "templates.txt"
    write_jsonl(BUILD / "train.jsonl", Generator(lists, templates, seed, novelty=0.25).sentences(sentences))
    write_jsonl(BUILD / "validation.jsonl", Generator(lists, templates, seed + 1_000_000, novelty=0.25).sentences(1500))
    held_out = Generator(HERE / "heldout_lists.toml", HERE / "heldout_templates.txt", 7, novelty=0.0)
    write_jsonl(BUILD / "heldout.jsonl", held_out.sentences(2000))


def scores(folder: Path, data: Path | None) -> dict[str, Evaluation]:
    classifier = TokenClassifier.from_pretrained(folder)
    hand_written = BUILD / "hand-written.jsonl"
    write_jsonl(hand_written, read_marked(ROOT / "tests" / "default_model_sentences.txt"))
    sets = {"generated, held out": BUILD / "heldout.jsonl", "hand-written": hand_written}
    if data is not None:
        sets["Resume NER, test"] = data / "resume_ner" / "test.char.bmes"
    return {name: evaluate(classifier, read_examples(path)) for name, path in sets.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=80_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--data", type=Path, help="a folder with resume_ner/test.char.bmes")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    options = parser.parse_args()
    start = time.time()
    if not options.resume:
        shutil.rmtree(BUILD, ignore_errors=True)
        write_tokenizer(BUILD / "tokenizer")
        generate(options.sentences, options.seed)
    settings = [f"training.seed={options.seed}", *options.settings]
    recipe = Recipe.from_file(ROOT / "configs" / "default-model.toml", settings)
    train(recipe, resume=options.resume)
    run = Path(recipe.training.output_dir)
    evaluations = scores(run, options.data)
    for name, evaluation in evaluations.items():
        print(f"== {name} ==", *evaluation.lines(), sep="\n")
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
