# SPDX-License-Identifier: Apache-2.0
"""Lets torchvision of PyPI, which is built for CUDA, be imported beside a torch for CPUs.

tools/vllm_venv.py copies this into .venv-vllm, where a .pth file imports it at every start. torchvision registers what
two operators do for tracing, and their definitions are in its CUDA library: so they are defined here, just before it is
imported. Its transforms work; the operators themselves do not.
"""

import importlib.abc
import sys

_OPERATORS = ("nms", "qnms")
_SCHEMA = "{}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library(name, "FRAGMENT")
            for operator in _OPERATORS:
                self.library.define(_SCHEMA.format(operator))
            _kept.append(self)


_kept = []  # a library's definitions live as long as it does
sys.meta_path.insert(0, _BeforeTorchvision())
