# SPDX-License-Identifier: Apache-2.0
"""Start-up without Python's cycle collector, which only costs time there."""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType


def quick_import(module: str) -> ModuleType:
    """As `importlib.import_module`, without the cycle collector at a first import.

    torch and transformers create 400 000 objects that last as long as the process. The collector finds nothing in
    them, but searches them again and again: 0.8 s of the 4.7 s to a loaded model, and 0.3 s for every full collection
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
