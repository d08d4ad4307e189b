"""Fits measured numbers: factors that are never negative, of least relative error."""

from __future__ import annotations

import itertools
import math

import numpy as np


def fit_factors(terms: np.ndarray, values: np.ndarray) -> list[float]:
    """Return factors of at least 0 for the columns of ``terms``, of least squared relative error.

    There are three columns at most, so every choice of those that are not 0 is tried.

    Args:
        terms: [points, columns].
        values: [points], each above 0.
    """
    scaled = terms / values[:, None]
    best, least = [0.0] * terms.shape[1], math.inf
    for number in range(1, min(terms.shape) + 1):
        for chosen in itertools.combinations(range(terms.shape[1]), number):
            part = scaled[:, chosen]
            norms = np.linalg.norm(part, axis=0)
            if not norms.all():
                continue
            factors = np.linalg.lstsq(part / norms, np.ones(len(values)), rcond=None)[0] / norms
            error = float(((part @ factors - 1) ** 2).sum())
            if factors.min() >= 0 and error < least - 1e-12:
                best, least = [0.0] * terms.shape[1], error
                for column, factor in zip(chosen, factors, strict=True):
                    best[column] = float(factor)
    return best
