# SPDX-License-Identifier: Apache-2.0
"""The vendor's SDK as a link: a process that talks to the robot, connected by lines of JSON.

Confirmation and retransmission stay in :class:`dsd_ros.robot.go2.driver.Go2Driver`.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from dsd_ros.robot.go2 import sdk_process
from dsd_ros.robot.go2.protocol import ServiceRequest, ServiceResponse

_ATOMIC_BYTES = 4000  # below the pipe's atomic size, a line is written completely or not at all


class SdkError(RuntimeError):
    """The SDK's process cannot work; one sentence."""


class SdkLink:
    """Starts the process and waits until it is ready. End it with :meth:`close`.

    :param python: of the environment with ``unitree_sdk2py``; empty: this one.
    :param interface: network interface to the robot; empty: the SDK chooses.
    :param program: the program to run; for tests.
    :raises SdkError: when the process cannot work, with its own reason.
    """

    def __init__(
        self,
        python: str = "",
        interface: str = "",
        domain: int = 0,
        program: Path | None = None,
        start_timeout: float = 30.0,
    ) -> None:
        self.on_arrival: Callable[[], None] = lambda: None  # called after every state
        self.on_end: Callable[[str], None] = lambda _: None  # called with a sentence if the process ends by itself
        self.versions: dict[str, str] = {}
        self._driver: Any = None
        self._ready = threading.Event()
        self._error = ""
        self._closing = False
        path = program or Path(sdk_process.__file__)
        command = [python or sys.executable, "-u", str(path), str(domain), interface]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError as error:
            raise SdkError(f"The SDK's process cannot be started with {command[0]}: {error}") from error
        assert self._process.stdin is not None
        self._input = self._process.stdin.fileno()
        os.set_blocking(self._input, False)  # a hanging process must not block this one
        self._reader = threading.Thread(target=self._read, name="sdk link", daemon=True)
        self._reader.start()
        if not self._ready.wait(start_timeout):
            self._error = f"The SDK's process is not ready after {start_timeout:.0f} s."
        if self._error:
            self.close()
            raise SdkError(self._error)

    def attach(self, driver: Any) -> None:
        """Pass answers, state and battery to a driver from now on."""
        self._driver = driver

    def send(self, service: str, request: ServiceRequest) -> bool:
        line = json.dumps([service, *astuple(request)]).encode() + b"\n"
        if self._closing or self._process.poll() is not None or len(line) > _ATOMIC_BYTES:
            return False
        try:
            os.write(self._input, line)
        except OSError:  # the pipe is full or closed
            return False
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    self._take(json.loads(line))
                except (ValueError, TypeError, AttributeError):
                    continue  # not a line of the protocol
        code = self._process.wait()
        if not self._ready.is_set():
            self._error = self._error or f"The SDK's process ended at once, with exit code {code}."
            self._ready.set()
        elif not self._closing:
            self.on_end(f"The SDK's process ended with exit code {code}.")

    def _take(self, message: dict[str, Any]) -> None:
        if "error" in message:
            self._error = f"The SDK's process cannot work. {message['error']}"
            self._ready.set()
        elif "ready" in message:
            self.versions = dict(message["ready"])
            self._ready.set()
        elif self._driver is None:
            return
        elif "state" in message:
            self._driver.on_state(base64.b64decode(message["state"], validate=True))
            self.on_arrival()
        elif "battery" in message:
            self._driver.on_battery(float(message["battery"]))
        elif "response" in message:
            service, identity, api_id, code, data, encoded = message["response"]
            binary = base64.b64decode(encoded, validate=True)
            self._driver.on_response(service, ServiceResponse(identity, api_id, code, data, binary))

    def close(self, timeout: float = 0.3) -> None:
        """End the process, which stops the robot first. May be called twice."""
        if self._closing:
            return
        self._closing = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=timeout)
