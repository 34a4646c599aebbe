"""What a comparison found: as a table, as JSON, and as a page with a plot by depth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from minibert.formats import html_head
from minibert.parity.causes import Finding
from minibert.parity.differences import Difference
from minibert.writing import replacing

STYLE = """\
<style>
svg text { font: 11px sans-serif; fill: #444; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.above td { background: #fdd; }
.verdict { font-weight: bold; }
</style>
"""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1000, 360, 56, 16, 40  # of the plot


@dataclass(frozen=True)
class Report:
    """Two models at every point. `first` is the first one outside its tolerance, None if there is none."""

    candidate: str
    reference: str
    dtype: str
    device: str
    num_texts: int
    num_tokens: int
    rows: list[Difference]
    gradients: list[Difference]  # by depth
    first: Difference | None
    finding: Finding
    notes: list[str]
    seconds: float

    @property
    def is_within(self) -> bool:
        """Whether every value and every gradient is within its tolerance."""
        return self.first is None

    def verdict(self) -> Iterator[str]:
        """What there is to say, a sentence a line."""
        if self.first is None:
            yield f"the same: {len(self.rows)} values{self._gradients_said()} are within their tolerance"
            yield from self.notes
            return
        what = "gradient" if self.first in self.gradients else "module"
        yield f"first {what} outside its tolerance: {self.first.name} ({self._size(self.first)})"
        for index, cause in enumerate(self.finding.causes):
            yield f"{'or' if index and self.finding.are_alternatives else 'cause'}: {cause}"
        if self.finding.extent:
            yield f"only in: {self.finding.extent}"
        if not self.finding.causes and self.finding.usual:
            yield f"cause not decided; usual ones here: {self.finding.usual}"
        yield from self.notes

    @staticmethod
    def _size(row: Difference) -> str:
        if row.shapes:
            return f"shape {row.shapes}"
        if not row.largest <= row.allowed:
            return f"largest difference {row.largest:.2e}, allowed {row.allowed:.2e}"
        return f"relative error {row.relative:.2e}, allowed {row.allowed_relative:.2e}"

    def _gradients_said(self) -> str:
        return f" and {len(self.gradients)} gradients" if self.gradients else ""

    def lines(self) -> Iterator[str]:
        """A table for a terminal, and the verdict."""
        yield f"candidate  {self.candidate}"
        yield f"reference  {self.reference}"
        yield f"{self.num_texts} texts, {self.num_tokens} tokens, on {self.device}, {self.seconds:.1f} s"
        for title, rows in (("module", self.rows), ("gradient", self.gradients)):
            if rows:
                yield ""
                yield from _table(title, rows)
        yield ""
        yield from self.verdict()

    def to_json(self) -> str:
        """Everything as one JSON object."""
        first = None if self.first is None else self.first.name
        facts = {
            "candidate": self.candidate, "reference": self.reference, "dtype": self.dtype, "device": self.device,
            "texts": self.num_texts, "tokens": self.num_tokens, "seconds": round(self.seconds, 2),
            "within": self.is_within, "first": first, "causes": self.finding.causes,
            "alternatives": self.finding.are_alternatives, "usual": self.finding.usual,
            "extent": self.finding.extent, "notes": self.notes,
            "modules": [row.figures() for row in self.rows],
            "gradients": [row.figures() for row in self.gradients],
        }  # fmt: skip
        return json.dumps(facts, ensure_ascii=False)

    def write_page(self, path: Path) -> None:
        """An HTML page that needs nothing but itself.

        Raises:
            CheckpointError: it cannot be written.
        """
        content = self.page().encode("utf-8")
        with replacing(path.parent) as write:
            write(path.name, lambda place: place.write_bytes(content))

    def page(self) -> str:
        """The verdict, the plot and the tables."""
        body = [html_head("Parity"), STYLE]
        body.append(f"<p>Candidate: {escape(self.candidate)}<br>Reference: {escape(self.reference)}<br>")
        body.append(f"{self.num_texts} texts, {self.num_tokens} tokens, on {escape(self.device)}</p>")
        body += [f'<p class="verdict">{escape(line)}</p>' for line in self.verdict()]
        for title, rows in (("Modules", self.rows), ("Gradients", self.gradients)):
            if rows:
                body += [f"<h2>{title} by depth</h2>", plot(rows, self.first), *_html_table(rows)]
        return "\n".join([*body, "</body></html>"]) + "\n"


def _table(title: str, rows: Sequence[Difference]) -> Iterator[str]:
    width = max(len(title), *(len(row.name) for row in rows))
    own = any(row.own is not None for row in rows)
    header = f"{title:{width}}  {'largest':>9}  {'mean':>9}  {'relative':>9}  {'cosine':>10}"
    yield header + (f"  {'reference':>9}" if own else "")
    for row in rows:
        figures = f"{row.largest:9.2e}  {row.mean:9.2e}  {row.relative:9.2e}  {row.cosine:10.7f}"
        said = f"  {row.own:9.2e}" if row.own is not None else " " * 11 * own
        yield f"{row.name:{width}}  {figures}{said}{'' if row.is_within else f'  {row.excess}'}"


def _html_table(rows: Sequence[Difference]) -> Iterator[str]:
    own = any(row.own is not None for row in rows)
    names = ["largest", "mean", "relative", "cosine", "allowed", *(["reference's own error"] if own else [])]
    yield "<table><tr><th></th>" + "".join(f'<th class="number">{name}</th>' for name in names) + "</tr>"
    for row in rows:
        figures = [f"{x:.2e}" for x in (row.largest, row.mean, row.relative)]
        figures += [f"{row.cosine:.7f}", f"{row.allowed:.2e}"]
        figures += ["" if row.own is None else f"{row.own:.2e}"] if own else []
        cells = "".join(f'<td class="number">{figure}</td>' for figure in figures)
        above = "" if row.is_within else ' class="above"'
        yield f"<tr{above}><td>{escape(row.name)}</td>{cells}</tr>"
    yield "</table>"


def plot(rows: Sequence[Difference], first: Difference | None) -> str:
    """Largest differences by depth on a logarithmic scale, as SVG: drawn here, since its points say their names."""
    values = [row.largest for row in rows] + [row.allowed for row in rows]
    finite = [value for value in values if math.isfinite(value) and value > 0] or [1e-7, 1.0]
    low, high = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
    high = max(high, low + 1)

    def x(index: int) -> float:
        return LEFT + (index + 0.5) * (WIDTH - LEFT - 8) / len(rows)

    def y(value: float) -> float:
        shown = min(max(math.log10(value), low), high) if value > 0 and not math.isnan(value) else low
        shown = high if math.isnan(value) else shown
        return TOP + (high - shown) * (HEIGHT - TOP - BOTTOM) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="differences by depth">']
    for power in range(low, high + 1, max(1, (high - low) // 8)):
        at = y(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    parts += _depths(rows, x)
    lines: list[tuple[str, str, list[float]]] = [("allowed", "#c00", [row.allowed for row in rows])]
    if all(row.own is not None for row in rows):
        lines.append(("reference's own error", "#888", [row.own or 0.0 for row in rows]))
    lines.append(("largest difference", "#36c", [row.largest for row in rows]))
    for number, (name, colour, series) in enumerate(lines):
        spots = " ".join(f"{x(index):.1f},{y(value):.1f}" for index, value in enumerate(series))
        dashed = ' stroke-dasharray="5 3"' if colour != "#36c" else ""
        parts.append(f'<polyline points="{spots}" fill="none" stroke="{colour}"{dashed}/>')
        parts.append(
            f'<text x="{LEFT + 8 + 150 * number}" y="{HEIGHT - 4}" style="fill: {colour}">{escape(name)}</text>'
        )
    for index, row in enumerate(rows):
        colour = "#36c" if row.is_within else "#c00"
        said = f"{row.name}: {row.largest:.2e}, allowed {row.allowed:.2e}"
        radius = 6 if row is first else 3
        spot = f'cx="{x(index):.1f}" cy="{y(row.largest):.1f}" r="{radius}" fill="{colour}"'
        parts.append(f"<circle {spot}><title>{escape(said)}</title></circle>")
        if row is first:
            anchor = "end" if index > len(rows) / 2 else "start"
            shift = -9 if anchor == "end" else 9
            place = f'x="{x(index) + shift:.1f}" y="{max(y(row.largest) - 8, 12):.1f}" text-anchor="{anchor}"'
            parts.append(f"<text {place}>{escape(row.name)}</text>")
    return "\n".join([*parts, "</svg>"])


def _depths(rows: Sequence[Difference], x: Callable[[int], float]) -> Iterator[str]:
    """Boundaries between depths, and what each is."""
    starts = [index for index, row in enumerate(rows) if index == 0 or row.depth != rows[index - 1].depth]
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        depth, is_layer = rows[start].depth, rows[start].name.startswith("encoder.")
        name = f"layer {depth - 1}" if is_layer else "head" if depth else "emb."
        middle = (x(start) + x(end - 1)) / 2
        yield f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{name}</text>'
        if end < len(rows):
            at = (x(end - 1) + x(end)) / 2
            yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>'
