"""A proposal as one HTML file: what it would change, where, and for which traffic."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from shapeserve import __version__
from shapeserve.page import bullets, chart, page, table
from shapeserve.tuning.charts import figures
from shapeserve.tuning.loads import LoadPoint, Loads
from shapeserve.tuning.request import Scored
from shapeserve.tuning.study import Study
from shapeserve.tuning.words import NAMES, bounds, headline, sentences, sizes


def render(study: Study) -> str:
    """Return the report as HTML."""
    proposal = study.proposal
    said = (*sizes(proposal), *bounds(proposal), *sentences(proposal))
    body = (
        f"<h1>{escape(study.source)}</h1>"
        f'<p class="dim">{escape(headline(proposal, ordered=study.ordered))}</p>'
        f"<h2>Before and after</h2>{_policies(study)}{bullets(said)}"
        f"<h2>Charts</h2>{''.join(map(chart, figures(study)))}"
        f"<h2>What the numbers hold for</h2>{bullets(_conditions(study))}"
    )
    return page(f"shapeserve tune: {study.source}", body)


def _policies(study: Study) -> str:
    """The table of all policies; latencies are those of the highest load that all can bear."""
    numbers = [study.proposal.counted, "padding, first half", "second half"]
    if study.proposal.cost_source:
        numbers.append("device-s")
    load = None if study.loads is None else study.loads.common
    if load is not None:
        numbers += [f"p50 ms at {load:,.3g} rows/s", "p99 ms"]
    rows = [
        [NAMES[name], *_scores(scored), *(_latency(study.loads, name, load))]
        for name, scored in study.named.items()
    ]
    return table(("policy",), numbers, rows)


def _scores(scored: Scored) -> list[str]:
    cells = [str(scored.shapes), f"{scored.first_half:.1%}", f"{scored.second_half:.1%}"]
    return cells if scored.device_s is None else [*cells, f"{scored.device_s:,.1f}"]


def _latency(loads: Loads | None, name: str, load: float | None) -> list[str]:
    if loads is None or load is None:
        return []
    points: dict[float, LoadPoint] = {
        point.rows_per_s: point for point in loads.points.get(name, ())
    }
    if load not in points:
        return ["", ""]
    return [f"{1e3 * points[load].p50_s:,.1f}", f"{1e3 * points[load].p99_s:,.1f}"]


def _conditions(study: Study) -> Iterator[str]:
    """Yield what was asked for and how the charts were made."""
    asked, proposal = study.request, study.proposal
    ends = ", ".join(f"{axis} {end}" for axis, end in proposal.ends.items())
    cut = "" if proposal.packed else ", to which longer rows are cut"
    number = "chosen by the traffic" if asked.shapes is None else f"at most {asked.shapes}"
    yield (
        f"shapeserve {__version__}; {asked.device}, {asked.layout} rows; least {asked.objective}; "
        f"{proposal.counted}: {number}; "
        f"sizes are multiples of {asked.align} and end at {ends}{cut}."
    )
    yield (
        "The proposal is fitted to the first half of the rows and judged on the second, which the "
        "charts and the table's seconds and latencies are about."
    )
    if study.note:
        yield study.note
    if proposal.packed:
        yield (
            "The batches are those that the rows form on a very fine grid: how many tokens are in "
            "one depends on how many rows wait when the device is free."
        )
    yield (
        f"Costs: {proposal.cost_source}."
        if proposal.cost_source
        else "Costs are not known for these axes without --costs: neither seconds nor latencies."
    )
    if proposal.cost_source:
        yield _played(study)


def _played(study: Study) -> str:
    loads = study.loads
    if loads is None:
        return "No latencies: the traffic has no times."
    cut = f" There was no time for {loads.left_out} further loads." if loads.left_out else ""
    return (
        f"Latencies: the first {loads.rows:,} rows of the second half, recorded at "
        f"{loads.recorded_per_s:,.3g} rows/s, in their rhythm but faster or slower, through the "
        f"service's own batcher on a virtual clock: one replica, batches of at most "
        f"{study.request.max_batch_tokens:,} elements, no row in the fallback. Tokenising, the "
        "network and Python take no time there. A line ends where fewer than 98 % of the "
        "rows that come in a second are answered in one."
        f"{cut}"
    )
