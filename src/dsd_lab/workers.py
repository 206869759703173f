# SPDX-License-Identifier: Apache-2.0
"""How the process of a pool begins: so that it never outlives who made the pool."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process


def begin_worker(heed_signals: bool = True) -> None:
    """A pool's ``initializer``: the process ends with its maker, and on Ctrl-C only if it is to ``heed_signals``."""
    if heed_signals:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
