"""The page that reports share."""

import sys
from pathlib import Path

import pytest
from browser import BROWSER, drawn, open_page

from shapeserve.errors import ConfigError
from shapeserve.page import bullets, chart, new_figure, page, require_plotly, table, write_page

in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")


def test_a_missing_plotly_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"pip install 'shapeserve\[tune\]'"):
        require_plotly()


def test_a_page_that_cannot_be_written_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--report .*nowhere.*: cannot be written"):
        write_page("text", str(tmp_path / "nowhere" / "report.html"))


def test_texts_of_a_page_are_never_markup() -> None:
    evil = "<script>alert(1)</script>"
    body = bullets([evil]) + table([evil], ["n"], [(evil, "1"), (evil,)])
    assert "<script>" not in body
    assert "<title>&lt;script&gt;" in page(evil, "")


@in_a_browser
def test_a_page_draws_its_charts_and_can_fetch_nothing(tmp_path: Path) -> None:
    figure = new_figure("lines", "y")
    figure.add_scatter(x=[1, 2], y=[3, 4])
    good, bad = tmp_path / "good.html", tmp_path / "bad.html"
    write_page(page("good", chart(figure)), str(good))
    fetches = '<img src="http://192.0.2.1/a.png"><script>fetch("http://192.0.2.1/b")</script>'
    write_page(page("bad", fetches), str(bad))
    opened = open_page(good)
    assert [drawn(found) for found in opened.charts] == [1 + 2]  # a line and two points
    assert opened.complaints == []
    complaints = "\n".join(open_page(bad).complaints)
    assert "a.png" in complaints
    assert "192.0.2.1/b" in complaints
    assert "Content Security Policy" in complaints
