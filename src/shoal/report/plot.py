"""A picture of how a run has learned: one SVG of bounded size, for light and dark backgrounds.

         title, run                                  legend
     ^   | round 1     | round 2     | round 3
loss |   ~~~~~ band and mean of the training loss
     |       o-----o-----o held-out loss
     +------------------------------------------> samples

It is a pure function of what it shows, written by hand: libraries for charts either bring a numerical stack, which is
much for the last second of a run, or draw no band and no second set of colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from shoal.events.run import LossPart
from shoal.report.learning import Learning, Trained

WIDTH, HEIGHT = 860, 430
LEFT, RIGHT, TOP, BOTTOM = 62, 842, 82, 380
MAX_PARTS, MAX_POINTS, MAX_INCIDENTS = 390, 160, 100
"""What is shown of the training loss, of evaluations and of incidents: about one part for two pixels."""

_LOG_FROM = 30.0
"""From this ratio of the greatest to the least loss on, the axis is logarithmic."""
_CHAR, _ROW = 6.2, 14
_STYLE = """
svg{--back:#fff;--ink:#1f2328;--soft:#59636e;--grid:#e3e7eb;--train:#2166ac;--held:#c2410c;--lost:#a3154a}
@media(prefers-color-scheme:dark){
svg{--back:#0d1117;--ink:#e6edf3;--soft:#9aa4af;--grid:#2b323b;--train:#6cb0f5;--held:#f7a35c;--lost:#f47fb0}}
text{font:12px system-ui,"DejaVu Sans",sans-serif;fill:var(--soft)}.t{font-size:15px;font-weight:600;fill:var(--ink)}
.e{text-anchor:end}.m{text-anchor:middle}.g{stroke:var(--grid)}.r{stroke:var(--soft);stroke-dasharray:1 4}
.s{font-size:10px}.b{fill:var(--train);opacity:.22}.l{fill:none;stroke-width:1.8;stroke-linejoin:round}
.tr{stroke:var(--train)}.he{stroke:var(--held)}.d{fill:var(--held)}.x{stroke:var(--lost);stroke-dasharray:4 3}
.xl{font-size:11px;fill:var(--lost);paint-order:stroke;stroke:var(--back);stroke-width:3px}
"""


@dataclass(frozen=True)
class Caption:
    """What stands around the curves.

    Attributes:
        run: which run, and how large it was.
        unit: of the losses, as "nats per token".
        has_perplexity: its exponential has a meaning of its own.
    """

    title: str
    run: str
    unit: str
    has_perplexity: bool


def draw(learning: Learning, caption: Caption) -> str:
    """Return the picture.

    Raises:
        ValueError: nothing was trained, so there is nothing to see.
    """
    if not learning.trained:
        raise ValueError("a run without a trained round has no curve")
    trained = merged(learning.trained, MAX_PARTS)
    held_out = thinned(learning.held_out, MAX_POINTS)
    across = _Across(min(at for at, _ in ((learning.trained[0].samples, 0), *held_out)), learning.trained[-1].samples)
    up = _scale([part.loss.mean for part in trained] + [loss for _, loss in held_out])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(caption.title)}: {escape(caption.run)}</title><style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--back)"/>',
        f'<clipPath id="c"><rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/></clipPath>',
        _text(LEFT, 24, caption.title, "t"),
        _text(LEFT, 43, caption.run),
        *_axes(across, up, caption),
        *_rounds(learning.rounds, across),
        *_training(trained, across, up),
        *_held_out(held_out, across, up),
        *_incidents(learning.incidents, across),
        *_legend(learning, caption),
        "</svg>\n",
    ]
    return "\n".join(parts)


# ---- fewer points ------------------------------------------------------------------------------------------------


def merged(parts: Sequence[Trained], most: int) -> list[Trained]:
    """Return at most so many parts, each of neighbours: their least, mean over samples, and greatest loss."""
    per_part = -(-len(parts) // most)
    return [_one(parts[start : start + per_part]) for start in range(0, len(parts), per_part)]


def _one(parts: Sequence[Trained]) -> Trained:
    losses = [part.loss for part in parts]
    samples = sum(loss.samples for loss in losses)
    mean = sum(loss.mean * loss.samples for loss in losses) / samples
    least, most = min(loss.least for loss in losses), max(loss.most for loss in losses)
    return Trained(parts[-1].samples, LossPart(samples, least, mean, most))


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return at most so many points, the first and the last among them: those that keep the shape of the curve best.

    It is largest-triangle-three-buckets (Steinarsson 2013): of each bucket the point that makes the largest triangle
    with the one that was chosen before and the mean of the next bucket.
    """
    if len(points) <= most:
        return list(points)
    inner, num_buckets = points[1:-1], most - 2
    edges = [index * len(inner) // num_buckets for index in range(num_buckets + 1)]
    buckets = [inner[start:stop] for start, stop in pairwise(edges)]
    chosen = [points[0]]
    for bucket, following in zip(buckets, [*buckets[1:], [points[-1]]], strict=True):
        next_x = sum(x for x, _ in following) / len(following)
        next_y = sum(y for _, y in following) / len(following)
        x, y = chosen[-1]
        chosen.append(max(bucket, key=lambda p: abs((x - next_x) * (p[1] - y) - (x - p[0]) * (next_y - y))))
    return [*chosen, points[-1]]


# ---- scales ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Across:
    """Samples to pixels."""

    first: float
    last: float

    def __call__(self, samples: float) -> float:
        return LEFT + (samples - self.first) / ((self.last - self.first) or 1.0) * (RIGHT - LEFT)

    def ticks(self) -> list[float]:
        return _linear_ticks(self.first, self.last, 8)


@dataclass(frozen=True)
class _Up:
    """Losses to pixels."""

    least: float
    most: float
    is_log: bool

    def __call__(self, loss: float) -> float:
        low, high, value = self.least, self.most, loss
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low / 10))
        return BOTTOM - (value - low) / ((high - low) or 1.0) * (BOTTOM - TOP)

    def ticks(self) -> list[float]:
        if not self.is_log:
            return _linear_ticks(self.least, self.most, 6)
        powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
        return [tick for power in powers for tick in (10.0**power, 3 * 10.0**power) if self.least <= tick <= self.most]


def _scale(losses: Sequence[float]) -> _Up:
    least, most = min(losses), max(losses)
    if least > 0 and most > _LOG_FROM * least:
        return _Up(least / 1.2, most * 1.2, is_log=True)
    room = 0.08 * (most - least) or 0.5
    return _Up(least - room, most + room, is_log=False)


def _linear_ticks(first: float, last: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, at most so many."""
    raw = ((last - first) or 1.0) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [number * step for number in range(math.ceil(first / step), math.floor(last / step) + 1)]


# ---- what is drawn -----------------------------------------------------------------------------------------------


def _axes(across: _Across, up: _Up, caption: Caption) -> list[str]:
    lines = [_line(LEFT, up(tick), RIGHT, up(tick), "g") for tick in up.ticks()]
    lines += [_text(LEFT - 7, up(tick) + 4, f"{tick:.4g}", "e") for tick in up.ticks()]
    lines += [_line(across(tick), BOTTOM, across(tick), BOTTOM + 4, "g") for tick in across.ticks()]
    lines += [_text(across(tick), BOTTOM + 18, _short(tick), "m") for tick in across.ticks()]
    lines.append(_text((LEFT + RIGHT) / 2, HEIGHT - 12, "samples trained on", "m"))
    title = f"loss, {caption.unit}{', logarithmic' if up.is_log else ''}"
    middle = (TOP + BOTTOM) / 2
    lines.append(f'<text class="m" transform="translate(16 {middle:g}) rotate(-90)">{escape(title)}</text>')
    return lines


def _rounds(rounds: dict[int, int], across: _Across) -> list[str]:
    lines: list[str] = []
    line_at = text_at = -math.inf
    for number, samples in rounds.items():
        x = across(samples)
        if x - line_at >= 5:
            line_at = x
            lines.append(_line(x, TOP, x, BOTTOM, "r"))
        if x - text_at >= 30:
            text_at = x
            lines.append(_text(x, TOP - 5, f"{number}", "s m"))
    return [_text(LEFT, TOP - 5, "round", "s"), *lines]


def _training(parts: Sequence[Trained], across: _Across, up: _Up) -> list[str]:
    top = [(across(part.samples), up(part.loss.most)) for part in parts]
    bottom = [(across(part.samples), up(part.loss.least)) for part in parts]
    mean = [(across(part.samples), up(part.loss.mean)) for part in parts]
    return [
        f'<path class="b" clip-path="url(#c)" d="M{_points([*top, *reversed(bottom)])}Z"/>',
        f'<path class="l tr" d="M{_points(mean)}"/>',
    ]


def _held_out(points: Sequence[tuple[int, float]], across: _Across, up: _Up) -> list[str]:
    places = [(across(samples), up(loss)) for samples, loss in points]
    if not places:
        return []
    dots = [f'<circle class="d" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places] if len(places) <= 60 else []
    return [f'<path class="l he" d="M{_points(places)}"/>', *dots]


def _incidents(incidents: Sequence[tuple[int, str]], across: _Across) -> list[str]:
    """A line for each, and its name in the first row that has room for it; a pointer shows the others' names."""
    lines: list[str] = []
    names: list[str] = []
    free_from = [-math.inf] * 4
    for samples, said in sorted(incidents)[:MAX_INCIDENTS]:
        x, width = across(samples), _CHAR * len(said)
        lines.append(f"<g><title>{escape(said)}</title>{_line(x, TOP, x, BOTTOM, 'x')}</g>")
        start = min(x + 4, RIGHT - width)
        row = next((row for row, free in enumerate(free_from) if free <= start), None)
        if row is not None:
            free_from[row] = start + width + 8
            names.append(_text(start, TOP + 14 + row * _ROW, said, "xl"))
    return [*lines, *names]


def _legend(learning: Learning, caption: Caption) -> list[str]:
    last = learning.trained[-1].loss
    entries = [("tr", f"training loss {_digits(last.mean)}, with its range")]
    if learning.held_out:
        loss = learning.held_out[-1][1]
        perplexity = f", perplexity {_digits(math.exp(min(loss, 700.0)))}" if caption.has_perplexity else ""
        entries.append(("he", f"held-out loss {_digits(loss)}{perplexity}"))
    if learning.incidents:
        entries.append(("x", f"incidents: {len(learning.incidents)}"))
    lines: list[str] = []
    for row, (style, said) in enumerate(entries):
        y = 20 + row * 17
        lines.append(_line(RIGHT - 22, y - 4, RIGHT, y - 4, f"l {style}"))
        lines.append(_text(RIGHT - 28, y, said, "e"))
    return lines


# ---- SVG ---------------------------------------------------------------------------------------------------------


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(x: float, y: float, said: str, style: str = "") -> str:
    of = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of}>{escape(said)}</text>'


def _points(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _short(number: float) -> str:
    """Write a number of samples: 500, 20k, 1.5M."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            return f"{number / unit:.4g}{suffix}"
    return f"{number:.4g}"
