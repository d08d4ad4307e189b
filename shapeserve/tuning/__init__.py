"""The tuner: from recorded traffic to bucket sizes, with their effect predicted."""

from shapeserve.tuning.cost import ANALYTIC, Cost, Formula
from shapeserve.tuning.fit import Fit, Ladders, Rules, fit, waste
from shapeserve.tuning.propose import Objective, Proposal, Request, Scored, propose
from shapeserve.tuning.table import CostPoint, CostTable

__all__ = [
    "ANALYTIC",
    "Cost",
    "CostPoint",
    "CostTable",
    "Fit",
    "Formula",
    "Ladders",
    "Objective",
    "Proposal",
    "Request",
    "Rules",
    "Scored",
    "fit",
    "propose",
    "waste",
]
