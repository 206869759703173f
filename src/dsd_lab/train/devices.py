"""The device a training runs on: autocast there, batches drawn ahead of it, pictures kept on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

CPU = torch.device("cpu")
_AHEAD = 6  # batches drawn before a GPU asks for them
_PINNED_BYTES = 1 << 26
_DRAWERS = 3  # threads; numpy and tokenizers let go of Python's lock


class Movable(Protocol):
    """A batch of tensors on the host that can be moved as one."""

    def to(self, device: torch.device) -> Any: ...


B = TypeVar("B", bound=Movable)


def torch_device(name: str) -> torch.device:
    """The device called cpu, cuda or cuda:N; ValueError where this machine has none such."""
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(
                f"The device {name} is not there ({count} GPUs are): name another one, or train with --device cpu."
            )
        device = torch.device("cuda", device.index or 0)
    return device


def autocast(device: torch.device) -> Any:
    """bfloat16 where it is safe, on the device; float32 on a CPU without instructions for it, 50 times slower at it."""
    quick = device.type != "cpu" or any(there for name, there in torch.cpu.get_capabilities().items() if "bf16" in name)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=quick)


def moved(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """An array or a tensor of the host's on the device; a GPU is not waited for."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    small = tensor.numel() * tensor.element_size() <= _PINNED_BYTES
    if device.type == "cuda" and small and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Feeder:
    """Gives a stage its batches: drawn when asked for on a CPU, by threads and ahead for a GPU.

    ``draw(step, share)`` must give equal batches for equal arguments; ``share_of(step)`` foretells
    the share of the training done by a step, as far as that can be known.
    """

    def __init__(
        self,
        draw: Callable[[int, float], B],
        share_of: Callable[[int], float],
        device: torch.device,
        ahead: int | None = None,
    ) -> None:
        self._draw, self._share_of, self._device = draw, share_of, device
        self._ahead = (0 if device.type == "cpu" else _AHEAD) if ahead is None else ahead
        self._pool = ThreadPoolExecutor(_DRAWERS, "draw") if self._ahead else None
        self._waiting: deque[tuple[int, Future[Any]]] = deque()

    def batch(self, step: int) -> Any:
        """The batch of a step, on the device; steps are asked for one behind the other."""
        if self._pool is None:
            return self._draw(step, self._share_of(step)).to(self._device)
        following = self._waiting[-1][0] + 1 if self._waiting else step
        for later in range(following, step + self._ahead):
            work = self._pool.submit(self._draw, later, self._share_of(later))
            self._waiting.append((later, work))
        drawn, work = self._waiting.popleft()
        if drawn != step:
            raise ValueError(f"Step {step} was asked for when {drawn} was next.")
        return work.result().to(self._device)

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
