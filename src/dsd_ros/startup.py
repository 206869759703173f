# SPDX-License-Identifier: Apache-2.0
"""Start-up without Python's cycle collector, which only costs time there, and without what nothing here uses."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any


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


def import_transformers() -> None:
    """Import what the models of transformers share, without 0.8 of the 3.9 s of processor time to a loaded model.

    That time goes into torch's compiler, for decorators of kernels and of a scheduler that nothing here uses; into
    scipy, for losses of object detection; and into distributed tensors. The compiler is loaded when something asks for
    it. transformers is told that there is neither scipy nor torch.distributed, for as long as the process lasts.
    """
    if "transformers.modeling_utils" in sys.modules:
        return  # another program's, which may use all of it
    same = dict.fromkeys(("disable", "assume_constant_result", "allow_in_graph"), _unchanged)
    import_later("torch._dynamo", "_trace_wrapped_higher_order_op", **same)
    utils = quick_import("transformers.utils")
    for name in ("is_scipy_available", "is_torch_distributed_available"):
        for module in (utils, importlib.import_module("transformers.utils.import_utils")):
            if hasattr(module, name):
                setattr(module, name, lambda: False)
    quick_import("transformers.modeling_utils")


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if callable(function) else lambda decorated: decorated


def import_later(name: str, *now: str, **until_then: Any) -> None:
    """Have a package run when another attribute or module of it is first asked for.

    :param now: its modules to import at once; the package must not run for them.
    :param until_then: attributes that it has until it runs.
    """
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _Later
    vars(package).update(until_then)
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)
    for module in now:
        importlib.import_module(f"{name}.{module}")
    del package.__path__  # so that the import of any other module asks for it


class _Later(ModuleType):
    """A package that has not run yet. importlib's LazyLoader would run it for each of its modules."""

    _lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            spec = self.__spec__
            assert spec is not None and spec.loader is not None
            if type(self) is not _Later:  # another thread was first
                return getattr(self, name)
            if "__path__" in vars(self):
                raise AttributeError(f"the package {self.__name__} has no {name} yet")
            self.__path__ = list(spec.submodule_search_locations or ())
            try:
                spec.loader.exec_module(self)
            except BaseException:
                del self.__path__
                raise
            self.__class__ = ModuleType  # type: ignore[assignment]
            return getattr(self, name)
