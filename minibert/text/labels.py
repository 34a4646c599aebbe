"""Tag schemes: what a label such as `B-PER` says, spans from tags and tags from spans.

A tag has a role and a type. The roles are begin, inside, end and single; a scheme is the letters it has for them:

    BIO    B-PER I-PER O       BIOES  B-PER I-PER E-PER S-LOC      IO  I-PER O, or PER O
    BMES   M for inside        BILOU  L for end, U for single

Read leniently, as the conlleval script, seqeval's default mode and the `transformers` pipeline do, every tag that is
not outside belongs to an entity: one begins where a tag does not continue the tag before it, and a tag continues the
one before if that began or went on with the same type and this goes on or ends. Read strictly, as seqeval's
`mode="strict"` does, an entity counts only if its first and last tag are what the scheme demands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minibert.errors import DataError

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float32]

OUTSIDE, BEGIN, INSIDE, END, SINGLE = range(5)  # roles; what cannot be told apart from outside is outside


class Scheme(NamedTuple):
    """The letters of the four roles; None where a scheme has none."""

    begin: str | None
    inside: str
    end: str | None
    single: str | None


SCHEMES = {
    "BIO": Scheme("B", "I", None, None),
    "BIOES": Scheme("B", "I", "E", "S"),
    "BMES": Scheme("B", "M", "E", "S"),
    "BILOU": Scheme("B", "I", "L", "U"),
    "IO": Scheme(None, "I", None, None),
}
PREFIXED = re.compile(r"([BIMESLU])[-_](.+)", re.DOTALL)  # a type may itself hold hyphens
UNTYPED = re.compile(r"([BIMESLU])()")  # as in word segmentation; seqeval calls the type "_"
GENERIC = re.compile(r"LABEL_\d+")
# Labels of cells that hold no text, which some training scripts add. Never predicted, never an entity.
PADDING = {"[PAD]", "<PAD>", "PAD", "X", "[CLS]", "[SEP]", "[UNK]", "<START>", "<STOP>", "<START_TAG>", "<STOP_TAG>"}
USUAL_OUTSIDE = {"O", "OUT", "OUTSIDE", "OTHER", "OTHERS", "NONE", "NULL", "0", "_", "NIL", "N"}


class Span(NamedTuple):
    """An entity among tags: its type, its first tag, and one past its last."""

    label: str
    start: int
    end: int


class LabelSet:
    """A model's label names, read by one scheme.

    Args:
        names: in the order of their ids.
        scheme: "BIO", "BIOES", "BMES", "BILOU", "IO", or "auto" to find it from the names.
        complete: whether these are all labels there are, as a model's are, and not those some text happens to have.
            Names with I- alone then mean IO; otherwise BIO.

    Raises:
        DataError: names that mix schemes, that are still LABEL_0, LABEL_1, ..., or of which none or several could
            mean "outside".
    """

    def __init__(self, names: Sequence[str], scheme: str = "auto", *, complete: bool = True) -> None:
        if scheme != "auto" and scheme not in SCHEMES:
            raise DataError(f"scheme: expected auto, {', '.join(SCHEMES)}, got {scheme!r}")
        self.names = list(names)
        if self.names and all(GENERIC.fullmatch(name) for name in self.names):
            raise DataError(
                f"labels: still {self.names[0]} to {self.names[-1]}, which name no entities; give the labels that the "
                "model was trained with as id2label in config.json, or as the argument id2label"
            )
        self.padding: Bools = np.array([name.upper() in PADDING for name in self.names], dtype=bool)
        pattern = UNTYPED if _are_untyped(self.names) else PREFIXED
        prefixed = [None if pad else pattern.fullmatch(name) for name, pad in zip(names, self.padding, strict=True)]
        bare = [n for n, pad, match in zip(names, self.padding, prefixed, strict=True) if not pad and match is None]
        letters = {match[1] for match in prefixed if match}
        self.scheme = _find_scheme(letters, len(bare), complete) if scheme == "auto" else scheme
        allowed = SCHEMES[self.scheme]
        foreign = letters - set(filter(None, allowed))
        if foreign:
            raise DataError(
                f"labels: {', '.join(n for n, m in zip(names, prefixed, strict=True) if m and m[1] in foreign)}: "
                f"not of the scheme {self.scheme}"
            )
        self.outside = self._find_outside(bare, named=bool(letters))
        role_of = {letter: role for role, letter in enumerate(allowed, BEGIN) if letter is not None}
        self.roles: Ints = np.array([role_of[m[1]] if m else OUTSIDE for m in prefixed], dtype=np.int64)
        self.types = [(match[2] or "_") if match else "" for match in prefixed]
        if not letters:  # IO without prefixes
            inside = [name in bare and name != self.outside for name in self.names]
            self.roles = np.where(inside, INSIDE, OUTSIDE)
            self.types = [name if is_in else "" for name, is_in in zip(self.names, inside, strict=True)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(self.types))}
        self.type_ids = np.array([numbers[name] for name in self.types], dtype=np.int64)
        self.ids = {name: index for index, name in enumerate(self.names)}
        same_type = self.type_ids[:, None] == self.type_ids[None, :]
        opened = np.isin(self.roles, (BEGIN, INSIDE))[:, None]
        goes_on = np.isin(self.roles, (INSIDE, END))[None, :]
        if scheme == "auto" and complete:
            self._refuse_types_of_another_scheme()
        # continues[i, j]: a tag j right behind a tag i belongs to the same entity.
        self.continues: Bools = same_type & opened & goes_on

    def _find_outside(self, bare: list[str], *, named: bool) -> str | None:
        """The one name that means outside: any single one beside prefixed names, else one of the usual ones."""
        if len(bare) == 1 and named:
            return bare[0]
        usual = [name for name in bare if name.upper() in USUAL_OUTSIDE]
        if len(usual) == 1 and not (named and len(bare) > 1):
            return usual[0]
        if not bare or (self.scheme == "IO" and not usual and not named):
            return None  # no tag that means it, as in a sequence that is all entity
        what = f"{', '.join(bare[:8])} have no prefix" if named else f"{', '.join(bare[:8])}: which means outside?"
        raise DataError(
            f"labels: {what}; expected one name for outside, such as O, and all others with a prefix such as B- or I-"
        )

    def _refuse_types_of_another_scheme(self) -> None:
        """In schemes that mark ends, a type that begins and never ends is from a scheme that marks none."""
        if SCHEMES[self.scheme].end is None:
            return
        of_type: dict[str, set[int]] = {}
        for name, role in zip(self.types, self.roles.tolist(), strict=True):
            of_type.setdefault(name, set()).add(role)
        mixed = [name for name, roles in of_type.items() if roles & {BEGIN, INSIDE} and END not in roles]
        if mixed:
            begin, inside, end, _ = SCHEMES[self.scheme]
            raise DataError(
                f"labels: {', '.join(mixed)} has {begin}- or {inside}- and no {end}-, as others have: two schemes are "
                "mixed; correct id2label, or say which scheme it is"
            )

    @property
    def entity_types(self) -> list[str]:
        """The types that entities can have, sorted."""
        return sorted(set(self.types) - {""})

    @property
    def outside_id(self) -> int:
        """The id of the label that means outside.

        Raises:
            DataError: there is none.
        """
        if self.outside is None:
            raise DataError(f"labels: none of {', '.join(self.names)} means outside")
        return self.ids[self.outside]

    def id_of(self, role: int, label_type: str) -> int:
        """The id of the label with this role and type.

        Raises:
            DataError: there is none.
        """
        found = np.flatnonzero((self.roles == role) & [name == label_type for name in self.types])
        if not len(found):
            letter = SCHEMES[self.scheme][role - BEGIN]
            raise DataError(f"labels: {letter}-{label_type} is not one of {', '.join(self.names)}")
        return int(found[0])

    def ids_of_spans(self, spans: Iterable[tuple[str, int, int]], length: int) -> Ints:
        """(length,) ids of a sequence with these entities, which must not overlap."""
        ids = np.full(length, self.outside_id, dtype=np.int64)
        for label, start, end in spans:
            roles = _roles_of_span(SCHEMES[self.scheme], end - start)
            known = {role: self.id_of(role, label) for role in set(roles)}
            ids[start:end] = [known[role] for role in roles]
        return ids

    # What the scheme allows.

    def _can_start(self) -> Bools:
        begins = (INSIDE,) if self.scheme == "IO" else (BEGIN, SINGLE)
        return np.isin(self.roles, (OUTSIDE, *begins)) & ~self.padding

    def _can_end(self) -> Bools:
        opened = SCHEMES[self.scheme].end is not None
        return ~np.isin(self.roles, (BEGIN, INSIDE) if opened else ()) & ~self.padding

    def legal_start(self) -> Bools:
        """(K,) bool: labels that a sequence may begin with."""
        return self._can_start()

    def legal_end(self) -> Bools:
        """(K,) bool: labels that a sequence may end with."""
        return self._can_end()

    def legal_transitions(self) -> Bools:
        """(K, K) bool: whether label j may follow label i."""
        return self.continues | (self._can_end()[:, None] & self._can_start()[None, :])

    # Reading.

    def encode(self, tags: Iterable[str]) -> Ints:
        """Ids of tags.

        Raises:
            DataError: a tag that is not in the set.
        """
        tags = list(tags)
        try:
            return np.array([self.ids[tag] for tag in tags], dtype=np.int64)
        except KeyError as error:
            raise DataError(f"tag {error.args[0]!r}: not one of {', '.join(self.names)}") from None

    def runs(self, ids: Ints, mode: str = "lenient") -> tuple[Ints, Ints]:
        """Starts and ends (exclusive) of the entities in a sequence of label ids (T,)."""
        if mode not in ("lenient", "strict"):
            raise DataError(f"mode: expected lenient or strict, got {mode!r}")
        inside = self.roles[ids] != OUTSIDE
        goes_on = np.zeros(len(ids) + 1, dtype=bool)
        if len(ids):
            goes_on[1:-1] = self.continues[ids[:-1], ids[1:]]
        starts = np.flatnonzero(inside & ~goes_on[:-1])
        ends = np.flatnonzero(inside & ~goes_on[1:]) + 1
        if mode == "strict" and len(starts):
            first, last = self.roles[ids[starts]], self.roles[ids[ends - 1]]
            if self.scheme == "BIO":
                whole = first == BEGIN
            elif self.scheme == "IO":
                whole = np.ones(len(starts), dtype=bool)
            else:
                whole = (first == SINGLE) | ((first == BEGIN) & (last == END))
            starts, ends = starts[whole], ends[whole]
        return starts, ends

    def spans(self, ids: Ints, mode: str = "lenient") -> list[Span]:
        """The entities in a sequence of label ids (T,)."""
        starts, ends = self.runs(ids, mode)
        labels = ids[starts] if len(ids) else starts
        return [
            Span(self.types[label], start, end)
            for label, start, end in zip(labels.tolist(), starts.tolist(), ends.tolist(), strict=True)
        ]


def spans_from_tags(tags: Sequence[str], scheme: str = "auto", mode: str = "lenient") -> list[Span]:
    """The entities of a tag sequence, in order.

    Args:
        tags: such as `["B-PER", "I-PER", "O"]`.
        scheme: as for `LabelSet`; "auto" takes I- alone for BIO.
        mode: "lenient" or "strict".

    Raises:
        DataError: tags that mix schemes, or that are not the scheme's.
    """
    labels = LabelSet(list(dict.fromkeys(tags)), scheme, complete=False)
    return labels.spans(labels.encode(tags), mode)


def tags_from_spans(
    spans: Iterable[Span | tuple[str, int, int]], length: int, scheme: str = "BIO", outside: str = "O"
) -> list[str]:
    """The tags of a sequence of `length` with these entities.

    Raises:
        DataError: spans that overlap, are empty, or lie outside the sequence; no such scheme.
    """
    if scheme not in SCHEMES:
        raise DataError(f"scheme: expected {', '.join(SCHEMES)}, got {scheme!r}")
    letters = SCHEMES[scheme]
    tags = [outside] * length
    last_end = 0
    for label, start, end in sorted(spans, key=lambda span: (span[1], span[2])):
        if not last_end <= start < end <= length:
            raise DataError(f"span {label} {start}..{end}: overlaps another or does not lie within {length} tags")
        last_end = end
        tags[start:end] = [f"{letters[role - BEGIN]}-{label}" for role in _roles_of_span(letters, end - start)]
    return tags


def _roles_of_span(scheme: Scheme, length: int) -> list[int]:
    roles = [INSIDE] * length
    if scheme.begin is not None:
        roles[0] = BEGIN
    if scheme.end is not None:
        roles[-1] = END
    if scheme.single is not None and length == 1:
        roles[0] = SINGLE
    return roles


def _are_untyped(names: Sequence[str]) -> bool:
    """Whether these are B, I, O and the like, with no types."""
    others = [name for name in names if not UNTYPED.fullmatch(name) and name.upper() not in PADDING]
    return "B" in names and all(name.upper() in USUAL_OUTSIDE for name in others)


def _find_scheme(letters: set[str], num_bare: int, complete: bool) -> str:
    if not letters:
        return "IO" if num_bare > 1 or complete else "BIO"
    if letters == {"I"}:
        return "IO" if complete else "BIO"
    for name in ("BIO", "BIOES", "BMES", "BILOU"):
        if letters <= set(filter(None, SCHEMES[name])):
            return name
    raise DataError(
        f"labels: the prefixes {', '.join(sorted(letters))} belong to no one scheme; expected those of "
        + ", of ".join(f"{name} ({', '.join(filter(None, scheme))})" for name, scheme in SCHEMES.items())
    )
