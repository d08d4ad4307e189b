"""Which of the fitted buckets is proposed: their number, within limits, by the objective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shapeserve.errors import ConfigError
from shapeserve.policy import BATCHES
from shapeserve.traces import Traffic
from shapeserve.tuning.fit import Fit, Rules, executed, fit, row_shapes, waste
from shapeserve.tuning.limits import Footprint
from shapeserve.tuning.task import Batches, Task

MAX_SHAPES = 32
"""Row shapes that the automatic choice looks at."""
# One more row shape costs a capture for each batch size on a GPU (4 to 12 ms and some memory each)
# and a longer warm-up; it must take away so much of all that is executed. Arbitrary.
WORTHWHILE = 0.005
# Numbers of row shapes that are simulated, some seconds each; between them little changes.
PLAYED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Latencies that differ by less are the same, and fewer variants are better. Arbitrary.
_SAME = 0.01


class Steps:
    """Counts what is done of what is to be done, which may become more."""

    def __init__(self, on_step: Callable[[int, int], None]) -> None:
        self._on_step = on_step
        self._done = self._total = 0

    def expect(self, more: int) -> None:
        """There is so much more to do."""
        self._total += more

    def __call__(self) -> None:
        """One step is done."""
        self._done += 1
        self._on_step(self._done, self._total)


@dataclass(frozen=True, slots=True)
class Choice:
    """The buckets that are proposed.

    Attributes:
        number: of row shapes that the fit was allowed.
        wanted: number of row shapes without limits.
        fit: the buckets.
        batches: sizes along ``batch``; None: what the device gets by default.
        footprint: what their variants take; None if a policy may not have so many.
        p99_s: simulated on the first half; None unless that is the objective.
        curve: number of row shapes -> waste on rows within the first half that the fit had not
            seen; empty unless it chose the number.
    """

    number: int
    wanted: int
    fit: Fit
    batches: Batches
    footprint: Footprint | None
    p99_s: float | None = None
    curve: Mapping[int, float] = field(default_factory=dict)

    @property
    def variants(self) -> int:
        """How many there are."""
        return self.footprint.variants if self.footprint else row_shapes(self.fit.buckets)


def choose(task: Task, steps: Steps) -> Choice:
    """Choose the number of row shapes, within the limits of the request.

    Raises:
        ConfigError: nothing is within the limits.
    """
    request = task.request
    request.limits.check(request.variant_costs)
    if request.objective == "p99":
        return _by_latency(task, steps)
    batches = None if request.batches == "auto" else request.batches
    curve: dict[int, float] = {}
    number = request.shapes
    if number is None:
        numbers = range(1, MAX_SHAPES + 1)
        steps.expect(len(numbers))
        number, curve = choose_number(task.first, task.rules, numbers, steps)
    steps.expect(1)
    wanted = number
    made = fit(task.first, task.rules, [number], steps)[number]
    found = _footprint(task, made, batches)
    if not _allowed(task, found):
        smaller = range(1, number) if number > _least(task.rules) else ()
        kept = [*_within_limits(task, smaller, batches, steps)]
        if not kept:
            raise ConfigError(_nothing(task, batches))
        number, made, found = kept[-1]
    return Choice(number, wanted, made, batches, found, curve=curve)


def choose_number(
    first: Traffic, rules: Rules, numbers: Sequence[int], step: Callable[[], None]
) -> tuple[int, dict[int, float]]:
    """Choose the number of shapes within the first half: fitted to a part, judged on the other.

    It is the smallest after which no larger one takes away ``WORTHWHILE`` of the cost for each
    shape that it has more, on rows that the fit has not seen.
    """
    train, unseen = first.halves()
    fits = fit(train, rules, numbers, step)
    costs = {
        number: float((unseen.counts * rules.cost(executed(unseen, made.buckets))).sum())
        + rules.variant_cost * row_shapes(made.buckets)
        for number, made in fits.items()
    }
    curve = {number: waste(unseen, made.buckets) for number, made in fits.items()}
    for number, cost in costs.items():
        if all(
            cost - more_cost < WORTHWHILE * cost * (more - number)
            for more, more_cost in costs.items()
            if more > number
        ):
            return number, curve
    return max(costs), curve


def _footprint(task: Task, made: Fit, batches: Batches) -> Footprint | None:
    """Return what the variants take; None if a policy may not have them."""
    try:
        return Footprint.of(task.grid(made.buckets, batches), task.request.variant_costs)
    except ConfigError:
        if task.request.batches is not None and batches == task.request.batches:
            raise  # a batch size that is asked for and never used
        return None


def _allowed(task: Task, found: Footprint | None) -> bool:
    limits = task.request.limits
    return limits.free if found is None else not limits.broken(found)


def _within_limits(
    task: Task, numbers: Sequence[int], batches: Batches, steps: Steps
) -> Iterator[tuple[int, Fit, Footprint | None]]:
    """Yield the buckets of each number of row shapes that keeps the limits, ascending."""
    if not numbers:
        return
    steps.expect(len(numbers))
    for number, made in fit(task.first, task.rules, numbers, steps).items():
        found = _footprint(task, made, batches)
        if _allowed(task, found):
            yield number, made, found


def _least(rules: Rules) -> int:
    """Return the row shapes that there are at least."""
    return len({*rules.forced, *rules.ends.values()}) if rules.forced else 1


def _nothing(task: Task, batches: Batches) -> str:
    """Say by how much the least that can be had is above the limits."""
    least = _least(task.rules)
    made = fit(task.first, task.rules, [least])[least]
    found = _footprint(task, made, batches)
    over = "no policy" if found is None else ", ".join(task.request.limits.broken(found))
    return (
        f"even {row_shapes(made.buckets)} row shapes would be {over}; raise the limit, force fewer "
        "sizes, or allow fewer batch sizes with --batch"
    )


def _by_latency(task: Task, steps: Steps) -> Choice:
    """Simulate the first half for some numbers of row shapes, then for fewer batch sizes."""
    request = task.request
    if task.first.times_s is None:
        raise ConfigError(
            "a histogram has no times, and latency follows from them; give a trace (t_s,len), or "
            "minimise padding or seconds"
        )
    most = request.shapes or MAX_SHAPES
    numbers: Sequence[int] = [*(n for n in PLAYED if n < most), most]
    played: list[Choice] = []
    for batches in _batch_lists(task):
        kept = [one for one in _within_limits(task, numbers, batches, steps) if one[2] is not None]
        if played:  # fewer batch sizes: only with as many row shapes as were best, or are allowed
            kept = kept[-1:]
        steps.expect(len(kept))
        for number, made, footprint in kept:
            p99_s = task.play(made.buckets, batches, second=False).latency_s(99)
            played.append(Choice(number, number, made, batches, footprint, p99_s))
            steps()
        if played and request.limits.free:
            best = _best(played, request.slo_s).number
            numbers = [*(n for n in PLAYED if n < best), best]
    if not played:
        raise ConfigError(_nothing(task, None if request.batches == "auto" else request.batches))
    return _best(played, request.slo_s)


def _batch_lists(task: Task) -> list[Batches]:
    """Return the batch sizes to try: those of the request, or the default without its largest."""
    request = task.request
    if request.batches != "auto":
        return [request.batches]
    default = BATCHES[request.device]
    return [None, *(default[:end] for end in range(len(default) - 1, 0, -1))]


def _best(played: Sequence[Choice], slo_s: float | None) -> Choice:
    """Return the fewest variants that keep the bound; without one, the least latency."""
    timed = [(choice.p99_s or 0.0, choice) for choice in played]
    least = min(p99_s for p99_s, _ in timed)
    bound = least * (1 + _SAME) if slo_s is None or least > slo_s else slo_s
    kept = [(c.variants, p99_s, i) for i, (p99_s, c) in enumerate(timed) if p99_s <= bound]
    return played[min(kept)[2]]
