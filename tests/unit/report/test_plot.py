"""The picture of how a run has learned."""

from __future__ import annotations

import math
import random
from xml.etree import ElementTree

import pytest

from shoal.events.run import LossPart
from shoal.report.learning import Learning, Trained
from shoal.report.plot import BOTTOM, LEFT, RIGHT, TOP, Caption, draw, merged, thinned

CAPTION = Caption("gpt on <mine>", "run-1, 2 stages", "nats per token", has_perplexity=True)
SVG = "{http://www.w3.org/2000/svg}"


def part(samples: int, mean: float, spread: float = 0.5, size: int = 10) -> Trained:
    return Trained(samples, LossPart(size, mean - spread, mean, mean + spread))


def learning(**values: object) -> Learning:
    trained = (part(10, 5.0), part(20, 4.0), part(30, 3.0), part(40, 2.0))
    known = {"trained": trained, "held_out": ((0, 6.0), (40, 2.5)), "rounds": {1: 20, 2: 40}, "incidents": ()}
    return Learning(**{**known, "seconds": 8.0, **values})  # type: ignore[arg-type]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def paths(svg: str, style: str) -> list[list[tuple[float, float]]]:
    found = [each for each in ElementTree.fromstring(svg).iter(f"{SVG}path") if each.get("class") == style]
    places = [(each.get("d") or "").strip("MZ").split("L") for each in found]
    return [[(float(x), float(y)) for x, y in (pair.split() for pair in each)] for each in places]


def test_curves_run_from_the_left_end_to_the_right_one_and_lie_as_high_as_their_losses() -> None:
    svg = draw(learning(), CAPTION)
    mean, _ = paths(svg, "l tr")
    held_out, _ = paths(svg, "l he")
    assert [x for x, _ in held_out] == [LEFT, RIGHT]
    assert mean[-1][0] == RIGHT
    assert [y for _, y in mean] == sorted(y for _, y in mean), "a falling loss goes down"
    assert mean[1][1] - mean[0][1] == pytest.approx(mean[3][1] - mean[2][1], abs=0.2)
    assert held_out[0][1] < mean[0][1], "6 is above 5"
    assert all(TOP < y < BOTTOM for _, y in (*mean, *held_out))


def test_it_says_what_it_shows_with_units_and_the_last_losses() -> None:
    said = texts(draw(learning(), CAPTION))
    assert said[:2] == ["gpt on <mine>", "run-1, 2 stages"]
    assert {"loss, nats per token", "samples trained on", "round", "1", "2", "training loss 2, with its range"} <= set(
        said
    )
    assert "held-out loss 2.5, perplexity 12.18" in said
    assert {"0", "10", "20", "30", "40"} <= set(said)
    of_images = Caption("mlp on digits", "run-2", "nats per image", has_perplexity=False)
    assert "held-out loss 2.5" in texts(draw(learning(), of_images))


def test_incidents_have_a_line_and_a_name_and_names_do_not_cover_each_other() -> None:
    svg = draw(
        learning(incidents=((20, "server 1@box lost"), (20, "trainer 0 lost"), (30, "stage 1 began anew"))), CAPTION
    )
    named = [each for each in ElementTree.fromstring(svg).iter(f"{SVG}text") if each.get("class") == "xl"]
    assert [each.text for each in named] == ["server 1@box lost", "trainer 0 lost", "stage 1 began anew"]
    assert named[0].get("y") != named[1].get("y")
    assert len({line[0] for line, *_ in [paths(svg, "x")[:3]]}) == 1
    assert "incidents: 3" in texts(svg)


def test_a_name_near_the_right_end_stays_in_the_picture() -> None:
    svg = draw(learning(incidents=((40, "a server with a rather long name is lost"),)), CAPTION)
    [name] = [each for each in ElementTree.fromstring(svg).iter(f"{SVG}text") if each.get("class") == "xl"]
    assert float(name.get("x") or 0) + 6 * len(name.text or "") < RIGHT


def test_it_has_colours_for_light_and_for_dark_and_takes_nothing_from_elsewhere() -> None:
    svg = draw(learning(), CAPTION)
    style = svg.partition("<style>")[2].partition("</style>")[0]
    light, dark = style.split("@media(prefers-color-scheme:dark)")
    names = ("back", "ink", "soft", "grid", "train", "held", "lost")
    assert all(f"--{name}:#" in light and f"--{name}:#" in dark for name in names)
    assert svg.count("http") == 1, "the name of the format alone"


def test_losses_that_are_far_apart_lie_on_a_logarithmic_axis() -> None:
    svg = draw(learning(trained=(part(10, 300.0), part(20, 30.0), part(30, 3.0)), held_out=()), CAPTION)
    assert "loss, nats per token, logarithmic" in texts(svg)
    [high, middle, low] = paths(svg, "l tr")[0]
    assert middle[1] - high[1] == pytest.approx(low[1] - middle[1], abs=0.2)


def test_a_run_of_one_step_is_a_picture_too_and_one_without_any_is_none() -> None:
    svg = draw(learning(trained=(part(4, 5.0),), held_out=(), rounds={1: 4}), CAPTION)
    assert paths(svg, "l tr")
    with pytest.raises(ValueError, match="without a trained round"):
        draw(learning(trained=()), CAPTION)


def test_a_run_of_100000_steps_is_at_most_60_kb_and_keeps_its_extremes() -> None:
    drawn = random.Random(1)
    steps = [
        Trained(32 * (n + 1), LossPart(32, *sorted(drawn.gauss(9 - n**0.15, 0.4) for _ in range(3))))
        for n in range(100_000)
    ]
    rounds = {number: 32 * 40 * number for number in range(1, 2501)}
    held_out = tuple((samples, 9 - number**0.2) for number, samples in rounds.items())
    incidents = tuple((samples, f"server {number} lost") for number, samples in rounds.items())
    svg = draw(learning(trained=tuple(steps), rounds=rounds, held_out=held_out, incidents=incidents), CAPTION)
    assert len(svg.encode()) <= 60_000
    few = merged(steps, 390)
    assert len(few) <= 390
    assert min(each.loss.least for each in few) == min(each.loss.least for each in steps)
    assert max(each.loss.most for each in few) == max(each.loss.most for each in steps)
    assert sum(each.loss.samples for each in few) == 3_200_000
    mean = sum(each.loss.mean for each in steps) / len(steps)
    assert sum(each.loss.mean * each.loss.samples for each in few) / 3_200_000 == pytest.approx(mean)
    assert f"incidents: {len(incidents)}" in texts(svg)


def test_thinned_points_keep_the_first_the_last_and_a_spike() -> None:
    points = [(x, math.sin(x / 200)) for x in range(5000)]
    points[2345] = (2345, 9.0)
    few = thinned(points, 160)
    assert len(few) == 160
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert points[2345] in few
    assert few == sorted(few)
    assert thinned(points[:160], 160) == points[:160]
