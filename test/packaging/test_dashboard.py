# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts use metrics and labels that a verifier has, in valid PromQL."""

from __future__ import annotations

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from every import every
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.metrics import DROPPED
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.wire.messages import RefusalCode

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "deploy/grafana/verifier.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy/grafana/alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    **{f"{p['title']}: {t['refId']}": t["expr"] for p in PANELS for t in p["targets"]},
    **{rule["alert"]: rule["expr"] for rule in RULES},
}
FROM_PROMETHEUS = {"job", "instance", "le"}


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Name of every sample -> the labels it has, beside those that Prometheus adds."""
    found: dict[str, set[str]] = {"up": set()}
    with VerifierEngine(TableModel(1)) as engine:
        engine.metrics.name_robots(["go2-01"])
        for family in engine.metrics.registry.collect():
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


@every(QUERIES)
def test_every_query_names_metrics_and_labels_that_exist(name, series):
    query = QUERIES[name].replace("$__rate_interval", "1m")
    promql_parser.parse(query)  # ValueError when Prometheus would not take it
    selectors = re.findall(r"([a-z_]+)(?:\{([^}]*)\})?", re.sub(r'"[^"]*"', '""', query))
    asked = {metric: body for metric, body in selectors if metric in series}
    assert asked, query
    assert set(re.findall(r"(?:dsd|process)_\w+|\bup\b", query)) == asked.keys()
    labels = set().union(*(series[metric] for metric in asked)) | FROM_PROMETHEUS
    for _, body in selectors:
        assert set(re.findall(r"(\w+)\s*[=!]", body)) <= labels
    for group in re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", query):
        assert {label.strip() for label in group.split(",")} <= labels


def test_values_of_labels_are_those_there_are():
    codes, modes = {code.value for code in RefusalCode}, set(PRESETS)
    for query in QUERIES.values():
        for label, operator, value in re.findall(r'(\w+)(=~|!~|=|!=)"([^"]*)"', query):
            known = {"code": codes, "mode": modes, "reason": {"token", "full", *DROPPED}}.get(label)
            for word in value.split("|") if known else ():
                assert any(re.fullmatch(word, one) for one in known), (label, operator, word)


def test_counters_are_asked_for_their_rate():
    for name, query in QUERIES.items():
        for counter in re.findall(r"\w+_total|\w+_bucket|\w+_sum\b", query):
            assert re.search(rf"rate\({counter}\b", query), name


def test_every_metric_is_on_the_dashboard(series):
    shown = " ".join(QUERIES.values())
    for name in series:
        if name.startswith("dsd_verifier_"):
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            assert family in shown, name


def test_panels_and_alerts_explain_themselves_and_panels_do_not_overlap():
    taken = set()
    for panel in BOARD["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + i, grid["y"] + j) for i in range(grid["w"]) for j in range(grid["h"])}
        assert not cells & taken and 0 <= grid["x"] <= 24 - grid["w"], panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["description"].endswith(".")
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):  # one that the query keeps
                kept = ",".join(re.findall(r"by \(([^)]*)\)", target["expr"])).replace(" ", "")
                bare = not re.search(r"\b(sum|avg|max)\b", target["expr"]) and label == "instance"
                assert bare or label in kept.split(","), panel["title"]
    for rule in RULES:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["annotations"].keys() == {"summary", "description"}
