"""The places in a BERT at which two models are compared, by the Hub's module names, and other names for them."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minibert.checkpoint.names import BASE_PREFIX
from minibert.errors import DataError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

TOKENS, SCORES, WHOLE = "tokens", "scores", "whole"  # a row for each token, (B, H, S, S), anything else


@dataclass(frozen=True)
class Point:
    """One value of a forward pass.

    `modules` name where it comes from, best first: a module, and which of its results.
    """

    name: str
    depth: int  # 0 for the embeddings, 1 for the first layer, ..., one more than there are layers for the head
    modules: tuple[tuple[str, int], ...]
    kind: str = TOKENS


def points(num_layers: int) -> list[Point]:
    """Everything up to the head, in the order in which a forward pass comes by."""
    tables = ("word_embeddings", "token_type_embeddings", "position_embeddings")
    found = [Point(f"embeddings.{table}", 0, ((f"embeddings.{table}", 0),)) for table in tables]
    found.append(Point("embeddings", 0, (("embeddings", 0), ("embeddings.LayerNorm", 0))))
    for index in range(num_layers):
        found += _layer_points(f"encoder.layer.{index}", index + 1)
    found.append(Point("pooler", num_layers + 1, (("pooler", 0),), WHOLE))
    transform = "cls.predictions.transform"
    found += [Point(name, num_layers + 1, ((name, 0),)) for name in (f"{transform}.dense", transform)]
    return found


def _layer_points(layer: str, depth: int) -> Iterator[Point]:
    attention = f"{layer}.attention"
    for name in ("query", "key", "value"):
        yield Point(f"{attention}.self.{name}", depth, ((f"{attention}.self.{name}", 0),))
    scores, context = f"{attention}.self.scores", f"{attention}.self.context"
    yield Point(scores, depth, ((scores, 0), (f"{attention}.self", 1)), SCORES)
    yield Point(context, depth, ((context, 0), (f"{attention}.self", 0)))
    yield Point(f"{attention}.output.dense", depth, ((f"{attention}.output.dense", 0),))
    ends = ((f"{attention}.output", 0), (attention, 0), (f"{attention}.output.LayerNorm", 0))
    yield Point(f"{attention}.output", depth, ends)
    yield Point(f"{layer}.intermediate.dense", depth, ((f"{layer}.intermediate.dense", 0),))
    widened = ((f"{layer}.intermediate", 0), (f"{layer}.intermediate.intermediate_act_fn", 0))
    yield Point(f"{layer}.intermediate", depth, widened)
    yield Point(f"{layer}.output.dense", depth, ((f"{layer}.output.dense", 0),))
    yield Point(f"{layer}.output", depth, ((f"{layer}.output", 0), (layer, 0), (f"{layer}.output.LayerNorm", 0)))


class Names:
    """From a model's own names of modules and parameters to ours: the Hub's, without the prefix of the encoder.

    Args:
        mapping: a module's own name to ours, or to several of ours whose results and parameters lie side by side in
            its own (as in one product for query, key and value). `{i}` stands for a number, the same on both sides.
            What is below a module goes with it. Other names are taken as they are.
    """

    # How the fast engine holds the three.
    ENGINE = "encoder.layer.{i}.attention.self.qkv"
    PROJECTIONS = tuple(f"encoder.layer.{{i}}.attention.self.{name}" for name in ("query", "key", "value"))

    def __init__(self, mapping: Mapping[str, str | Sequence[str]] | None = None) -> None:
        self.mapping: dict[str, tuple[str, ...]] = {
            own: (ours,) if isinstance(ours, str) else tuple(ours) for own, ours in (mapping or {}).items()
        }
        rules = [*self.mapping.items(), (BASE_PREFIX + self.ENGINE, self.PROJECTIONS), (self.ENGINE, self.PROJECTIONS)]
        rules.sort(key=lambda rule: -len(rule[0]))  # the longest name first: it says most
        self._rules = [(_pattern(own), ours) for own, ours in rules]

    def ours(self, own: str) -> tuple[str, ...]:
        """What a module or parameter is in our names; several if they lie side by side in it."""
        for pattern, targets in self._rules:
            found = pattern.match(own)
            if found:
                number, rest = found.groupdict().get("i", ""), own[found.end() :]
                return tuple(target.replace("{i}", number).removeprefix(BASE_PREFIX) + rest for target in targets)
        return (own.removeprefix(BASE_PREFIX),)

    @classmethod
    def from_file(cls, path: Path) -> Names:
        """Reads a mapping from JSON or TOML: an object, or a table `[modules]`, of names to names.

        Raises:
            DataError: the file cannot be read, or is something else.
        """
        try:
            text = path.read_text(encoding="utf-8")
            content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError) as error:  # what both readers raise is a ValueError
            raise DataError(f"{path}: cannot be read as {path.suffix.lstrip('.') or 'toml'} ({error})") from None
        if isinstance(content, dict) and isinstance(content.get("modules"), dict):
            content = content["modules"]
        wrong = [
            own
            for own, ours in (content.items() if isinstance(content, dict) else [(repr(content)[:40], None)])
            if not (isinstance(ours, str) or (isinstance(ours, list) and ours and all(type(o) is str for o in ours)))
        ]
        if wrong:
            raise DataError(f"{path}: expected module names to names, or to lists of them, got {wrong[0]!r}")
        return cls(content)

    def check(self, own: Collection[str], known: Collection[str]) -> None:
        """Refuses a mapping with names that are nowhere.

        Args:
            own: the modules of the model it is for.
            known: our names: of points, modules and parameters.

        Raises:
            DataError: with every such name, and the nearest one there is.
        """
        problems = [
            f"the model has no module {name!r}{_nearest(name, own)}"
            for name in self.mapping
            if not any(_pattern(name).fullmatch(module) for module in own)
        ]
        for target in (target for targets in self.mapping.values() for target in targets):
            name = target.replace("{i}", "0").removeprefix(BASE_PREFIX)
            if not any(other == name or other.startswith(f"{name}.") for other in known):
                problems.append(f"{target!r} is no name of ours{_nearest(name, known)}")
        if problems:
            raise DataError(f"mapping: {'; '.join(problems)}")


def _pattern(own: str) -> re.Pattern[str]:
    expression = re.escape(own).replace(re.escape("{i}"), r"(?P<i>\d+)", 1).replace(re.escape("{i}"), "(?P=i)")
    return re.compile(rf"{expression}(?=\.|$)")


def _nearest(name: str, others: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(others), 1)
    return f" (the nearest is {near[0]!r})" if near else ""
