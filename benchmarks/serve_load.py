"""Compare shapeserve with hand-written Ray Serve, and its engine with other engines, in one run.

    python benchmarks/serve_load.py --out laptop          # everything, about a quarter of an hour
    python benchmarks/serve_load.py --quick               # is it all there? a few minutes
    python benchmarks/serve_load.py --arms ray-batch,shapeserve --scenarios closed-32x1

Writes benchmarks/results/OUT.json, OUT.md and OUT.png. Exit code 1 if an arm failed or if two
arms disagree about the vectors of the check texts. benchmarks/README.md has the details.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import environment, report
from benchmarks.arms import INFINITY, OFFLINE_ARMS, SERVER_ARMS, free_port, launch
from benchmarks.http_client import Target
from benchmarks.loadgen import GIVE_UP_S, REQUEST_TIMEOUT_S, answer_error, job
from benchmarks.mix import check_texts
from benchmarks.processes import START_TIMEOUT_S, ArmError, ServerProcess, run_module
from benchmarks.scenarios import Scenario, kept_up

RESULTS_DIR = Path(__file__).resolve().parent / "results"
# Seconds of a scenario, offered requests/s, texts of an offline arm.
FULL = (20.0, (5.0, 10.0, 20.0, 40.0, 80.0, 160.0), 1024)
QUICK = (3.0, (10.0, 20.0), 128)
OFFLINE_TIMEOUT_S = 900.0
WARM_UP_S = 3.0

# Tables need room; a log file has no width of its own.
console = Console(width=None if sys.stdout.isatty() else 140)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every_arm = [arm for arm in (*SERVER_ARMS, *OFFLINE_ARMS) if arm != INFINITY]
    groups = (report.SERIAL, report.MANY_CLIENTS, report.MANY_ROWS, "open")
    parser.add_argument("--arms", type=_names((*SERVER_ARMS, *OFFLINE_ARMS)), default=every_arm)
    parser.add_argument("--scenarios", type=_names(groups), default=list(groups))
    parser.add_argument("--duration-s", type=float, help="of each scenario (20; quick: 3)")
    parser.add_argument("--rates", type=_rates, help="open loop, requests/s (5 to 160, doubling)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--baseline-proxy", choices=["fast", "default"], default="fast")
    parser.add_argument("--infinity-python", help="python of an environment with infinity_emb")
    parser.add_argument("--out", default="latest", help="name of the files in benchmarks/results")
    parser.add_argument(
        "--quick", action="store_true", help="3 s a scenario, two rates, 128 offline texts"
    )
    options = parser.parse_args(arguments)
    duration_s, rates, options.offline_rows = QUICK if options.quick else FULL
    options.duration_s = options.duration_s or duration_s
    options.rates = options.rates or rates
    if options.infinity_python and INFINITY not in options.arms:
        options.arms = [INFINITY, *options.arms]
    return options


def _names(allowed: Sequence[str]) -> Any:
    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := set(given) - set(allowed):
            raise argparse.ArgumentTypeError(
                f"{', '.join(sorted(unknown))}: not one of {', '.join(allowed)}"
            )
        return given

    return names


def _rates(text: str) -> list[float]:
    return sorted(float(rate) for rate in text.split(","))


def scenarios(options: argparse.Namespace) -> list[Scenario]:
    """Return the scenarios of every server arm, in the order in which they run."""
    closed = [
        Scenario(report.SERIAL, options.duration_s),
        Scenario(report.MANY_CLIENTS, options.duration_s, clients=32),
        Scenario(report.MANY_ROWS, options.duration_s, clients=4, rows=32),
    ]
    chosen = [scenario for scenario in closed if scenario.name in options.scenarios]
    if "open" in options.scenarios:
        chosen += [
            Scenario(f"open-{rate:g}", options.duration_s, rate_per_s=rate)
            for rate in options.rates
        ]
    return chosen


def measure_server(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start one server, load it, stop it; a failure is part of the outcome."""
    outcome: dict[str, Any] = {"status": "ok", "scenarios": {}}
    with tempfile.TemporaryDirectory(prefix="ssb-", ignore_cleanup_errors=True) as directory:
        work_dir, port = Path(directory), free_port()
        how = launch(arm, port, work_dir, options.baseline_proxy, options.infinity_python)
        target = Target("127.0.0.1", port, how.path, environment.MODEL_NAME)
        server = ServerProcess(how.command, how.env, work_dir / "server.log")
        try:
            with server:
                outcome["ready_s"] = server.wait_ready(port, how.ready_path)
                first_answers(server, target, outcome)
                run_scenarios(server, target, options, outcome["scenarios"])
        except ArmError as failure:
            outcome |= {"status": "failed", "error": str(failure), "log_tail": server.log_tail()}
    return outcome


def first_answers(server: ServerProcess, target: Target, outcome: dict[str, Any]) -> None:
    """Time the first request of the server's life, then ask for the check texts."""
    texts = check_texts()
    sent_s = time.perf_counter()
    embed(target, texts[:1])
    now_s = time.perf_counter()
    outcome["first_request_s"] = now_s - sent_s
    outcome["first_answer_s"] = now_s - server.started_s
    outcome["check_vectors"] = embed(target, texts)


def embed(target: Target, texts: list[str]) -> list[list[float]]:
    """Ask for the vectors of some texts, outside of any measured load."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=START_TIMEOUT_S)
    body = orjson.dumps({"model": target.model, "input": texts})
    try:
        connection.request("POST", target.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    except (OSError, http.client.HTTPException) as failure:
        raise ArmError(f"no answer to a request of {len(texts)} texts: {failure!r}") from failure
    finally:
        connection.close()
    if error := answer_error(response.status, answer, len(texts)):
        raise ArmError(f"a request of {len(texts)} texts: {error}: {answer[:500]!r}")
    return [item["embedding"] for item in orjson.loads(answer)["data"]]


def run_scenarios(
    server: ServerProcess,
    target: Target,
    options: argparse.Namespace,
    summaries: dict[str, dict[str, Any]],
) -> None:
    """Warm up with both shapes of load, then run the scenarios; fill ``summaries``."""
    warm_up_s = min(WARM_UP_S, options.duration_s)
    for clients, rows in ((32, 1), (4, 32)):
        load(server, target, Scenario("warm-up", warm_up_s, rows, clients), options.seed + 1)
    saturated = False
    for scenario in scenarios(options):
        if saturated:  # ascending rates: it would only be overloaded longer
            summaries[scenario.name] = {**asdict(scenario), "skipped": True}
            continue
        summary = load(server, target, scenario, options.seed)
        if scenario.rate_per_s is not None:
            summary["kept_up"] = kept_up(scenario, summary)
            saturated = not summary["kept_up"]
        summaries[scenario.name] = {**asdict(scenario), **summary}
        console.print(f"  {scenario.name}: {one_line(summary)}", highlight=False)


def load(server: ServerProcess, target: Target, scenario: Scenario, seed: int) -> dict[str, Any]:
    """Run the load generator, as a process of its own, against a server that must survive it."""
    timeout_s = scenario.duration_s + REQUEST_TIMEOUT_S + GIVE_UP_S + 30
    output = run_module(
        "benchmarks.loadgen", stdin=job(target, scenario, seed), timeout_s=timeout_s
    )
    server.check_alive()
    summary: dict[str, Any] = json.loads(output)
    return summary


def one_line(summary: dict[str, Any]) -> str:
    """Return the progress line of a finished scenario."""
    return (
        f"{summary['requests_per_s']:.1f} req/s, {summary['rows_per_s']:.1f} rows/s, "
        f"p50 {summary.get('p50_ms', float('nan')):.1f} ms, "
        f"p99 {summary.get('p99_ms', float('nan')):.1f} ms, errors {summary['errors'] or 0}, "
        f"generator {summary['generator_cpu_share']:.1%} of a core"
    )


def measure_offline(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one offline arm; a failure is part of the outcome."""
    arguments = {
        "--rows": options.offline_rows,
        "--duration-s": options.duration_s,
        "--seed": options.seed,
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    try:
        output = run_module("benchmarks.offline", arm, *words, timeout_s=OFFLINE_TIMEOUT_S)
    except ArmError as failure:
        return {"status": "failed", "error": str(failure)}
    outcome = {"status": "ok", **json.loads(output.splitlines()[-1])}
    console.print(f"  {outcome['rows_per_s']:.1f} rows/s", highlight=False)
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every arm, one after another; write and show the result."""
    options = parse(arguments)
    settings = vars(options) | {"scenarios": [asdict(scenario) for scenario in scenarios(options)]}
    result: report.Result = {
        "environment": environment.describe(options.infinity_python),
        "settings": settings,
        "arms": {},
    }
    RESULTS_DIR.mkdir(exist_ok=True)
    for arm in options.arms:
        console.print(f"[bold]{arm}[/bold]")
        measure = measure_offline if arm in OFFLINE_ARMS else measure_server
        outcome = result["arms"][arm] = measure(arm, options)
        if outcome["status"] == "failed":
            console.print(outcome["error"], outcome.get("log_tail", ""), sep="\n", markup=False)
        result["agreement"] = report.agreement(result)
        write_json(result, RESULTS_DIR / f"{options.out}.json")  # after each arm: nothing is lost
    finish(result, RESULTS_DIR / options.out)
    failed = any(outcome["status"] == "failed" for outcome in result["arms"].values())
    apart = max(result["agreement"].values(), default=0.0) > report.MAX_COSINE_DISTANCE
    return int(failed or apart)


def write_json(result: report.Result, path: Path) -> None:
    """Write the result without the check vectors, which only served the comparison."""
    arms = {
        arm: {key: kept for key, kept in outcome.items() if key != "check_vectors"}
        for arm, outcome in result["arms"].items()
    }
    path.write_text(json.dumps(result | {"arms": arms}, indent=1) + "\n")


def finish(result: report.Result, base: Path) -> None:
    """Show the tables; write them as Markdown and the plot, if matplotlib is there."""
    report.show(result, console)
    report.write_markdown(result, base.with_name(f"{base.name}.md"))
    try:
        from benchmarks.plot import write_plot
    except ModuleNotFoundError as missing:
        console.print(f"no plot: {missing.name} is not installed; pip install 'shapeserve[bench]'")
    else:
        write_plot(result, base.with_name(f"{base.name}.png"))
    console.print(f"written: {base}.json, .md and .png", highlight=False)


if __name__ == "__main__":
    # As an exception, SIGTERM leaves no server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
