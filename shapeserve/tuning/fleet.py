"""Which replica a row goes to: the routings that the simulator knows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, get_args

from shapeserve.batcher import Lane

Routing = Literal["random", "p2c", "affinity"]
ROUTINGS: tuple[str, ...] = get_args(Routing)

Choose = Callable[[Lane], int]
"""Lane of a row -> index of the replica."""


def router(
    routing: Routing, replicas: int, load: Callable[[int], int], rng: random.Random
) -> Choose:
    """Return what chooses a replica.

    Args:
        routing: ``random``; ``p2c``, the less loaded of two random ones, as Ray Serve does; or
            ``affinity``, the replica that took the last row of this shape, unless it has a largest
            batch more to do than the better of two random ones, which then is the shape's replica.
        replicas: how many there are.
        load: index -> rows that wait or run there.
        rng: source of the random choices.
    """
    last: dict[Lane, int] = {}

    def any_of_all(_: Lane) -> int:
        return rng.randrange(replicas)

    def better_of_two(_: Lane) -> int:
        one, other = rng.randrange(replicas), rng.randrange(replicas)
        return min(one, other, key=load)

    def same_shape(lane: Lane) -> int:
        other = better_of_two(lane)
        kept = last.get(lane, other)
        if load(kept) > load(other) + lane.batch_sizes[-1]:
            kept = other
        last[lane] = kept
        return kept

    if replicas == 1:
        return lambda _: 0
    return {"random": any_of_all, "p2c": better_of_two, "affinity": same_shape}[routing]
