# SPDX-License-Identifier: Apache-2.0
"""The papers' formulas by name, evaluated for numbers that are given as text."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from dsd_lab.papers import acceptance, dragon_schedules, dragon_simulator, proofs, theory
from dsd_lab.papers.theory import TheoryError
from dsd_ros.dragon import scheduler


def api_cost(
    *, draft_in: float, draft_out: float, target_in: float, target_out: float, gamma: int = 4, tau: float = 2.5,
    requests: float = 1e6, input_tokens: float = 100, output_tokens: float = 500,
) -> theory.ApiCost:  # fmt: skip
    """Dollars for all requests (FSD Table 1), of prices for a million tokens that a model reads (in) and writes."""
    prices = theory.Prices("given", draft_in, draft_out, target_in, target_out)
    shape = {"requests": requests, "input_tokens": input_tokens, "output_tokens": output_tokens}
    return theory.api_cost(prices, gamma=gamma, tau=tau, **shape)


_OF_NUMBERS: tuple[Callable[..., Any], ...] = (
    theory.predict, theory.ar_seconds, theory.sd_seconds, theory.fsd_seconds, theory.limit_seconds,
    theory.sequence_limit, theory.fsd_speedup, api_cost, theory.expected_tokens, theory.acceptance_of,
    proofs.accepted_tokens, proofs.nodes, proofs.distributions, proofs.distribution_seconds, proofs.dsd_comm_seconds,
    proofs.dssd_comm_seconds, proofs.round_seconds, proofs.speedup, proofs.payload,
    acceptance.truncation_bounds, acceptance.total_acceptance, acceptance.candidate_bounds, acceptance.coupled_bound,
    dragon_schedules.latency, scheduler.delta_z,
)  # fmt: skip
FORMULAS = {formula.__name__: formula for formula in _OF_NUMBERS} | {"dragon_speedup": dragon_simulator.speedup}


def described(name: str) -> str:
    """A formula's arguments and the first line of its docstring."""
    formula = FORMULAS[name]
    parameters = inspect.signature(formula).parameters.values()
    taken = " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    return f"{name} {taken}: {(inspect.getdoc(formula) or '').splitlines()[0]}"


def evaluate(name: str, given: Sequence[str]) -> dict[str, Any]:
    """What a formula gives for words such as ``tau=2.5``, lists with commas, by name; TheoryError."""
    if name not in FORMULAS:
        raise TheoryError(f"there is no formula {name!r}; use one of {', '.join(FORMULAS)}")
    signature = inspect.signature(FORMULAS[name])
    values = {}
    for word in given:
        key, equals, text = word.partition("=")
        if not equals or key not in signature.parameters:
            raise TheoryError(
                f"{word!r} is no argument of {name}; give NAME=VALUE of {', '.join(signature.parameters)}"
            )
        values[key] = _value(key, text, str(signature.parameters[key].annotation))
    missing = [p.name for p in signature.parameters.values() if p.default is p.empty and p.name not in values]
    if missing:
        raise TheoryError(f"{name} needs {', '.join(missing)} as well; give each as NAME=VALUE")
    found = FORMULAS[name](**values)
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return dataclasses.asdict(found)
    return {name: found.tolist() if hasattr(found, "tolist") else found}


def _value(name: str, text: str, annotation: str) -> Any:
    """A text as the argument's type: a number, a list of them, or a word."""
    try:
        if annotation == "str":
            return text
        if annotation.startswith("Sequence"):
            kind = int if "int" in annotation else float
            return [kind(part) for part in text.split(",")]
        return int(text) if annotation.startswith("int") else float(text)
    except ValueError:
        raise TheoryError(f"{name} is {text!r}; give {annotation}, several values with commas") from None
