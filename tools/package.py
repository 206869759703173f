#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds dist/dsd_ros-VERSION.tar.gz and the wheel, the same bytes from the same commit; installs the wheel to try it.

    make package                          # both, then `dsd decode` in an empty environment, with what pip gets
    python tools/package.py DIST          # both into the folder DIST; nothing is installed

Only files that git tracks go in, with one date (SOURCE_DATE_EPOCH, or the commit's) and one owner. The wheel is made of
the source distribution, so that a file missing from that shows.
"""

import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRY = ["decode", "--instruction", "find the silver bottle", "--image", "docs/images/view.png"]


def git(*words):
    command = [shutil.which("git") or "git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def export(folder):
    """Copy what git tracks, as it is in the checkout, into ``folder``."""
    for name in git("ls-files").splitlines():
        path, copy = ROOT / name, folder / name
        if path.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            copy.chmod(0o755 if os.access(path, os.X_OK) else 0o644)


def build(what, source, dist, epoch):
    """Have setuptools, of the Python that runs this, build an "sdist" or "wheel" of ``source``; returns its path."""
    code = f"import sys; from setuptools.build_meta import build_{what} as build; print(build(sys.argv[1]))"
    given = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", code, str(dist)]
    done = subprocess.run(command, cwd=source, env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"package: the {what} could not be built:\n{done.stderr[-2000:]}")
    return dist / done.stdout.splitlines()[-1]


def normalize(path, epoch):
    """Rewrite a source distribution with one date and owner, its members in order."""
    with tarfile.open(path) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = [archive.extractfile(each).read() if each.isfile() else None for each in members]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in zip(members, contents, strict=True):
            fresh = tarfile.TarInfo(member.name)
            fresh.type, fresh.mtime, fresh.mode = member.type, epoch, 0o755 if member.mode & 0o100 else 0o644
            fresh.size = len(content or b"")
            archive.addfile(fresh, None if content is None else io.BytesIO(content))
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))


def package(dist):
    """Build both into ``dist``; returns (source distribution, wheel)."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"))
    dist.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        export(checkout)
        source = build("sdist", checkout, dist, epoch)
        normalize(source, epoch)
        shutil.unpack_archive(source, folder)
        wheel = build("wheel", Path(folder, source.name.removesuffix(".tar.gz")), dist, epoch)
    return source, wheel


def try_out(wheel):
    """Install the wheel with the locked requirements into an empty environment, and decode one reply there."""
    lock = ROOT / "requirements" / "lock.txt"
    torch = re.search(r"^torch==([^\s;\\]+)", lock.read_text(), re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--require-hashes", "-r", lock.with_name("pip.txt")], check=True)
        # PyTorch's CPU wheel where pip's configuration names a folder that has it, as in `make setup`.
        subprocess.run(
            [*pip, "--require-hashes", "--no-index", "--no-deps", "-c", lock, f"torch=={torch}+cpu"], check=False
        )
        subprocess.run([*pip, "--require-hashes", "-r", lock.with_name("cloud.txt")], check=True)
        subprocess.run([*pip, "--no-index", f"{wheel}[cloud]"], check=True)  # which has all that it asks for
        given = {"PATH": os.environ["PATH"], "HOME": folder}
        subprocess.run([f"{folder}/bin/dsd", *TRY], check=True, cwd=ROOT, env=given)


def main():
    dist = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "dist"
    source, wheel = package(dist)
    print(source, wheel, sep="\n")
    if not sys.argv[1:]:
        try_out(wheel)


if __name__ == "__main__":
    main()
