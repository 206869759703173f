"""Calls of a robot's services: requests that are told apart by their identity, and the answers to them."""

from __future__ import annotations

import random
import threading
from typing import Protocol

from dsd_ros.robot.driver import Cause, DriverError, Fault
from dsd_ros.robot.go2.protocol import Code, Request, Response


class Link(Protocol):
    """Carries requests to the robot's services; answers and state are handed to the driver's ``on_`` methods."""

    def send(self, service: str, request: Request) -> bool:
        """Send without waiting. False when nobody listens to the service."""


class Calls:
    """Asks over a link and waits for answers, which another thread hands in. Thread-safe."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._changed = threading.Condition()
        # Answers reach every client of a service, so identities must not meet those of another one.
        self._identity = random.SystemRandom().getrandbits(60)
        self._waiting: dict[tuple[str, int], list[Response]] = {}
        self._closed = False

    def new_identity(self) -> int:
        with self._changed:
            self._identity += 1
            return self._identity

    def tell(self, service: str, api: int, parameter: str) -> None:
        """Send and care for no answer."""
        self._link.send(service, Request(self.new_identity(), int(api), parameter))

    def ask(self, service: str, api: int, parameter: str, timeout: float, attempts: int) -> Response:
        """Send and wait, up to ``attempts`` times ``timeout`` seconds; the first answer to any of them counts.

        :raises DriverError: NO_SERVICE, NO_ANSWER or CLOSED.
        """
        answers: list[Response] = []
        mine: list[tuple[str, int]] = []
        heard = False
        try:
            for _ in range(attempts):
                identity = self.new_identity()
                with self._changed:
                    mine.append((service, identity))
                    self._waiting[mine[-1]] = answers
                heard |= self._link.send(service, Request(identity, int(api), parameter))
                with self._changed:
                    self._changed.wait_for(lambda: answers or self._closed, timeout)
                    matching = [answer for answer in answers if answer.api_id == api]
                    if matching:
                        return matching[0]
                    if self._closed:
                        raise DriverError(Fault(Cause.CLOSED))
            cause = Cause.NO_ANSWER if heard else Cause.NO_SERVICE
            detail = f"It was asked {attempts} times: {service}, function {int(api)}."
            raise DriverError(Fault(cause, detail, Code.NO_ANSWER if heard else Code.SEND_FAILED))
        finally:
            with self._changed:
                for key in mine:
                    self._waiting.pop(key, None)

    def on_response(self, service: str, response: Response) -> None:
        with self._changed:
            answers = self._waiting.get((service, response.identity))
            if answers is not None:
                answers.append(response)
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
