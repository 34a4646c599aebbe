"""Train a recipe with several seeds and print the mean and spread of its test scores.

python scripts/train_seeds.py RECIPE.toml [--seeds 0 1 2] [--decoders argmax viterbi] [--set training.epochs=5 ...]

Without --decoders a model is scored with the one it was trained for. Runs that are already there are not repeated.
"""

import argparse
import dataclasses
import statistics
from pathlib import Path

from minibert import TokenClassifier
from minibert.train.data import read_examples
from minibert.train.evaluate import evaluate
from minibert.train.recipe import Recipe
from minibert.train.training import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--decoders", nargs="+", default=[None])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    options = parser.parse_args()
    recipe = Recipe.from_file(options.recipe, options.settings)
    if recipe.data.test is None:
        parser.error("the recipe has no data.test")
    folders = []
    for seed in options.seeds:
        folder = Path(f"{recipe.training.output_dir}-seed-{seed}")
        folders.append(folder)
        if not (folder / "training.json").is_file():
            training = dataclasses.replace(recipe.training, seed=seed, output_dir=str(folder))
            train(dataclasses.replace(recipe, training=training), resume=(folder / "checkpoints").is_dir())
    test = read_examples(recipe.data.test, recipe.data.format, recipe.data.scheme)
    for decoder in options.decoders:
        scores = [evaluate(TokenClassifier.from_pretrained(folder, decoder=decoder), test).scores for folder in folders]
        for mode in ("strict", "lenient"):
            f1 = [of[mode]["micro"]["f1"] for of in scores]
            print(
                f"{decoder or recipe.model.decoder:8} {mode:8} F1 mean {statistics.mean(f1):.4f}, "
                f"{min(f1):.4f} to {max(f1):.4f} over seeds {', '.join(map(str, options.seeds))}"
            )


if __name__ == "__main__":
    main()
