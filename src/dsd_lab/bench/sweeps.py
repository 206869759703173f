# SPDX-License-Identifier: Apache-2.0
"""What `dsd-lab bench modes` compares: modes with settings of their own, and sweeps over settings.

ar,dsd,fsd                                          modes, by comma or space
fsd:predraft_source=exits+predraft_workers=10       a mode with settings
gamma=1..10    predraft_workers=1,3,6    client_queue=priority,fifo      sweeps; several are crossed
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsd_lab.bench.queues import SETTINGS as QUEUES
from dsd_lab.report import BenchError
from dsd_ros.decoding.modes import Shape, mode
from dsd_ros.decoding.settings import DecodeSettings

MAX_VARIANTS = 200
ALIASES = {"gamma": "draft_length"}
# These hold for a whole run: all modes must decode the same reply.
COMMON = ("temperature", "top_k", "top_p", "seed", "max_tokens")
_FIELDS = {item.name: item for item in dataclasses.fields(DecodeSettings)}
_OF_A_MODE = (*(name for name in _FIELDS if name != "mode" and name not in COMMON), *QUEUES)
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


@dataclass(frozen=True)
class Variant:
    """One mode with its settings. ``own``: the settings that set it apart from the other variants."""

    decode: DecodeSettings
    own: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The mode and what sets it apart, as ``--modes`` takes it."""
        settings = "+".join(f"{key}={value}" for key, value in self.own)
        return self.decode.mode + (f":{settings}" if settings else "")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that matter to its mode."""
        own = {name: dict(self.own).get(name, "priority") for name in QUEUES if matters(name, self.decode)}
        fields = {name: getattr(self.decode, name) for name in _FIELDS if name in _OF_A_MODE}
        return {name: value for name, value in fields.items() if matters(name, self.decode)} | own


def matters(name: str, decode: DecodeSettings) -> bool:
    """Whether the setting changes how this mode works."""
    truncated = decode.proven_by.declared.truncates
    rules = {
        **dict.fromkeys(COMMON, True),
        "draft_length": not decode.preset.streams and decode.shaped_by is not Shape.EXPANSION,
        **dict.fromkeys(("shape", "proof"), not decode.preset.streams),
        "tree_expansion": decode.shaped_by is Shape.EXPANSION,
        "tree_budget": decode.shaped_by is Shape.BUDGET,
        **dict.fromkeys(("top_k_proof", "top_rho_proof", "top_float_proof"), truncated),
    }
    return rules.get(name, decode.predrafts)


def parse_modes(text: str, common: Mapping[str, Any], gamma: int | None = None) -> list[Variant]:
    """Variants of ``--modes`` from ``common`` settings; ``gamma``: draft length where none is given. ValueErrors."""
    variants = []
    # A comma inside a value, as in exit_layers=2,4, is followed by a digit; the name of a mode never is.
    for part in re.split(r"[,\s]+(?=[A-Za-z])", text.strip(" ,\t\n")):
        name, _, rest = part.partition(":")
        own: dict[str, Any] = {}
        for setting in filter(None, rest.split("+")):
            key, equals, value = setting.partition("=")
            if not equals:
                raise BenchError(f"{setting!r} in {part!r} is no setting; use name=value")
            key = _setting(key, part)
            own[key] = parse_value(key, value)
        rounds = gamma is not None and not mode(name).streams
        variants.append(_variant(name, {"draft_length": gamma, **common} if rounds else common, own))
    return _distinct(variants)


def one_mode(text: str, common: Mapping[str, Any], gamma: int | None = None) -> Variant:
    """The only variant of ``--mode``; ValueErrors."""
    variants = parse_modes(text, common, gamma)
    if len(variants) != 1:
        raise BenchError(f"--mode {text} names several modes; measure one at a time")
    return variants[0]


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """``name=A..B`` or ``name=V,V,...`` as (setting, values); BenchError."""
    key, equals, values = text.partition("=")
    if not equals or not values.strip(" ,"):
        raise BenchError(f"{text!r} is no sweep; use gamma=1..10 or predraft_workers=1,3,6")
    key = _setting(key, text)
    found = _RANGE.fullmatch(values.strip())
    if found:
        first, last = int(found.group(1)), int(found.group(2))
        if first > last:
            raise BenchError(f"the sweep {text!r} is empty; give the smaller end first")
        if last - first >= MAX_VARIANTS:
            raise BenchError(f"the sweep {text!r} has over {MAX_VARIANTS} values; use fewer")
        return key, [parse_value(key, str(value)) for value in range(first, last + 1)]
    return key, list(dict.fromkeys(parse_value(key, value.strip()) for value in values.split(",") if value.strip()))


def crossed(variants: Sequence[Variant], sweeps: Sequence[tuple[str, Sequence[Any]]]) -> list[Variant]:
    """Every variant at every point of the crossed sweeps that matter to it; BenchError for a useless sweep."""
    names = [name for name, _ in sweeps]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BenchError(f"{twice[0]} is swept twice; give all its values in one --sweep")
    swept: set[str] = set()
    out = []
    for variant in variants:
        own = dict(variant.own)
        mine = [(n, v) for n, v in sweeps if matters(n, variant.decode) and n not in own]
        swept |= {name for name, _ in mine}
        for point in itertools.product(*(values for _, values in mine)):
            changed = dict(zip((name for name, _ in mine), point, strict=True))
            decode = dataclasses.replace(variant.decode, **_fields(changed))
            out.append(Variant(decode, (*variant.own, *changed.items())))
            if len(out) > MAX_VARIANTS:
                raise BenchError(f"the sweeps make over {MAX_VARIANTS} combinations; use fewer values")
    if useless := [name for name in names if name not in swept]:
        raise BenchError(f"no mode here makes use of {useless[0]}; sweep it with a mode that does, as fsd")
    return _distinct(out)


def parse_value(name: str, text: str) -> Any:
    """A decode setting's value from text, of its type; BenchError. Its range is not checked here."""
    if name in QUEUES:
        if text not in QUEUES[name]:
            raise BenchError(f"{name} is {text!r}; use {', '.join(QUEUES[name])}")
        return text
    kind = typing.get_type_hints(DecodeSettings)[name]
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise BenchError(f"{name} is {text!r}; give {what}") from None


def _fields(own: Mapping[str, Any]) -> dict[str, Any]:
    """What of a variant's own settings is the product's."""
    return {name: value for name, value in own.items() if name in _FIELDS}


def _setting(name: str, where: str) -> str:
    name = name.strip().replace("-", "_")
    name = ALIASES.get(name, name)
    if name in COMMON:
        flag = "--" + name.replace("_", "-")
        raise BenchError(f"{name} holds for all modes of a run; give it as {flag}, not in {where!r}")
    if name not in _OF_A_MODE:
        raise BenchError(f"unknown setting {name!r} in {where!r}; use {', '.join(_OF_A_MODE)}")
    return name


def _variant(name: str, common: Mapping[str, Any], own: Mapping[str, Any]) -> Variant:
    decode = DecodeSettings(mode=name, **{**common, **_fields(own)})
    for key in own:
        if not matters(key, decode):
            raise BenchError(f"mode {name} makes no use of {key}; leave it out")
    return Variant(decode, tuple(own.items()))


def _distinct(variants: Sequence[Variant]) -> list[Variant]:
    seen: set[str] = set()
    for variant in variants:
        if variant.label in seen:
            raise BenchError(f"{variant.label} is there twice; name each mode once")
        seen.add(variant.label)
    return list(variants)
