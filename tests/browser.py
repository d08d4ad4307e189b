"""Open a page in a headless Chromium: what it draws, what it complains about, how it looks.

``python tests/browser.py PAGE.html IMAGE.png WIDTH HEIGHT`` makes the images of docs/images.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network, whatever the page asks for
    "--enable-logging=stderr",
)


@dataclass(frozen=True)
class Opened:
    """A page after its scripts have run."""

    dom: str
    complaints: list[str]  # what it wrote to the console: errors, refused fetches

    @property
    def charts(self) -> list[str]:
        """The document from each chart to the next."""
        return self.dom.split('class="plotly-graph-div')[1:]


def open_page(page: Path) -> Opened:
    """Open a file and return what became of it."""
    done = _run(page, "--dump-dom")
    return Opened(done.stdout, re.findall(r"CONSOLE.*", done.stderr))


def photograph(page: Path, image: Path, width: int, height: int) -> None:
    """Write a PNG of the upper ``height`` pixels of a page."""
    _run(page, f"--screenshot={image}", f"--window-size={width},{height}")


def drawn(chart: str) -> int:
    """How many traces of a chart are there as SVG elements or images."""
    marks = ('class="point"', 'class="js-line"', 'class="js-fill"', "<image ")
    return sum(map(chart.count, marks))


def _run(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BROWSER, *_FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)


if __name__ == "__main__":
    photograph(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
