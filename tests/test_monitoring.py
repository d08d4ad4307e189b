"""What is generated under deploy/: current, valid; each alert fires and does not fire."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_process import MONITORING, needs_prometheus

from shapeserve.errors import ConfigError
from shapeserve.metrics import CATALOGUE
from shapeserve.metrics.queries import View
from shapeserve.monitoring import FORMS, Targets, generated_files, rule_groups
from shapeserve.monitoring.__main__ import RUNBOOKS, main

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
GENERATED = generated_files(Targets(), RUNBOOKS)
UNIT_TESTS = sorted((MONITORING / "tests").glob("*.yml"))
GROUPS = rule_groups("metrics", Targets(), RUNBOOKS)["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
NAMES = sorted({rule["alert"] for rule in ALERTS})
DASHBOARD: dict[str, Any] = json.loads(GENERATED["grafana/dashboard.json"])
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


# --- generation --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED)
def test_committed_files_are_what_is_generated(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert text == GENERATED[name], "run: python -m shapeserve.monitoring deploy"


def test_options_change_the_bounds_and_the_links(tmp_path: Path) -> None:
    options = ["--padding-waste", "0.3", "--replicas", "4", "--runbooks", "https://x/y"]
    assert main([str(tmp_path), *options]) == 0
    text = (tmp_path / "prometheus" / "rules.yml").read_text()
    assert "model:shapeserve_padding_waste:ratio_rate5m > 0.3\n" in text
    assert "shapeserve_replicas:count < 4\n" in text
    assert "https://x/y#shapeservepaddingwaste\n" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--latency-s", "0.3"], "latency_s=0.3 is no edge of request_seconds"),
        (["--padding-waste", "50"], "padding_waste=50 must be a share between 0 and 1"),
        (["--availability", "1"], "availability=1 must be a share between 0 and 1"),
        (["--availability", "0.93"], "availability=0.93 must be above 0.9306: 14.4 times"),
        (["--latency-share", "0.9"], "the fast alert would never fire"),
        (["--queue-wait-s", "0"], "queue_wait_s=0 must be above 0 and below 60 seconds"),
        (["--queue-wait-s", "60"], "no quantile is above it"),
        (["--replicas", "-1"], "replicas=-1 must be 0 or more"),
    ],
)
def test_a_bound_that_makes_no_sense_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main([str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 2
    said = capsys.readouterr().err
    assert f"DIR={tmp_path}/file: {tmp_path}/file/prometheus cannot be written (Not a dir" in said


def test_targets_name_the_edges_that_are_allowed() -> None:
    with pytest.raises(ConfigError, match=r"use one of 0\.0001, .*, 0\.25, .*, 60"):
        Targets(latency_s=0.2)


def test_a_query_cannot_name_a_metric_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="'rows' is no metric"):
        View().series("rows")


def test_rays_rules_differ_in_the_prefix_only() -> None:
    own = GENERATED["prometheus/rules.yml"]
    known = "|".join(sorted((d.name for d in CATALOGUE), key=len, reverse=True))
    renamed = re.sub(rf"(?<![:\w])({known})", r"ray_\1", own)
    assert yaml.safe_load(renamed) == yaml.safe_load(GENERATED["prometheus/rules-ray.yml"])
    assert sorted(FORMS) == ["metrics", "ray"]


def test_the_kubernetes_resource_has_the_rules_for_ray() -> None:
    resource = yaml.safe_load(GENERATED["prometheus/kuberay-prometheusrule.yaml"])
    assert resource["spec"] == yaml.safe_load(GENERATED["prometheus/rules-ray.yml"])


# --- alerts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS, ids=lambda a: a["alert"])
def test_an_alert_says_how_bad_what_and_where_to_read_on(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("warning", "critical")
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    page, _, anchor = notes["runbook_url"].partition("#")
    assert page == RUNBOOKS
    headings = re.findall(r"^## (.+)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]


def test_the_runbooks_have_an_entry_for_each_alert_with_its_three_parts() -> None:
    _, *entries = re.split(r"^## ", (ROOT / RUNBOOKS).read_text(), flags=re.MULTILINE)
    assert sorted(entry.split("\n")[0] for entry in entries) == NAMES
    for entry in entries:
        parts = re.findall(r"^\*\*(.+?)\*\*", entry, flags=re.MULTILINE)
        assert parts == ["Meaning.", "Look at.", "Do."], entry


def test_every_alert_is_tested_to_fire_and_not_to_fire() -> None:
    fires: dict[bool, set[str]] = {True: set(), False: set()}
    for path in UNIT_TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test.get("alert_rule_test", ()):
                fires[bool(case["exp_alerts"])].add(case["alertname"])
    assert sorted(fires[True]) == NAMES
    assert sorted(fires[False]) == NAMES


def promtool(*arguments: str | Path, cwd: Path = MONITORING) -> str:
    ran = subprocess.run(["promtool", *arguments], capture_output=True, text=True, cwd=cwd)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@needs_prometheus
@pytest.mark.parametrize("form", ["metrics", pytest.param("ray", marks=pytest.mark.slow)])
def test_unit_tests_of_the_rules_pass(form: str, tmp_path: Path) -> None:
    if form == "metrics":
        promtool("test", "rules", *UNIT_TESTS)
        return
    (tmp_path / "tests").mkdir()
    (tmp_path / "rules.yml").write_text(GENERATED["prometheus/rules-ray.yml"])
    copies = []
    for path in UNIT_TESTS:
        copies.append(tmp_path / "tests" / path.name)
        copies[-1].write_text(
            path.read_text().replace("series: 'shapeserve_", "series: 'ray_shapeserve_")
        )
    promtool("test", "rules", *copies)


@needs_prometheus
def test_a_bound_that_is_changed_fails_its_unit_test(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    own = GENERATED["prometheus/rules.yml"]
    (tmp_path / "rules.yml").write_text(own.replace("ratio_rate5m > 0.5\n", "ratio_rate5m > 0.7\n"))
    statuses = {}
    for name in ("padding-waste.yml", "fallback-share.yml"):
        file = tmp_path / "tests" / name
        file.write_text((MONITORING / "tests" / name).read_text())
        command = ["promtool", "test", "rules", file]
        statuses[name] = subprocess.run(command, capture_output=True).returncode
    assert statuses == {"padding-waste.yml": 1, "fallback-share.yml": 0}


@needs_prometheus
@pytest.mark.parametrize("name", ["rules.yml", "rules-ray.yml"])
def test_promtool_accepts_the_rules(name: str) -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", name)


@needs_prometheus
@pytest.mark.parametrize("name", ["single-node.yml", "ray-cluster.yml", "kuberay.yml"])
def test_promtool_accepts_the_configuration(name: str, tmp_path: Path) -> None:
    text = (MONITORING / name).read_text()
    # Debian builds Prometheus without Kubernetes; what it finds is given as a file instead, and
    # test_prometheus.py scrapes through the rest.
    text = text.replace(
        "kubernetes_sd_configs:\n  - role: pod", "file_sd_configs:\n  - files: [x.json]"
    )
    for rules in ("rules.yml", "rules-ray.yml"):
        (tmp_path / rules).write_text(GENERATED[f"prometheus/{rules}"])
    (tmp_path / name).write_text(text)
    assert "valid prometheus config" in promtool("check", "config", tmp_path / name)


# --- dashboard: the JSON model of Grafana's documentation ----------------------------------------


def test_the_dashboard_has_what_grafana_asks_for() -> None:
    assert DASHBOARD["uid"] == "shapeserve"
    assert DASHBOARD["schemaVersion"] >= 36  # Grafana 10 migrates older ones
    assert {"title", "panels", "templating", "time", "timezone", "editable"} <= DASHBOARD.keys()
    assert "id" not in DASHBOARD  # of one server's database


def test_panels_have_their_own_ids_and_places() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    assert all(p["x"] >= 0 and p["x"] + p["w"] <= 24 for p in places)
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda p: p["title"])
def test_a_panel_is_complete(panel: dict[str, Any]) -> None:
    assert panel["type"] in ("timeseries", "stat", "bargauge", "heatmap")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["overrides"] == []
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    refs = [target["refId"] for target in panel["targets"]]
    assert refs == [*"ABCDEF"][: len(refs)]
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert target["expr"]
        assert target["instant"] != target["range"]
    assert (panel["type"] == "heatmap") == (panel["targets"][0]["format"] == "heatmap")


def test_every_variable_that_is_used_is_declared() -> None:
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-zA-Z]\w*)", json.dumps(DASHBOARD["panels"])))
    assert used == set(variables)
    assert {"datasource", "model", "rate"} <= used
    assert [o["value"] for o in variables["prefix"]["options"]] == [
        v.prefix for v in FORMS.values()
    ]


def test_a_legend_names_only_labels_that_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = set(re.split(r"[ ,]+", ",".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
            assert named <= kept, panel["title"]


def test_provisioning_reads_the_dashboard() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "shapeserve.yml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file"
    assert provider["options"]["path"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
