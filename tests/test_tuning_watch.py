"""A tuner that watches: what counts as a change, and what it takes to act on one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from service_process import free_port
from test_tuning_prometheus import answer

from shapeserve.cli import main
from shapeserve.cli.tune import inputs
from shapeserve.cli.tune import watch as watch_module
from shapeserve.errors import ConfigError, RolloutFailed
from shapeserve.traces import Traffic
from shapeserve.tuning import WORDS, Decision, Request, Watcher, WatchRules, drift_between, propose

END = 512
RULES = WatchRules(drift=0.15, looks=2, min_saving=0.02, min_apply_s=3600, min_rows=100)


def traffic(*sizes: int, rows: float = 100) -> Traffic:
    """Every one of ``sizes`` equally often."""
    counts = np.full(len(sizes), rows / len(sizes))
    return Traffic(("seq",), np.array(sizes)[:, None], np.rint(counts), named=True)


SHORT, LONG = traffic(8, 16, 24, 32, rows=400), traffic(100, 200, 300, 400, rows=400)
LITTLE = traffic(8, 16, 24, rows=30)

# --- drift ---------------------------------------------------------------------------------------


def test_drift_is_in_octaves() -> None:
    assert drift_between(SHORT, SHORT) == 0
    assert drift_between(SHORT, traffic(8, 16, 24, 32, rows=4000)) == 0  # of shares, not of rows
    assert drift_between(traffic(10), traffic(20)) == pytest.approx(1)
    assert drift_between(SHORT, traffic(16, 32, 48, 64)) == pytest.approx(1)
    ten = [10] * 10
    three_times = traffic(*ten[:9], 30)
    assert drift_between(traffic(*ten), three_times) == pytest.approx(np.log2(3) / 10)


LENGTHS = st.lists(st.integers(1, 4000), min_size=1, max_size=12)


@given(LENGTHS, LENGTHS, LENGTHS)
def test_drift_is_a_distance(a: list[int], b: list[int], c: list[int]) -> None:
    first, second, third = (traffic(*x, rows=len(x)) for x in (a, b, c))
    there = drift_between(first, second)
    assert there == pytest.approx(drift_between(second, first))
    assert (there < 1e-12) == (sorted(a * len(b)) == sorted(b * len(a)))
    assert there <= drift_between(first, third) + drift_between(third, second) + 1e-9


# --- decisions -----------------------------------------------------------------------------------


class Scene:
    """A watcher whose world is set by the test."""

    def __init__(self, rules: WatchRules = RULES, *, allowed: bool = True) -> None:
        self.now_s = 0.0
        self.traffic: Traffic | Exception = SHORT
        self.rolled_out: list[tuple[float, list[int]]] = []
        self.refuses = False
        apply = self._apply if allowed else None
        self.watcher = Watcher(rules, self._read, self._propose, apply, lambda: self.now_s)

    def _read(self) -> Traffic:
        if isinstance(self.traffic, Exception):
            raise self.traffic
        return self.traffic

    def _propose(self, traffic: Traffic) -> Any:
        return propose(traffic, Request(shapes=4, max_length=END))

    def _apply(self, policy: dict[str, Any]) -> str:
        self.rolled_out.append((self.now_s, policy["seq"]["explicit"]))
        if self.refuses:
            raise RolloutFailed("a replica says rejected")
        return "2 replicas serve it"

    def look(self, traffic: Traffic | Exception, after_s: float = 900.0) -> Decision:
        self.traffic = traffic
        self.now_s += after_s
        return self.watcher.look()

    def words(self, *seen: Traffic | Exception, after_s: float = 900.0) -> list[str]:
        return [self.look(one, after_s).decision for one in seen]


def test_the_first_look_tunes_and_the_same_traffic_changes_nothing() -> None:
    scene = Scene()
    assert scene.words(SHORT, SHORT, SHORT) == ["applied", "steady", "steady"]
    assert [sizes[-1] for _, sizes in scene.rolled_out] == [END]


def test_a_change_must_be_seen_twice_in_a_row() -> None:
    scene = Scene()
    words = scene.words(SHORT, LONG, SHORT, LONG, LONG, LONG, after_s=4000)
    assert words == ["applied", "drifting", "steady", "drifting", "applied", "steady"]
    assert len(scene.rolled_out) == 2


def test_a_rollout_has_its_effect_said_in_numbers() -> None:
    scene = Scene()
    scene.words(SHORT, LONG, after_s=4000)
    done = scene.look(LONG, 4000)
    assert done.drift == pytest.approx(drift_between(SHORT, LONG))
    assert done.serving_waste is not None
    assert done.proposed_waste is not None
    assert done.serving_waste - done.proposed_waste > RULES.min_saving
    assert done.policy == {"seq": {"explicit": scene.rolled_out[-1][1], **_predicted(done)}}
    assert (done.rows, done.message) == (400, "2 replicas serve it")


def _predicted(done: Decision) -> dict[str, float]:
    return {"predicted_waste": round(done.proposed_waste or 0.0, 4)}


def test_two_rollouts_are_apart_also_if_the_last_one_failed() -> None:
    scene = Scene()
    assert scene.words(SHORT, LONG, LONG, LONG) == ["applied", "drifting", "cooling", "cooling"]
    assert scene.look(LONG).decision == "applied"  # an hour after the first
    scene.refuses = True
    assert scene.words(SHORT, SHORT, SHORT, SHORT) == ["drifting", "cooling", "cooling", "failed"]
    assert scene.look(SHORT).decision == "cooling"
    scene.refuses = False
    assert scene.look(SHORT, 3600).decision == "applied"


def test_a_change_that_saves_little_is_not_rolled_out_and_becomes_the_measure() -> None:
    scene = Scene(WatchRules(min_saving=0.9, min_rows=100))
    words = scene.words(SHORT, LONG, LONG, LONG, after_s=4000)
    assert words == ["applied", "drifting", "small_saving", "steady"]
    assert len(scene.rolled_out) == 1


def test_what_nobody_allows_is_proposed_once_and_measured_against_what_was_proposed_first() -> None:
    scene = Scene(allowed=False)
    first = scene.look(SHORT)
    assert (first.decision, "--yes" in first.message) == ("proposed", True)
    assert scene.words(LONG, LONG, LONG, SHORT) == ["drifting", "proposed", "steady", "drifting"]
    assert scene.look(SHORT).decision == "small_saving"  # the first sizes still serve
    assert scene.rolled_out == []


def test_too_little_is_no_distribution_and_breaks_the_row() -> None:
    scene = Scene()
    none = ConfigError("no rows came in the last 1h")
    words = scene.words(LITTLE, none, SHORT, LONG, LITTLE, LONG, none, LONG, after_s=4000)
    assert words == [
        *("no_data", "no_data", "applied"),
        *("drifting", "no_data", "drifting", "no_data", "drifting"),
    ]
    assert scene.look(none).message == "no rows came in the last 1h"
    assert "30 rows; at least 100 are needed" in scene.look(LITTLE).message


def test_a_first_rollout_that_failed_is_tried_again_after_a_while() -> None:
    scene = Scene()
    scene.refuses = True
    assert scene.words(SHORT, SHORT) == ["failed", "cooling"]
    scene.refuses = False
    assert scene.look(SHORT, 3600).decision == "applied"


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([SHORT, LONG, LITTLE]), st.floats(1, 5000), st.booleans()),
        max_size=25,
    )
)
def test_whatever_comes_rollouts_are_apart_and_follow_two_looks_at_a_change(
    looks: list[tuple[Traffic, float, bool]],
) -> None:
    scene = Scene()
    seen: list[Decision] = []
    for one, after_s, refuses in looks:
        scene.refuses = refuses
        before = len(scene.rolled_out)
        seen.append(scene.look(one, after_s))
        acted = len(scene.rolled_out) > before
        assert acted == (seen[-1].decision in ("applied", "failed"))
        if acted and any(d.decision == "applied" for d in seen[:-1]):
            drifts = [d.drift for d in seen[-RULES.looks :]]
            assert all(drift is not None and drift >= RULES.drift for drift in drifts)
    times = [time_s for time_s, _ in scene.rolled_out]
    assert all(b - a >= RULES.min_apply_s for a, b in itertools.pairwise(times))
    assert {d.decision for d in seen} <= set(WORDS)


# --- the command ---------------------------------------------------------------------------------


class Stopped(KeyboardInterrupt):
    """Ctrl-C."""


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what Prometheus says at each look; the watch ends after the last."""

    def set_(*looks: Any) -> None:
        says: Iterator[Any] = iter(looks)
        current = [next(says)]

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            try:
                current[0] = next(says)
            except StopIteration:
                raise Stopped from None

        slept: list[float] = []
        clock = iter(range(0, 10**6, 4000))
        defaults = {"sleep": sleep, "now": lambda: float(next(clock))}
        monkeypatch.setattr(watch_module.watch, "__kwdefaults__", defaults)
        monkeypatch.setattr(inputs, "fetch_json", lambda *_, **__: (200, current[0]))
        set_.slept = slept  # type: ignore[attr-defined]

    return set_


def said(*lengths: int) -> dict[str, Any]:
    """1,000 rows of each length, which has a place of its own in the histogram."""
    cumulated: dict[str, float] = {}
    for i, length in enumerate(lengths):
        cumulated |= {str(length - 1): 1000.0 * i, str(length): 1000.0 * (i + 1)}
    return answer(("mini", "seq", {**cumulated, "+Inf": 1000.0 * len(lengths)}))


def watch(*arguments: str) -> Result:
    line = ["tune", "--watch", "--prometheus", "http://p:9090", "--model", "mini"]
    line += ["--max-length", "512", "-k", "4", *arguments]
    return CliRunner().invoke(main, line, catch_exceptions=False)


def test_each_look_is_a_json_line_a_count_and_a_gauge(
    hours: Callable[..., None], tmp_path: Path
) -> None:
    short, long = said(8, 16, 32), said(200, 300, 512)
    port, out = free_port(), tmp_path / "policy.yaml"
    hours(short, short, long, long, {"status": "error", "error": "overloaded"})
    scraped: list[str] = []
    write = watch_module._Session.write

    def scrape(session: Any) -> None:
        write(session)
        scraped.append(httpx.get(f"http://127.0.0.1:{port}/metrics").text)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch_module._Session, "write", scrape)
        result = watch("--metrics-port", str(port), "--out", str(out), "--interval", "10m")
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["decision"] for line in lines] == [
        *("proposed", "steady", "drifting", "proposed", "no_data")
    ]
    assert {line["model"] for line in lines} == {"mini"}
    assert lines[3]["policy"]["seq"]["explicit"] == [200, 300, 512]
    assert "200, 300, 512" in out.read_text()
    assert "overloaded" in lines[4]["message"]
    assert hours.slept == [600.0] * 5  # type: ignore[attr-defined]
    for decision, count in (("proposed", 2), ("steady", 1), ("drifting", 1), ("applied", 0)):
        labels = f'{{decision="{decision}",model="mini"}}'
        assert f"shapeserve_tuner_decisions_total{labels} {count}.0" in scraped[1]
    assert f'shapeserve_tuner_drift{{model="mini"}} {lines[3]["drift"]}' in scraped[1]


@pytest.mark.parametrize(("yes", "decision"), [((), "proposed"), (("--yes",), "applied")])
def test_nothing_is_rolled_out_without_yes(
    hours: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    yes: tuple[str, ...],
    decision: str,
) -> None:
    hours(said(8, 16))
    applied: list[Any] = []

    def applier(_: Any) -> Any:
        def apply(model: str, policy: Any) -> Any:
            applied.append((model, policy))
            return type("Applied", (), {"message": "done"})

        return apply

    monkeypatch.setattr(watch_module, "applier", applier)
    result = watch("--apply", "http://ray:8265", *yes)
    (line,) = map(json.loads, result.stdout.splitlines())
    assert line["decision"] == decision
    assert applied == ([("mini", line["policy"])] if yes else [])


REFUSED = {
    "a trace": (("tune", "--trace", "t.csv", "--watch"), "--watch needs --prometheus"),
    "no model": (
        ("tune", "--prometheus", "http://p", "--watch"),
        "--watch needs --model",
    ),
    "no end": (
        ("tune", "--prometheus", "http://p", "--model", "m", "--watch"),
        "--watch needs --max-length",
    ),
    "yes to nothing": (("watch", "--yes"), "say where with --apply or --apply-admin"),
    "json": (("watch", "--json", "-"), "leave --json out"),
    "interval": (("watch", "--interval", "often"), "--interval often: it must be a duration"),
    "no pause": (("watch", "--interval", "999ms"), "at least 1s are needed between two looks"),
    "an age": (("watch", "--interval", "101y"), "--interval 101y: it must be at most 100y"),
    "drift nan": (("watch", "--drift", "nan"), "nan is no finite number"),
    "range": (("watch", "--range", "1 hour"), "--range 1 hour: it must be a duration"),
    "yes alone": (("tune", "--trace", "t.csv", "--yes"), "--yes is for --watch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_watch_that_could_not_act_is_refused_at_once(
    hours: Callable[..., None], name: str
) -> None:
    hours(said(8))
    (command, *arguments), message = REFUSED[name]
    result = (
        watch(*arguments)
        if command == "watch"
        else CliRunner().invoke(main, [command, *arguments], catch_exceptions=False)
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.replace("\n", " ")
