"""Does the simulator predict what the live service does? Waste, utilisation and median latency.

    python benchmarks/simulator_validation.py --out NAME                # 5 runs of a minute
    python benchmarks/simulator_validation.py --runs 1 --seconds 10     # is it all there?
    python benchmarks/simulator_validation.py --costs costs.json        # costs measured before

The model gets all cores but one. That one is for what the simulator knows nothing of: HTTP, Python,
and this load generator, which would otherwise take the model's cores in the middle of a batch.

1. Costs: `shapeserve profile` of MiniLM, with as many threads as the service has, before the
   service starts (or --costs).
2. Prediction: the simulator plays the first rows of the trace at the speed at which it expects the
   device to be busy for --busy of the time. Of the running service a constant goes into it: what a
   request spends outside the device (HTTP, checks, Python), which the simulator leaves out, so that
   its latencies are compared after adding it. That is the latency of requests of one length, sent
   one by one to the idle service before the first run, less their device time.
3. Runs: the same rows, as token ids of exactly these lengths, are sent at their recorded times over
   HTTP, whatever became of earlier ones. Counters of /metrics before and after give padding of each
   axis and device seconds; utilisation is those over the time from the first request to the last
   answer. Latency is the client's, from the time at which a request was due.

Writes benchmarks/results/OUT.json, OUT.md and OUT.png. Exit code 1 if the median of the runs is
further from the prediction than: waste of an axis 0.01; p50 and utilisation 15 % or twice the
spread of the runs (standard deviation / median), whichever is more; or if a request failed.
Run it on a quiet machine: the load average before the run is part of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import environment
from benchmarks.arms import SHAPESERVE_CONFIG, free_port, shapeserve
from benchmarks.comparison import Comparison, compared, table
from benchmarks.http_client import Target
from benchmarks.live import Counters, Live
from benchmarks.processes import ArmError, ServerProcess
from benchmarks.scenarios import Sample, percentile
from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.traces import Traffic, read_traffic
from shapeserve.tuning import CostTable, Outcome, Served, simulate

HERE = Path(__file__).resolve().parent
RESULTS_DIR = HERE / "results"
TRACE = HERE / "data" / "traces" / "enc_rag_mix.csv.gz"
WARM_UP_S = 3.0
POINTS = 24  # batches whose cost is measured
CLOSE_ENOUGH = 0.25  # of the busy time that is asked for
PERCENTILES = (*range(1, 100),)

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Plan:
    """What is played, and what is expected of it."""

    traffic: Traffic
    speed: float
    outcome: Outcome

    @property
    def schedule_s(self) -> list[float]:
        """When each row is due, from the first one on."""
        assert self.traffic.times_s is not None
        times_s: list[float] = (
            (self.traffic.times_s - self.traffic.times_s[0]) / self.speed
        ).tolist()
        return times_s


def plan(served: Served, traffic: Traffic, seconds: float, busy: float) -> Plan:
    """Return the first rows that come in ``seconds``, and the speed that makes a device ``busy``.

    More speed plays more of the trace and fills batches: some steps settle it.
    """
    if traffic.times_s is None:
        raise SystemExit("a histogram has no times; give a trace (t_s,len)")
    speed = 1.0
    for _ in range(8):
        played = _first(traffic, seconds * speed)
        device_s = simulate(served, played, speed=speed).device_s
        speed *= (busy * seconds / device_s) ** 0.8  # damped: the trace's rate is not even
    played = _first(traffic, seconds * speed)
    outcome = simulate(served, played, speed=speed)
    made = Plan(played, speed, outcome)
    if abs(made.outcome.device_s / (busy * seconds) - 1) > CLOSE_ENOUGH:
        raise SystemExit(
            f"no speed of the trace keeps the device {busy:.0%} busy for {seconds:g} s: at "
            f"{speed:.3g} its {made.outcome.rows} rows take {made.outcome.device_s:.2f} s; give "
            "more --seconds, or measure costs on a quiet machine"
        )
    return made


def _first(traffic: Traffic, until_s: float) -> Traffic:
    assert traffic.times_s is not None
    rows = max(int(np.searchsorted(traffic.times_s, until_s)), 2)
    return replace(
        traffic,
        sizes=traffic.sizes[:rows],
        counts=traffic.counts[:rows],
        times_s=traffic.times_s[:rows],
    )


# --- the live service


def measure(live: Live, made: Plan, runs: int) -> tuple[float, list[dict[str, Any]]]:
    """Measure the constant, warm up, and play the rows so many times."""
    lengths, schedule_s = made.traffic.sizes[:, 0].tolist(), made.schedule_s
    warm = [i for i, due_s in enumerate(schedule_s) if due_s < WARM_UP_S]
    live.play([lengths[i] for i in warm], [schedule_s[i] for i in warm])
    host_s = live.host_s(int(np.median(lengths)))
    found = []
    for number in range(runs):
        found.append(run_summary(*live.play(lengths, schedule_s)))
        console.print(f"run {number + 1}: {one_line(found[-1])}")
    return host_s, found


def run_summary(samples: Sequence[Sample], elapsed_s: float, counted: Counters) -> dict[str, Any]:
    """Return what one run says about each quantity."""
    latencies_s = sorted(s.latency_s for s in samples if s.error is None)
    return {
        "errors": sum(s.error is not None for s in samples),
        "elapsed_s": elapsed_s,
        "device_s": counted.device_s,
        "utilisation": counted.device_s / elapsed_s,
        "waste": counted.waste,
        "real": counted.elements["real"],
        "recompiles": counted.recompiles,
        "latency_ms": [1e3 * percentile(latencies_s, p) for p in PERCENTILES],
    }


def one_line(run: Mapping[str, Any]) -> str:
    """Return the progress line of a run."""
    waste = ", ".join(f"{kind} {share:.2%}" for kind, share in run["waste"].items())
    return (
        f"p50 {run['latency_ms'][49]:.1f} ms, p99 {run['latency_ms'][98]:.1f} ms, device busy "
        f"{run['utilisation']:.1%}, {waste}, errors {run['errors']}"
    )


# --- the result


def predicted(made: Plan, host_s: float) -> dict[str, Any]:
    """Return what the simulator says, in the form of a run."""
    outcome = made.outcome
    return {
        "elapsed_s": outcome.span_s,
        "device_s": outcome.device_s,
        "utilisation": outcome.utilisation,
        "waste": outcome.waste,
        "real": outcome.elements["real"],
        "latency_ms": [1e3 * (outcome.latency_s(p) + host_s) for p in PERCENTILES],
    }


def faults(expected: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what makes the runs no measurement of what was simulated."""
    found = []
    for number, run in enumerate(runs, 1):
        if run["errors"]:
            found.append(f"run {number}: {run['errors']} requests failed")
        if run["recompiles"]:
            found.append(f"run {number}: {run['recompiles']:.0f} recompiles")
        if not run["errors"] and run["real"] != expected["real"]:
            found.append(
                f"run {number}: {run['real']:.0f} tokens ran, {expected['real']} were sent"
            )
    return found


def comparisons(expected: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Return every quantity that is judged."""
    kinds = sorted({*expected["waste"], *(kind for run in runs for kind in run["waste"])})
    waste = [
        compared(
            f"waste: {kind}",
            expected["waste"].get(kind, 0.0),
            [run["waste"].get(kind, 0.0) for run in runs],
            absolute=0.01,
        )
        for kind in kinds
    ]
    utilisation = [run["utilisation"] for run in runs]
    p50_ms = [run["latency_ms"][49] for run in runs]
    return [
        *waste,
        compared("utilisation", expected["utilisation"], utilisation),
        compared("p50, ms", expected["latency_ms"][49], p50_ms),
    ]


def headline(result: Mapping[str, Any]) -> str:
    """Return machine, versions, commit and what was played."""
    about, played = result["environment"], result["played"]
    return (
        f"{about['cpu']}, {about['cores']} cores, load {about['load_average_before']:.2f} before; "
        f"torch {about['versions']['torch']}, ray {about['versions']['ray']}, "
        f"commit {about['commit']}\n"
        f"{played['trace']}: {played['rows']} rows in {played['seconds']:.1f} s "
        f"({played['speed']:.1f} times as fast as recorded), seed {played['seed']}; "
        f"{environment.MODEL_NAME}, {played['threads']} threads, default policy; outside the "
        f"device {played['host_ms']:.2f} ms a request\n"
        f"costs: {result['costs']['source']}"
    )


def write(result: Mapping[str, Any], judged: Sequence[Comparison], base: Path) -> None:
    """Write JSON, Markdown and the plot, if matplotlib is there."""
    base.parent.mkdir(exist_ok=True)
    base.with_name(f"{base.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    parts = [headline(result).replace("\n", "  \n"), table(judged).markdown(), *result["faults"]]
    base.with_name(f"{base.name}.md").write_text("\n\n".join(parts) + "\n")
    try:
        write_plot(result, base.with_name(f"{base.name}.png"))
    except ModuleNotFoundError as missing:
        console.print(f"no plot: {missing.name} is not installed; pip install 'shapeserve[bench]'")
    console.print(f"written: {base}.json, .md and .png")


def write_plot(result: Mapping[str, Any], path: Path) -> None:
    """Write the distribution of latencies, and each quantity over its prediction, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    for number, run in enumerate(result["runs"], 1):
        left.plot(run["latency_ms"], PERCENTILES, color="0.6", label="measured" * (number == 1))
    left.plot(result["predicted"]["latency_ms"], PERCENTILES, color="C3", label="predicted")
    left.set(xscale="log", xlabel="ms", ylabel="% of rows answered", title="latency")
    left.legend()
    judged = result["comparisons"]
    for place, one in enumerate(judged):
        right.plot(one["measured"], [place] * len(one["measured"]), "o", color="0.6")
        right.plot([one["predicted"]], [place], "D", color="C3")
    right.set_yticks(range(len(judged)), [one["name"] for one in judged])
    right.set(xscale="symlog", title="predicted (diamond) and measured")
    figure.suptitle(headline(result), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals in a run (60)")
    parser.add_argument("--busy", type=float, default=0.4, help="share of time, at most 0.5 (0.4)")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--costs", type=Path, help="cost table in JSON instead of measuring here")
    parser.add_argument("--seed", type=int, default=0, help="of the token ids")
    parser.add_argument("--out", default="latest-simulator", help="name of the files")
    options = parser.parse_args(arguments)
    if not 0 < options.busy <= 0.5 or options.runs < 1 or options.seconds <= 0:
        parser.error("--busy is above 0 and at most 0.5, --runs at least 1, --seconds above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, measure, compare; return 1 if they differ by more than is allowed."""
    options = parse(arguments)
    about = environment.describe(None)
    config = ServeConfig.from_dict(served_config()).models[0]
    cost = CostTable.read(options.costs) if options.costs else measure_costs(config)
    console.print(f"costs: {cost.source}")
    made, host_s, runs = run_live(config, cost, options)
    expected = predicted(made, host_s)
    judged = comparisons(expected, runs)
    result = {
        "benchmark": "simulator_validation",
        "environment": about,
        "played": {
            "trace": options.trace.name,
            "rows": made.outcome.rows,
            "seconds": options.seconds,
            "speed": made.speed,
            "seed": options.seed,
            "host_ms": 1e3 * host_s,
            "threads": config.threads,
        },
        "costs": {"source": cost.source, "table": cost.to_dict()},
        "predicted": expected,
        "runs": runs,
        "comparisons": [one.to_dict() for one in judged],
        "faults": faults(expected, runs),
    }
    console.print(headline(result))
    console.print(table(judged).rich())
    for fault in result["faults"]:
        console.print(fault)
    write(result, judged, RESULTS_DIR / options.out)
    return int(bool(result["faults"]) or not all(one.ok for one in judged))


def served_config() -> dict[str, Any]:
    """Return the configuration of the service."""
    (model,) = SHAPESERVE_CONFIG["models"]
    return {"models": [{**model, "threads": max(1, environment.cores() - 1)}]}


def measure_costs(config: ModelConfig) -> CostTable:
    """Profile the model as the service runs it on this machine."""
    console.print("measuring costs: a start from an empty compile cache, and some batches")
    # Read when torch is loaded; its profiler says on stderr when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from shapeserve.profile.session import Options, profile

    return profile(config, Options(POINTS), lambda *_: None)


def plan_for(config: ModelConfig, cost: CostTable, options: argparse.Namespace) -> Plan:
    """Choose rows and speed for the service's own configuration."""
    served = Served.from_config(config, "cpu", cost)
    traffic = read_traffic(options.trace).clipped({"seq": served.spec.hard_limit["seq"]})
    return plan(served, traffic, options.seconds, options.busy)


def run_live(
    config: ModelConfig, cost: CostTable, options: argparse.Namespace
) -> tuple[Plan, float, list[dict[str, Any]]]:
    """Start the service, predict, measure, stop it."""
    with tempfile.TemporaryDirectory(prefix="ssb-", ignore_cleanup_errors=True) as directory:
        work_dir, port = Path(directory), free_port()
        how = shapeserve(served_config(), port, work_dir)
        target = Target("127.0.0.1", port, how.path, environment.MODEL_NAME)
        server = ServerProcess(how.command, how.env, work_dir / "server.log")
        with server:
            try:
                console.print(f"ready after {server.wait_ready(port, how.ready_path):.1f} s")
                live = Live(server, target, options.seed)
                made = plan_for(config, cost, options)
                console.print(
                    f"{made.outcome.rows} rows, {made.speed:.1f} times as fast as recorded: the "
                    f"device should be busy {made.outcome.utilisation:.1%}"
                )
                return made, *measure(live, made, options.runs)
            except ArmError as failure:
                raise SystemExit(f"{failure}\n{server.log_tail()}") from failure


if __name__ == "__main__":
    # As an exception, SIGTERM leaves no server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
