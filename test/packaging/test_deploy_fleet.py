# SPDX-License-Identifier: Apache-2.0
"""deploy/fleet: every option, port, secret and metric that the files name exists, and times fit into each other."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml
from every import every
from table_model import TableModel

from dsd_ros.cli.verifier import VerifierArguments
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import VerifierSettings

ROOT = Path(__file__).resolve().parents[2]
FLEET = ROOT / "deploy" / "fleet"
COMPOSE = yaml.safe_load((FLEET / "compose.yaml").read_text())
MANIFESTS = {one["kind"]: one for one in yaml.safe_load_all((FLEET / "kubernetes.yaml").read_text())}
KEDA = yaml.safe_load((FLEET / "keda.yaml").read_text())
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
PROXY = [line.partition("#")[0].split() for line in (FLEET / "haproxy.cfg").read_text().splitlines()]
VERIFIERS = {name: service for name, service in COMPOSE["services"].items() if name != "balancer"}


def settings(options: list[str]) -> tuple[VerifierSettings, dict[str, str]]:
    """A verifier's settings by its command line, which must be one that `dsd verifier` takes; and all options."""
    given = dict(option.removeprefix("--").split("=", 1) for option in options)
    known = {name.replace("_", "-"): field for name, field in VerifierSettings.__dataclass_fields__.items()}
    own = VerifierArguments.__dataclass_fields__
    assert set(given) <= set(known) | {name.replace("_", "-") for name in own}
    values = {k.replace("-", "_"): type(known[k].default)(v) for k, v in given.items() if k in known}
    return VerifierSettings(host="0.0.0.0", **values), given


@every([*(s["command"] for s in VERIFIERS.values()), CONTAINER["args"]])
def test_the_verifiers_options_exist_and_protect(options):
    ours, _ = settings(options)
    assert ours.tokens_file and ours.certificate and ours.key and not ours.allow_unauthenticated


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_a_verifier_has_the_time_that_it_drains():
    for service in VERIFIERS.values():
        assert seconds(service["stop_grace_period"]) > settings(service["command"])[0].drain_s
    before = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > before + settings(CONTAINER["args"])[0].drain_s


def test_compose_gives_each_verifier_its_gpu_and_the_secrets_that_it_names():
    devices = []
    for service in VERIFIERS.values():
        ours, given = settings(service["command"])
        secrets = {f"/run/secrets/{name}" for name in service["secrets"]}
        assert {ours.tokens_file, ours.certificate, ours.key} == secrets
        assert set(service["secrets"]) == set(COMPOSE["secrets"])
        assert given["model"].startswith(service["volumes"][0].split(":")[-2] + "/")
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        devices += device["device_ids"]
    assert len(devices) == len(set(devices)) == len(VERIFIERS) >= 2
    assert set(COMPOSE["services"]["balancer"]["depends_on"]) == set(VERIFIERS)
    source = COMPOSE["services"]["balancer"]["volumes"][0].split(":")[0]
    assert (FLEET / source).is_file()


def test_the_balancer_is_layer_4_with_least_connections_and_knows_every_verifier():
    assert ["mode", "tcp"] in PROXY and ["balance", "leastconn"] in PROXY
    servers = [line[1:] for line in PROXY if line[:1] == ["server"]]
    assert servers == [[name, f"{name}:{VerifierSettings.port}"] for name in VERIFIERS]
    (bind,) = [line[1] for line in PROXY if line[:1] == ["bind"]]
    assert COMPOSE["services"]["balancer"]["ports"] == [f"{bind[1:]}:{bind[1:]}"]
    (check,) = [line for line in PROXY if line[:1] == ["default-server"]]
    assert check[check.index("port") + 1] == str(settings(next(iter(VERIFIERS.values()))["command"])[0].metrics_port)
    send = ["http-check", "send", "meth", "GET", "uri", "/readyz", "ver", "HTTP/1.1", "hdr", "Host", "verifier"]
    assert ["option", "httpchk"] in PROXY and send in PROXY  # the verifier does not speak HTTP/1.0, HAProxy's default
    assert "on-marked-down" not in [word for line in PROXY for word in line]  # a full verifier keeps its robots
    # Silence that a robot's and a verifier's pings cannot break is shorter than the proxy's.
    timeouts = {line[1]: seconds(line[2]) for line in PROXY if line[:1] == ["timeout"]}
    assert timeouts["client"] == timeouts["server"] >= 30


def test_haproxy_finds_nothing_wrong(tmp_path):
    haproxy = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if haproxy is None:
        pytest.skip("HAProxy is not installed")
    done = subprocess.run([haproxy, "-c", "-f", FLEET / "haproxy.cfg"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_manifests_name_what_is_there():
    ours, given = settings(CONTAINER["args"])
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"robots": VerifierSettings.port, "metrics": ours.metrics_port}
    label = MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"]
    for selector in (
        MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"],
        MANIFESTS["Service"]["spec"]["selector"],
        MANIFESTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector == label
    (port,) = MANIFESTS["Service"]["spec"]["ports"]
    assert port["targetPort"] == "robots" and "sessionAffinity" not in MANIFESTS["Service"]["spec"]
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert set(volumes) == set(mounts)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]
    paths = [ours.tokens_file, ours.certificate, ours.key, given["model"]]
    assert [Path(path).parent.as_posix() for path in paths] == [mounts[n] for n in ("tokens", "tls", "tls", "models")]
    head = (FLEET / "kubernetes.yaml").read_text()
    for volume in ("tokens", "tls"):
        assert re.search(rf"kubectl create secret \w+ {volumes[volume]['secret']['secretName']} ", head)
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_probes_ask_what_the_verifier_answers():
    asked = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in asked.values()} == {"metrics"}
    assert asked["readiness"]["path"] == "/readyz"
    # A full or draining verifier is alive: liveness must not ask whether it takes robots.
    assert asked["startup"]["path"] == asked["liveness"]["path"] == "/healthz"
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300  # a large model is read


def test_the_fleet_grows_with_the_wait():
    spec = KEDA["spec"]
    assert spec["scaleTargetRef"]["name"] == MANIFESTS["Deployment"]["metadata"]["name"]
    assert spec["minReplicaCount"] >= 2
    (trigger,) = spec["triggers"]
    query = trigger["metadata"]["query"]
    promql_parser.parse(query)
    with VerifierEngine(TableModel(1)) as engine:
        names = {sample.name for family in engine.metrics.registry.collect() for sample in family.samples}
    assert set(re.findall(r"dsd_\w+", query)) <= names and "queue_wait_seconds" in query
    assert float(trigger["metadata"]["threshold"]) > 0 and trigger["metricType"] == "Value"


def test_pages_say_where_the_files_are():
    page = (ROOT / "docs" / "operations.md").read_text()
    for path in [*FLEET.iterdir(), ROOT / "deploy" / "ray_serve.py"]:
        assert f"deploy/{path.relative_to(ROOT / 'deploy')}" in page, path
