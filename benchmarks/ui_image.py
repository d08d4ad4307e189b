"""Make docs/images/ui.png: a Chromium's view of ``/ui`` after real traffic.

    python -m benchmarks.ui_image [--out docs/images/ui.png] [--dark]

Starts ``shapeserve serve`` with all-MiniLM-L6-v2 and the defaults on a free port, sends it the
texts of the benchmarks for half a minute and one beyond the largest bucket, and opens the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arms import SHAPESERVE, free_port, launch
from benchmarks.environment import MODEL_NAME
from benchmarks.http_client import Target
from benchmarks.loadgen import job
from benchmarks.mix import load_texts
from benchmarks.processes import REPOSITORY, ArmError, ServerProcess, run_module
from benchmarks.scenarios import Scenario

DURATION_S = 30.0
# Words, of about 1.3 tokens each: more than the 256 of the largest bucket, less than the 512 that
# the model takes.
BEYOND = 280
WINDOW = "1160,1250"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the image; 1 if there is no browser, or the service did not answer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default=str(REPOSITORY / "docs" / "images" / "ui.png"))
    parser.add_argument("--dark", action="store_true", help="as a browser shows it at night")
    options = parser.parse_args(arguments)
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        print("ui_image: neither chromium nor google-chrome is installed", file=sys.stderr)
        return 1
    out = Path(options.out).resolve()
    with tempfile.TemporaryDirectory(prefix="ui-image-") as directory:
        try:
            _serve_and_look(browser, Path(directory), out, dark=options.dark)
        except ArmError as error:
            print(f"ui_image: {error}", file=sys.stderr)
            return 1
    print(f"{out} ({out.stat().st_size:,} bytes)")
    return 0


def _serve_and_look(browser: str, directory: Path, out: Path, *, dark: bool) -> None:
    port = free_port()
    arm = launch(SHAPESERVE, port, directory, "fast", None)
    with ServerProcess(arm.command, arm.env, directory / "server.log") as server:
        server.wait_ready(port, arm.ready_path)
        target = Target("127.0.0.1", port, arm.path, MODEL_NAME)
        load = job(target, Scenario("closed-8x4", clients=8, rows=4, duration_s=DURATION_S), 0)
        run_module("benchmarks.loadgen", stdin=load, timeout_s=10 * DURATION_S)
        words = " ".join(load_texts("passages.jsonl")).split()
        _ask(target, " ".join(words[:BEYOND]))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={directory}/profile", f"--window-size={WINDOW}"]
        flags += [f"--screenshot={out}", *(["--force-dark-mode"] if dark else [])]
        out.parent.mkdir(parents=True, exist_ok=True)
        url = f"http://127.0.0.1:{port}/ui"
        subprocess.run([browser, *flags, url], check=True, capture_output=True, timeout=60)


def _ask(target: Target, text: str) -> None:
    """Send one text that is longer than the largest bucket."""
    body = json.dumps({"model": target.model, "input": text, "over_max": "fallback"}).encode()
    url = f"http://{target.host}:{target.port}{target.path}"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=60).close()


if __name__ == "__main__":
    sys.exit(main())
