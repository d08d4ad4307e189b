"""PromQL over the catalogue: what docs/metrics.md shows, rules record and dashboards draw.

Each query is written once, as a function of a :class:`View`. A metric that the catalogue does not
declare cannot be named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shapeserve.buckets import BATCH
from shapeserve.metrics.catalogue import CATALOGUE, NO_MODEL, PREFIX, REAL, Endpoint, Outcome

_SUFFIXES = {"histogram": ("_bucket", "_count", "_sum")}
_NAMES = {d.attribute + suffix for d in CATALOGUE for suffix in _SUFFIXES.get(d.kind, ("",))}

# Before the window in which a counter may be born, it was not seen for this long; longer than any
# gap that failed scrapes leave.
_BORN_AFTER = "1h"

_NOT_TO_BLAME = f"{Outcome.CLIENT_ERROR}|{Outcome.CANCELLED}"
_BAD = "|".join(o for o in Outcome if o not in (Outcome.OK, *_NOT_TO_BLAME.split("|")))
_PADDING = f'kind!="{REAL}"'
_NO_FILLER = f'kind!="padding_{BATCH}"'
_OF_MODELS = f'model!="{NO_MODEL}"'
_OF_NO_MODEL = f'model="{NO_MODEL}"'
_FULL = 'reason=~"queue_.*"'

FOR_WORK = f'endpoint!~"{Endpoint.MODELS}|{Endpoint.METRICS}|{Endpoint.OTHER}"'
"""Matches the requests that are for a model, also those that were refused before it was known."""


@dataclass(frozen=True)
class View:
    """Which series a query reads.

    Attributes:
        prefix: of every name; ``ray_shapeserve_`` for what Ray's agents export.
        window: the range of rates, such as ``5m``.
        only: a matcher that every selector gets, such as ``model=~"$model"``.
    """

    prefix: str = PREFIX
    window: str = "5m"
    only: str = ""

    def over(self, window: str) -> View:
        """Return the same series over another window."""
        return replace(self, window=window)

    def series(self, name: str, *matchers: str) -> str:
        """Return the selector of a metric's samples, named without ``shapeserve_``."""
        if name not in _NAMES:
            raise ValueError(f"{name!r} is no metric of the catalogue, nor a histogram's sample")
        inside = ",".join(m for m in (self.only, *matchers) if m)
        return f"{self.prefix}{name}{{{inside}}}" if inside else self.prefix + name

    def rate(self, name: str, *matchers: str, by: str = "model") -> str:
        """Return the increase per second, summed to the labels ``by``."""
        return f"sum by ({by}) (rate({self.series(name, *matchers)}[{self.window}]))"

    def events(self, name: str, *matchers: str, by: str = "model") -> str:
        """Return how often something happened that should never happen.

        ``increase`` starts at a counter's first sample, so what happened before the first scrape,
        and in Ray's copy whatever made the series, would go unseen. A series that is younger than
        the window counts with its whole value.
        """
        series, window = self.series(name, *matchers), self.window
        return (
            f"sum by ({by}) (\n"
            f"  ({series} unless max_over_time({series}[{_BORN_AFTER}] offset {window}))\n"
            f"  or increase({series}[{window}])\n"
            ")"
        )

    def quantile(self, q: float, name: str, *matchers: str, by: str = "model") -> str:
        """Return a quantile of a histogram."""
        return (
            f"histogram_quantile({q:g},\n"
            f"  {self.rate(f'{name}_bucket', *matchers, by=f'{by}, le')})"
        )


def waste_by_axis(view: View, *, of_rows: bool = False) -> str:
    """Return padding / all elements, for each axis.

    With ``of_rows`` as the tuner predicts it: without filler rows, which depend on the load.
    """
    only = (_NO_FILLER,) if of_rows else ()
    padding = f"rate({view.series('tokens_total', _PADDING, *only)}[{view.window}])"
    return (
        "sum by (model, axis) (\n"
        f'  label_replace({padding}, "axis", "$1", "kind", "padding_(.+)")\n'
        f") / on (model) group_left () ({view.rate('tokens_total', *only)} > 0)"
    )


def predicted_waste(view: View) -> str:
    """Return what the policy in use was expected to pad, for the axes of which it says so."""
    return f"max by (model, axis) ({view.series('policy_predicted_waste')}) > 0"


def waste(view: View, by: str = "model") -> str:
    """Return padding / all elements."""
    padding = view.rate("tokens_total", _PADDING, by=by)
    return f"{padding}\n  / ({view.rate('tokens_total', by=by)} > 0)"


def padding_device_seconds(view: View, by: str = "model") -> str:
    """Return the device-seconds that went into padding, per second."""
    each = "model, bucket"
    return (
        f"sum by ({by}) (\n"
        f"  {view.rate('device_seconds_total', by=each)}\n"
        f"  * {view.rate('tokens_total', _PADDING, by=each)}\n"
        f"  / ({view.rate('tokens_total', by=each)} > 0)\n"
        ")"
    )


def device_busy(view: View) -> str:
    """Return the share of the time that a model keeps a replica's device busy, 0..1."""
    replicas = f"count by (model) ({view.series('queue_rows')})"
    return f"{view.rate('device_seconds_total')}\n  / {replicas}"


def fallback_share(view: View) -> str:
    """Return the share of the rows that go to the fallback."""
    return f"{view.rate('fallbacks_total')}\n  / ({view.rate('rows_accepted_total')} > 0)"


def fallback_share_by_reason(view: View) -> str:
    """Return the share of the rows that go to the fallback, by reason."""
    return (
        f"{view.rate('fallbacks_total', by='model, reason')}\n"
        "  / on (model) group_left ()\n"
        f"  ({view.rate('rows_accepted_total')} > 0)"
    )


def refused_share(view: View) -> str:
    """Return the share of the requests that are refused because the queue is full."""
    refused = view.rate("rejected_total", _OF_MODELS, _FULL)
    named = f"{refused}\n  / ({view.rate('requests_total', _OF_MODELS)} > 0)"
    unread = view.rate("rejected_total", _OF_NO_MODEL, _FULL)
    return f"{named}\n{_or_unread(unread, view, FOR_WORK)}"


def failed_share(view: View) -> str:
    """Return the share of the requests that the service is to blame for; the error budget."""
    is_bad, counts = f'outcome=~"{_BAD}"', f'outcome!~"{_NOT_TO_BLAME}"'
    bad = view.rate("requests_total", _OF_MODELS, is_bad)
    named = f"{bad}\n  / ({view.rate('requests_total', _OF_MODELS, counts)} > 0)"
    unread = view.rate("requests_total", _OF_NO_MODEL, FOR_WORK, is_bad)
    return f"{named}\n{_or_unread(unread, view, FOR_WORK, counts)}"


def _or_unread(unread: str, view: View, *of: str) -> str:
    """Return the second half of a share: those that were turned away before they were read.

    Which model they were for is not known, so they are a share of the requests for all models.
    """
    asked = f"sum(rate({view.series('requests_total', *of)}[{view.window}]))"
    return f"or ({unread} > 0)\n  / on () group_left () ({asked} > 0)"


def slow_share(view: View, latency_s: float) -> str:
    """Return the share of the requests that took longer than an edge of the histogram."""
    # A scraper may write 1.0 as 1, and a later one 1 as 1.0.
    edge = f'le=~"{latency_s:g}(\\\\.0)?"'
    fast = view.rate("request_seconds_bucket", _OF_MODELS, edge)
    return f"1 - {fast}\n  / ({view.rate('request_seconds_count', _OF_MODELS)} > 0)"


def replicas(view: View) -> str:
    """Return the number of replicas that are scraped."""
    return f"count(count by (replica) ({view.series('build_info')}))"
