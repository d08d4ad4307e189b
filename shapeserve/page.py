"""One HTML file that needs nothing else: its style, tables and charts; what reports share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shapeserve.errors import ConfigError

# Okabe and Ito's colours, which colour-blind readers tell apart.
GREY, BLUE, GREEN, VERMILION = "#999999", "#0072B2", "#009E73", "#D55E00"

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1.5rem;
  color: #1b1b1b; background: #fff; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #e5e5e5; }
th { background: #f5f5f5; } td.word, th.word { text-align: left; }
td.bad { color: #a40000; } .scroll { overflow-x: auto; } .dim { color: #555; }
"""
# A browser that opens the file fetches nothing, whatever its names and charts contain.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def require_plotly() -> None:
    """Check that reports can be drawn, before what they are about is measured.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--report needs the extra tune ({error}); install it: pip install 'shapeserve[tune]'"
        ) from error


def page(title: str, body: str) -> str:
    """Return a whole document; ``body`` is HTML, the title a text."""
    require_plotly()
    from plotly.offline import get_plotlyjs

    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>{body}</body></html>\n"
    )


def write_page(text: str, path: str) -> None:
    """Write a document to a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--report {path}: cannot be written: {error.strerror}; give another path"
        ) from error


def bullets(lines: Iterable[str]) -> str:
    """Return a list of sentences."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def table(
    words: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[str]],
    remarks: Sequence[str] = (),
) -> str:
    """Return a table with columns of words, of numbers, and of words again.

    A row that ends early ends in words, over what is left of it: what went wrong.
    """
    kinds = ["word"] * len(words) + ["number"] * len(numbers) + ["word"] * len(remarks)
    names = (*words, *numbers, *remarks)
    head = "".join(f'<th class="{k}">{escape(n)}</th>' for k, n in zip(kinds, names, strict=True))
    body = ""
    for row in rows:
        cells = [f'<td class="{k}">{escape(c)}</td>' for k, c in zip(kinds, row, strict=False)]
        if len(row) < len(kinds):
            span = len(kinds) - len(row) + 1
            cells[-1] = f'<td class="word bad" colspan="{span}">{escape(row[-1])}</td>'
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def chart(figure: Any) -> str:
    """Return a plotly figure as a part of a page."""
    from plotly.io import to_html

    options = {"displaylogo": False, "responsive": True}
    return str(to_html(figure, config=options, include_plotlyjs=False, full_html=False))


def new_figure(title: str, y: str, x: str = "") -> Any:
    """Return an empty plotly figure in the style of all charts."""
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_layout(
        title=title,
        template="plotly_white",
        height=420,
        margin={"l": 70, "r": 20, "t": 60, "b": 60},
        legend={"orientation": "h", "y": -0.25},
    )
    figure.update_yaxes(title=y)
    figure.update_xaxes(title=x)
    return figure
