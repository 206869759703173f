# SPDX-License-Identifier: Apache-2.0
"""Writes a bill of materials (CycloneDX 1.6, JSON): the packages of requirements/lock*.txt and the shipped models.

    python tools/sbom.py sbom.cdx.json      # or make sbom

A package's hashes are those of all its files, since which one is installed depends on the machine. The same tree gives
the same bytes: there is no date and no serial number in it.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)


def packages(lock):
    """(name, version, SHA-256 of each file) of each entry of a lock."""
    for entry in re.split(r"\n(?=\S)", lock):
        if found := PACKAGE.match(entry):
            yield found[1], found[2], re.findall(r"--hash=sha256:(\w+)", entry)


def library(name, version, hashes):
    """A package of PyPI as a component."""
    url = f"https://pypi.org/project/{name}/{version}/"
    files = [{"alg": "SHA-256", "content": value} for value in hashes]
    reference = f"pkg:pypi/{name}@{version}"
    return {
        "type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference,
        "externalReferences": [{"type": "distribution", "url": url, "hashes": files}],
    }  # fmt: skip


def model(path):
    """A file of shipped weights as a component."""
    name = path.relative_to(ROOT).as_posix()
    value = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "type": "machine-learning-model", "bom-ref": name, "name": name,
        "hashes": [{"alg": "SHA-256", "content": value}],
    }  # fmt: skip


def bill():
    """The whole document."""
    version = re.search(r"<version>([^<]+)", (ROOT / "package.xml").read_text())[1]
    locks = (path.read_text() for path in sorted((ROOT / "requirements").glob("lock*.txt")))
    libraries = {
        (name, version): library(name, version, hashes) for lock in locks for name, version, hashes in packages(lock)
    }
    models = [model(path) for path in sorted((ROOT / "models").rglob("*.safetensors"))]
    product = {
        "type": "application", "bom-ref": "dsd_ros", "name": "dsd_ros", "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }  # fmt: skip
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": product},
        "components": [*libraries.values(), *models],
    }  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/sbom.py FILE")
    Path(sys.argv[1]).write_text(json.dumps(bill(), indent=1) + "\n")
