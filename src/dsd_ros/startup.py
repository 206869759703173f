# SPDX-License-Identifier: Apache-2.0
"""Start-up without Python's cycle collector, which only costs time there, and without scipy."""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType
from typing import Any


def quick_import(module: str) -> ModuleType:
    """As `importlib.import_module`, without the cycle collector at a first import.

    torch and transformers create 400 000 objects that last as long as the process. The collector finds nothing in
    them, but searches them again and again: 0.7 s of the 3.8 s to a loaded model, and 0.3 s for every full collection
    after that, while all threads wait. So they are exempt from later collections, too.
    """
    if module in sys.modules or not gc.isenabled():
        return importlib.import_module(module)
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def import_transformers() -> None:
    """Import what the models of transformers share, without scipy: 0.2 s for losses of object detection.

    transformers is told that there is none, for as long as the process lasts.
    """
    if "transformers.modeling_utils" in sys.modules:
        return  # another program's, which may use all of it
    utils: Any = quick_import("transformers.utils")
    utils.is_scipy_available = lambda: False
    quick_import("transformers.modeling_utils")
