"""What tuned bucket sizes save: padding, device seconds and tail latency on recorded traffic.

For every trace in data/traces: pad to the longest, powers of two, multiples of 64, and the sizes
that the tuner proposes for 4, 8 and 16 row shapes. Sizes are fitted to the first half of a trace;
all numbers are of the second. Device seconds and latency come from the simulator (the real batcher
on a virtual clock, analytic costs), at the speed at which powers of two keep the device half busy.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

if __package__ in (None, ""):  # run as a file: make the package importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import environment
from benchmarks.report import NO_VALUE, Table, number
from shapeserve.errors import ConfigError
from shapeserve.traces import Traffic, read_traffic
from shapeserve.tuning import (
    ANALYTIC,
    Buckets,
    Cost,
    Formula,
    Request,
    Served,
    propose,
    row_shapes,
    simulate,
    waste,
)

HERE = Path(__file__).parent
TRACES_DIR = HERE / "data" / "traces"
RESULTS_DIR = HERE / "results"
SHAPES = (4, 8, 16)
USUAL = {"pad_to_max": "pad to longest", "pow2": "powers of two", "multiple_64": "multiples of 64"}
OURS = {shapes: f"tuned, K = {shapes}" for shapes in SHAPES}
POLICIES = (*USUAL.values(), *OURS.values())

# Longest row that a model for such traffic takes; longer ones are cut.
END = 8192
ENDS = {"enc_queries": 512, "enc_rag_mix": 512, "irc_ubuntu_a": 512, "librispeech_devclean": 3500}
IMAGE_ENDS = {"coco_val2017": 640, "taco_phone_photos": 6000}
BATCH_ELEMENTS = 8192
BATCH_IMAGES = 8  # of the largest size
BUSY = 0.5
SATURATED = 0.98
# ResNet-50 does 4.1 GFLOP on 224 x 224 pixels; as many a second as ANALYTIC["cpu"] does on MiniLM
# (21.3 MFLOP a token, 0.1 ms).
PIXEL_COST = Formula(
    3e-3, 4.1e9 / 224**2 / (21.3e6 / 1e-4), 0.0, "analytic: ResNet-50 on two CPU cores"
)

console = Console(highlight=False)


def measure(name: str, traffic: Traffic) -> dict[str, Any]:
    """Compare all policies on one trace."""
    image = len(traffic.axes) == 2
    ends = dict.fromkeys(traffic.axes, IMAGE_ENDS[name] if image else ENDS.get(name, END))
    traffic = traffic.clipped(ends)
    _, second = traffic.halves()
    buckets = policies(traffic, max(ends.values()))
    cost: Cost = PIXEL_COST if image else ANALYTIC["cpu"]
    area = math.prod(ends.values())
    batch_elements = BATCH_IMAGES * area if image else max(BATCH_ELEMENTS, area)
    speed = half_busy(second, buckets[USUAL["pow2"]], cost, batch_elements)
    found = {}
    for policy, made in buckets.items():
        found[policy] = {
            "row_shapes": row_shapes(made),
            "waste": waste(second, made),
            **simulated(second, made, cost, batch_elements, speed),
        }
        if policy in OURS.values():
            found[policy]["buckets"] = {key: list(entries) for key, entries in made.items()}
    about = {"rows": second.rows, "max_length": max(ends.values()), "speed": speed}
    return {**about, "cost": cost.source, "policies": found}


def policies(traffic: Traffic, end: int) -> dict[str, Buckets]:
    """Return name -> sizes of every policy."""
    proposals = {k: propose(traffic, Request(shapes=k, max_length=end)) for k in SHAPES}
    usual = proposals[SHAPES[0]].compared
    return {
        **{title: usual[name].buckets for name, title in USUAL.items()},
        **{OURS[shapes]: made.proposed.buckets for shapes, made in proposals.items()},
    }


def half_busy(traffic: Traffic, buckets: Buckets, cost: Cost, batch_elements: int) -> float:
    """Return the speed at which these sizes keep one device busy for half of the time.

    More speed fills batches, which then cost less a row: a few steps settle it.
    """
    speed = 1.0
    for _ in range(4):
        speed *= BUSY / simulated(traffic, buckets, cost, batch_elements, speed)["offered_load"]
    return speed


def simulated(
    traffic: Traffic, buckets: Buckets, cost: Cost, batch_elements: int, speed: float
) -> dict[str, Any]:
    """Return what the simulator says, or why it cannot."""
    try:
        served = Served.for_buckets(buckets, "cpu", cost, max_batch_tokens=batch_elements)
    except ConfigError as error:
        return {"not_simulated": str(error)}
    outcome = simulate(served, traffic, speed=speed)
    times_s = [0.0] if traffic.times_s is None else traffic.times_s.tolist()
    return {
        # Of the time in which rows came: above 1 they come faster than they are served.
        "offered_load": outcome.device_s / ((times_s[-1] - times_s[0]) / speed),
        "device_s": outcome.device_s,
        "utilisation": outcome.utilisation,
        "p50_s": outcome.latency_s(50),
        "p99_s": outcome.latency_s(99),
        "simulated_waste": outcome.waste,
    }


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return padding, device seconds and p99 of every trace."""
    makers = {
        "Padding / all elements along the axes of a row, second half": lambda found: (
            f"{found['waste']:.1%}"
        ),
        "Row shapes": lambda found: str(found["row_shapes"]),
        "Simulated device seconds": lambda found: number(found.get("device_s")),
        "Simulated p99, ms (one device; * more than it can do)": p99_cell,
    }
    traces: Mapping[str, Any] = result["traces"]
    return [
        Table(
            title,
            ["trace", *POLICIES],
            [[name, *(cell(o["policies"][p]) for p in POLICIES)] for name, o in traces.items()],
        )
        for title, cell in makers.items()
    ]


def p99_cell(found: Mapping[str, Any]) -> str:
    """Format a tail latency; a saturated device has none that means anything."""
    if "p99_s" not in found:
        return NO_VALUE
    mark = "*" if found["offered_load"] > SATURATED else ""
    return f"{1e3 * found['p99_s']:,.0f}{mark}"


def headline(result: Mapping[str, Any]) -> str:
    """Return machine, commit and what was done."""
    about = result["environment"]
    return (
        f"commit {about['commit']}, Python {about['python']}; fitted to the first half of each "
        "trace, judged on the second\n"
        f"batches of 1 to 32 rows and {BATCH_ELEMENTS:,} elements ({BATCH_IMAGES} images), played "
        "at the speed at which powers of two keep the device half busy"
    )


def write_plot(result: Mapping[str, Any], path: Path) -> None:
    """Write bars of padding for every trace as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display
    from matplotlib import pyplot as plt

    traces: Mapping[str, Any] = result["traces"]
    figure, axes = plt.subplots(1, 2, figsize=(14, 6), constrained_layout=True)
    width = 0.8 / len(POLICIES)
    for place, policy in enumerate(POLICIES):
        at = [i + place * width for i in range(len(traces))]
        found = [trace["policies"][policy] for trace in traces.values()]
        axes[0].bar(at, [100 * f["waste"] for f in found], width, label=policy)
        base = [trace["policies"][USUAL["pow2"]]["device_s"] for trace in traces.values()]
        ratios = [f.get("device_s", 0.0) / b for f, b in zip(found, base, strict=True)]
        axes[1].bar(at, ratios, width, label=policy)
    for axis in axes:
        axis.set_xticks(
            [i + 0.4 for i in range(len(traces))], list(traces), rotation=40, ha="right"
        )
    axes[0].set(ylabel="padding, % of all elements", title="second half of each trace")
    axes[1].set(ylabel="device seconds, powers of two = 1", title="simulated", yscale="log")
    axes[0].legend(fontsize=8)
    figure.suptitle(headline(result), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(result: Mapping[str, Any], base: Path) -> None:
    """Write JSON, Markdown and the plot, if matplotlib is there."""
    base.with_name(f"{base.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    parts = [headline(result).replace("\n", "  \n"), *(t.markdown() for t in tables(result))]
    base.with_name(f"{base.name}.md").write_text("\n\n".join(parts) + "\n")
    try:
        write_plot(result, base.with_name(f"{base.name}.png"))
    except ModuleNotFoundError as missing:
        console.print(f"no plot: {missing.name} is not installed; pip install 'shapeserve[bench]'")
    console.print(f"written: {base}.json, .md and .png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the policies on every trace; show and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="latest-tuner-gain", help="name of the files")
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    parser.add_argument("--traces-dir", type=Path, default=TRACES_DIR)
    parser.add_argument("--rows", type=int, help="rows of each trace (all)")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {
        "benchmark": "tuner_gain",
        "environment": environment.describe(None),
        "traces": {},
    }
    for path in sorted(options.traces_dir.glob("*.csv.gz")):
        name = path.name.removesuffix(".csv.gz")
        console.print(name)
        traffic = read_traffic(path)
        result["traces"][name] = measure(name, _first(traffic, options.rows))
    console.print(headline(result))
    for table in tables(result):
        console.print(f"\n{table.title}")
        console.print(table.rich())
    write(result, options.results_dir / options.out)
    return 0


def _first(traffic: Traffic, rows: int | None) -> Traffic:
    if traffic.times_s is None:
        raise ConfigError("a histogram has no times; this benchmark needs traces")
    return replace(
        traffic,
        sizes=traffic.sizes[:rows],
        counts=traffic.counts[:rows],
        times_s=traffic.times_s[:rows],
    )


if __name__ == "__main__":
    sys.exit(main())
