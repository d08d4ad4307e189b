"""The tuner: from recorded traffic to bucket sizes, with their effect predicted."""

from shapeserve.tuning.cost import ANALYTIC, Cost, Formula
from shapeserve.tuning.fit import Buckets, Fit, Rules, fit, row_shapes, waste
from shapeserve.tuning.fleet import ROUTINGS, Routing
from shapeserve.tuning.limits import Footprint, Limits
from shapeserve.tuning.outcome import Outcome
from shapeserve.tuning.prometheus import Lengths, duration_s, read_lengths
from shapeserve.tuning.propose import Proposal, propose
from shapeserve.tuning.request import Objective, Request, Scored
from shapeserve.tuning.served import Served
from shapeserve.tuning.simulate import simulate
from shapeserve.tuning.table import CostPoint, CostTable
from shapeserve.tuning.watch import WORDS, Decision, Watcher, WatchRules, drift_between

__all__ = [
    "ANALYTIC",
    "ROUTINGS",
    "WORDS",
    "Buckets",
    "Cost",
    "CostPoint",
    "CostTable",
    "Decision",
    "Fit",
    "Footprint",
    "Formula",
    "Lengths",
    "Limits",
    "Objective",
    "Outcome",
    "Proposal",
    "Request",
    "Routing",
    "Rules",
    "Scored",
    "Served",
    "WatchRules",
    "Watcher",
    "drift_between",
    "duration_s",
    "fit",
    "propose",
    "read_lengths",
    "row_shapes",
    "simulate",
    "waste",
]
