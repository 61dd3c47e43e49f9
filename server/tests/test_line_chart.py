from __future__ import annotations

from xml.etree import ElementTree

import pytest

from fourfold_server.line_chart import HEIGHT, LineChart, Panel, Series

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*series: Series, x_log: bool = False) -> ElementTree.Element:
    panel = Panel(title="a < b", x_label="x", y_label="s", series=series, x_log=x_log)
    return ElementTree.fromstring(LineChart(panels=(panel,)).svg())


def points(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter(f"{SVG}polyline")
    ]


def test_more_is_higher_and_further_right() -> None:
    [line] = points(drawn(Series(name="n", x=[0, 1, 2], y=[0, 5, 10])))
    assert line == sorted(line)
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0])


def test_on_a_logarithmic_axis_equal_factors_are_equally_far() -> None:
    [line] = points(drawn(Series(name="n", x=[0, 0.01, 0.1, 1], y=[1, 2, 3, 4]), x_log=True))
    assert len(line) == 3
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0], abs=0.2)


@pytest.mark.parametrize("values", [[], [0], [3, 3], [1e-9, 2e-9], [1e12, 3]])
def test_any_numbers_can_be_drawn(values: list[float]) -> None:
    for x_log in (False, True):
        for line in points(drawn(Series(name="n", x=values, y=values), x_log=x_log)):
            assert all(0 <= y <= HEIGHT for _, y in line)


def test_names_are_text() -> None:
    root = drawn(Series(name="<b>", x=[1], y=[1]))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "<b>" in texts
    assert "a < b" in texts
