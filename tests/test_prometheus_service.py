"""The real service in both forms, scraped by a real Prometheus while a replica is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from prometheus_process import Labels, Prometheus, committed_config, labels, needs_prometheus
from service_process import ServiceProcess, eventually, free_port
from tiny import text_of, write_model

from shapeserve.monitoring import Targets, rule_groups
from shapeserve.monitoring.__main__ import RUNBOOKS

pytestmark = [needs_prometheus, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

M = labels(model="tiny")
# Ray's agents pass on what is new every 10 s; ours is there at once.
RAY_S = 25


class Watched:
    """A service of two replicas, and a Prometheus that scrapes it in both forms."""

    def __init__(self, service: ServiceProcess, directory: Path) -> None:
        self.service = service
        config = committed_config("single-node.yml", [httpx.URL(service.url).netloc.decode()])
        agent = f"127.0.0.1:{service.do(metrics_port=None)['answer']}"
        ray = committed_config("ray-cluster.yml", [agent])
        config["scrape_configs"] += ray["scrape_configs"]
        for job in config["scrape_configs"]:
            job["scrape_interval"], job["scrape_timeout"] = "2s", "2s"
        config["rule_files"] = []
        self.prometheus = Prometheus(config, directory)
        self.sent_at_s: list[float] = []

    def work(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            n = len(self.sent_at_s)
            if self.service.embed(text_of(3 + n % 45, n), model="tiny").status_code == 200:
                self.sent_at_s.append(time.time())

    def ask(self, form: str, name: str) -> dict[Labels, float]:
        rules = rule_groups(form, Targets(), RUNBOOKS)["groups"][0]["rules"]
        (expr,) = (rule["expr"] for rule in rules if rule.get("record") == name)
        return self.prometheus.query(expr)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    model = {
        "name": "tiny",
        "path": str(write_model(tmp_path_factory.mktemp("model"))),
        "compile": {"tier": "eager"},
        "policy": {"seq": {"explicit": [8, 16, 24]}, "batch": {"explicit": [1, 4]}},
    }
    serving = {"port": free_port(), "proxy": "default", "replicas": 2}
    config = {"models": [model], "serve": serving}
    service = ServiceProcess(config, tmp_path_factory.mktemp("service"))
    made = None
    try:
        service.until("started")
        service.until("ready")
        eventually(lambda: len(service.replicas()) == 2)
        made = Watched(service, tmp_path_factory.mktemp("prometheus"))
        made.prometheus.await_scrapes("shapeserve", 1)
        made.work(5)  # a series of Ray's begins with its first change, which no rate can see
        time.sleep(RAY_S)
        yield made
    finally:
        if made is not None:
            made.prometheus.stop()
        service.stop()


def waste_by_hand(service: ServiceProcess) -> float:
    """Padding / all from the areas of the batches that ran, and the real tokens."""
    samples = service.samples()
    areas = {dict(k)["bucket"]: v for k, v in samples["shapeserve_bucket_area"].items()}
    ran = {"none": 0.0}
    for key, n in samples["shapeserve_batches_total"].items():
        bucket = dict(key)["bucket"]
        ran[bucket] = ran.get(bucket, 0.0) + n
    in_fallback = service.total("tokens_total", model="tiny", bucket="none")
    executed = in_fallback + sum(ran[bucket] * area for bucket, area in areas.items())
    return 1 - service.total("tokens_total", model="tiny", kind="real") / executed


def test_both_forms_give_the_waste_that_the_batches_imply(watched: Watched) -> None:
    watched.work(10)
    watched.prometheus.await_scrapes("shapeserve", 2)
    name = "model:shapeserve_padding_waste:ratio_rate5m"
    by_hand = waste_by_hand(watched.service)
    assert watched.ask("metrics", name) == {M: pytest.approx(by_hand, rel=0.01)}
    time.sleep(RAY_S)
    # Without what came before its series began: the mix of lengths is the same.
    assert watched.ask("ray", name) == {M: pytest.approx(by_hand, rel=0.05)}


@pytest.mark.parametrize("form", ["metrics", "ray"])
def test_every_rule_is_valid_and_healthy_in_both_forms(watched: Watched, form: str) -> None:
    for rule in rule_groups(form, Targets(), RUNBOOKS)["groups"][0]["rules"]:
        watched.prometheus.query(rule["expr"])
    assert watched.ask(form, "shapeserve_replicas:count") == {labels(): 2}
    assert watched.ask(form, "model:shapeserve_fallback:ratio_rate5m")[M] > 0
    assert watched.ask(form, "model:shapeserve_device_busy:ratio_rate5m")[M] > 0


def test_what_a_killed_replica_had_counted_stays_counted_once(watched: Watched) -> None:
    service, prometheus = watched.service, watched.prometheus
    os.kill(service.pids("ServeReplica:shapeserve:ShapeServe")[0], signal.SIGKILL)
    watched.work(6)
    eventually(lambda: len(service.replicas()) == 2)
    watched.work(4)
    prometheus.await_scrapes("shapeserve", 2)
    at = prometheus.scrapes("shapeserve", 1800)
    one_interval = max(sum(a < t <= b for t in watched.sent_at_s) for a, b in pairwise(at))
    counted = prometheus.query("sum(increase(shapeserve_rows_accepted_total[30m]))")
    assert abs(counted[labels()] - len(watched.sent_at_s)) <= one_interval
    rate = "sum(rate(shapeserve_rows_accepted_total[10s]))"
    assert not [v for v in prometheus.range(rate, at[0], at[-1]) if v < 0]
    by_replica = "count by (replica) (ray_shapeserve_build_info)"
    alive = {labels(replica=replica) for replica in service.replicas()}
    eventually(lambda: prometheus.query(by_replica).keys() == alive)
