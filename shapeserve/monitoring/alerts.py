"""Alerts: each one means that somebody should do something, and its runbook says what."""

from __future__ import annotations

from collections.abc import Iterator

from shapeserve.metrics.catalogue import EagerFrameReason, SwapResult, VariantState
from shapeserve.metrics.queries import View, predicted_waste
from shapeserve.monitoring.rules import (
    LONG_WINDOW,
    ROW_WASTE,
    Rule,
    failed_name,
    slow_name,
)
from shapeserve.monitoring.targets import FAST_BURN, Targets

# An event that must not happen is shown this long, long enough to be seen by a person.
_EVENT_WINDOW = "15m"
# Google's SRE workbook, chapter 5: 2 % of a month's budget in an hour, 5 % in six hours. The short
# window ends the alert soon after the cause.
_BURNS = (("fast", "1h", "5m", FAST_BURN, "critical"), ("slow", "6h", "30m", 6.0, "warning"))

# What runs call by call; frames that cannot be compiled are known at start, and degrade a variant.
_EAGER_CALLS = f"{EagerFrameReason.RECOMPILE_LIMIT}|{EagerFrameReason.NOT_COMPILED}"

_REFUSED = f"{SwapResult.REJECTED}|{SwapResult.FAILED}"

_MODEL = "Model {{ $labels.model }}"
_SHARE = "{{ $value | humanizePercentage }}"


def alerts(view: View, targets: Targets, runbooks: str) -> list[Rule]:
    """Return every alert for one form; ``runbooks`` is where docs/runbooks.md can be read."""
    found = [
        *_compiler(view.over(_EVENT_WINDOW)),
        *_padding(view, targets),
        *_traffic(view, targets),
        *_burns(targets),
        *_replicas(view, targets),
    ]
    return [_with_runbook(rule, runbooks) for rule in found]


def _with_runbook(rule: Rule, runbooks: str) -> Rule:
    notes = {**rule.annotations, "runbook_url": f"{runbooks}#{rule.name.lower()}"}
    return Rule(rule.name, rule.expr, True, rule.for_, rule.labels, notes)


def _alert(
    name: str, severity: str, for_: str, expr: str, summary: str, description: str, **labels: str
) -> Rule:
    notes = {"summary": summary, "description": description}
    return Rule(f"Shapeserve{name}", expr, True, for_, {"severity": severity, **labels}, notes)


def _compiler(view: View) -> Iterator[Rule]:
    yield _alert(
        "Recompiled",
        "critical",
        "",
        view.events("recompiles_total", by="model, reason") + " > 0",
        f"{_MODEL} compiled on the request path",
        f"{{{{ $value | humanize }}}} compiles in {view.window}, because of "
        "{{ $labels.reason }}; each one held up every request of its replica for seconds.",
    )
    yield _alert(
        "SilentEager",
        "warning",
        "",
        view.events("eager_frames_total", f'reason=~"{_EAGER_CALLS}"', by="model, reason") + " > 0",
        f"{_MODEL} runs eager where it should be compiled",
        f"{{{{ $value | humanize }}}} calls in {view.window}, because of {{{{ $labels.reason }}}}. "
        "They are answered correctly and slowly.",
    )
    degraded = view.series("variants", f'state="{VariantState.DEGRADED}"')
    yield _alert(
        "VariantsDegraded",
        "warning",
        "10m",
        f"sum by (model, tier) ({degraded}) > 0",
        f"{_MODEL} serves buckets at a lower tier",
        "{{ $value }} variants are served at tier {{ $labels.tier }}, which is not what was asked "
        "for. The log of the start names each one and why.",
    )
    yield _alert(
        "NonfiniteOutputs",
        "warning",
        "",
        view.events("nonfinite_rows_total") + " > 0",
        f"{_MODEL} answered with NaN or infinity",
        f"{{{{ $value | humanize }}}} rows in {view.window}; their requests got a 500.",
    )
    yield _alert(
        "PolicySwapFailed",
        "warning",
        "",
        view.events("policy_swaps_total", f'result=~"{_REFUSED}"', by="model, result") + " > 0",
        f"{_MODEL} did not take a new policy",
        "It was {{ $labels.result }}; the old policy still serves. The log says why.",
    )


def _padding(view: View, targets: Targets) -> Iterator[Rule]:
    wasted = f"model:shapeserve_padding_waste:ratio_rate{view.window}"
    yield _alert(
        "PaddingWaste",
        "warning",
        "30m",
        f"{wasted} > {targets.padding_waste:g}",
        f"{_MODEL} computes mostly padding",
        f"{_SHARE} of what it executes is padding, more than {targets.padding_waste:.0%}.",
    )
    yield _alert(
        "LengthDrift",
        "warning",
        "30m",
        f"{ROW_WASTE}\n  > on (model, axis) (({predicted_waste(view)}) + {targets.drift_margin:g})",
        f"{_MODEL}: the traffic is no longer what its policy was tuned for",
        f"Padding along {{{{ $labels.axis }}}} is {_SHARE} over {LONG_WINDOW}, more than "
        f"{targets.drift_margin:g} above what the policy predicted.",
    )
    yield _alert(
        "FallbackShare",
        "warning",
        "15m",
        f"model:shapeserve_fallback:ratio_rate{view.window} > {targets.fallback_share:g}",
        f"{_MODEL} sends many rows to the fallback",
        f"{_SHARE} of the rows fit no bucket, more than {targets.fallback_share:.0%}.",
    )


def _traffic(view: View, targets: Targets) -> Iterator[Rule]:
    yield _alert(
        "QueueSaturated",
        "warning",
        "10m",
        f"model:shapeserve_queue_seconds:p95_rate{view.window} > {targets.queue_wait_s:g}",
        f"{_MODEL}: rows wait long for the device",
        "The p95 of the wait is {{ $value | humanizeDuration }}, more than "
        f"{targets.queue_wait_s:g} s.",
    )
    yield _alert(
        "RequestsRefused",
        "critical",
        "5m",
        f"model:shapeserve_refused:ratio_rate{view.window} > {targets.refused_share:g}",
        f"{_MODEL} refuses requests, because its queue is full",
        f"{_SHARE} of the requests get a 429, more than {targets.refused_share:.0%}.",
    )


def _burns(targets: Targets) -> Iterator[Rule]:
    budgets = (
        ("ErrorBudgetBurn", failed_name, 1 - targets.availability, "fail"),
        ("LatencyBudgetBurn", slow_name, 1 - targets.latency_share, "are slow"),
    )
    for name, rule_of, budget, what in budgets:
        for pace, long, short, factor, severity in _BURNS:
            bound = f"{factor * budget:g}"
            yield _alert(
                name,
                severity,
                "2m",
                f"{rule_of(long)} > {bound}\n  and {rule_of(short)} > {bound}",
                f"{_MODEL}: too many requests {what}",
                f"{_SHARE} of the requests of the last {long} {what}, {factor:g} times what the "
                f"objective allows ({budget:.3%}).",
                pace=pace,
            )


def _replicas(view: View, targets: Targets) -> Iterator[Rule]:
    yield _alert(
        "ReplicaNotWarm",
        "warning",
        "15m",
        f"min by (model, replica) ({view.series('warmup_ratio')}) < 1",
        f"{_MODEL}: a replica is not warm",
        f"Replica {{{{ $labels.replica }}}} has {_SHARE} of its variants after 15 minutes.",
    )
    # The median: a rolling update, or a second cluster beside the first, has more for a while.
    usual = "quantile_over_time(0.5, shapeserve_replicas:count[6h])"
    yield _alert(
        "ReplicaMissing",
        "warning",
        "10m",
        f"shapeserve_replicas:count < {targets.replicas or usual}",
        "A replica of shapeserve is missing",
        "Only {{ $value }} replicas answer the scrape.",
    )
    yield _alert(
        "ScrapeFailed",
        "warning",
        "5m",
        'up{job=~"shapeserve|ray"} == 0',
        "Prometheus cannot scrape {{ $labels.instance }}",
        "What it serves is not seen by any other alert.",
    )
    yield _alert(
        "NotScraped",
        "critical",
        "5m",
        f"absent({view.series('build_info')})",
        "No replica of shapeserve is scraped",
        "Either none runs, or Prometheus does not find them; no other alert works.",
    )
