# SPDX-License-Identifier: Apache-2.0
"""One test of a rule about many things, which names each of them that breaks it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def every(values: Iterable[Any], label: Callable[[Any], str] = str) -> Callable[[Callable[..., None]], Any]:
    """Where ``pytest.mark.parametrize`` makes a test of each value, this makes one test of them all.

    The test's first parameter is the value, all others are fixtures. ``label`` names a value in the report.
    """
    cases = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        _, *fixtures = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def of_all(**given: Any) -> None:
            failures = []
            for value in cases:
                try:
                    test(value, **given)
                except Exception as error:
                    failures.append(f"{label(value)}: {error or type(error).__name__}")
            assert cases, "there is nothing to test"
            assert not failures, f"{len(failures)} of {len(cases)} fail:\n" + "\n".join(failures)

        of_all.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return of_all

    return decorate
