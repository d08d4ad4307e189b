"""The tuner: from recorded traffic to bucket sizes, with their effect predicted."""

from shapeserve.tuning.cost import ANALYTIC, Cost, Formula
from shapeserve.tuning.fit import Buckets, Fit, Rules, fit, row_shapes, waste
from shapeserve.tuning.fleet import ROUTINGS, Routing
from shapeserve.tuning.limits import Footprint, Limits
from shapeserve.tuning.outcome import Outcome
from shapeserve.tuning.propose import Proposal, propose
from shapeserve.tuning.request import Objective, Request, Scored
from shapeserve.tuning.served import Served
from shapeserve.tuning.simulate import simulate
from shapeserve.tuning.table import CostPoint, CostTable

__all__ = [
    "ANALYTIC",
    "ROUTINGS",
    "Buckets",
    "Cost",
    "CostPoint",
    "CostTable",
    "Fit",
    "Footprint",
    "Formula",
    "Limits",
    "Objective",
    "Outcome",
    "Proposal",
    "Request",
    "Routing",
    "Rules",
    "Scored",
    "Served",
    "fit",
    "propose",
    "row_shapes",
    "simulate",
    "waste",
]
