# SPDX-License-Identifier: Apache-2.0
"""What a verifier reads from files, and reads again when it is told to: its certificate and its robots' tokens."""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import yaml

from dsd_ros.paths import secret_path, user_path
from dsd_ros.wire.authentication import Token
from dsd_ros.wire.channel import bearer, check_token, read_token
from dsd_ros.wire.messages import Question, SessionRequest

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class CredentialsError(ValueError):
    """A certificate, or a file of tokens, cannot be used; one sentence."""


class Certificate:
    """A TLS certificate and its key."""

    def __init__(self, certificate: str, key: str) -> None:
        """CredentialsError when they cannot be used."""
        self._certificate, self._key = user_path(certificate), secret_path(key)
        try:
            self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except (OSError, ssl.SSLError) as error:
            raise CredentialsError(f"certificate {certificate} with key {key} cannot be used: {error}") from error

    def reload(self) -> None:
        """Use what the files hold now for new connections. What cannot be used is logged, and the last one stays."""
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # only a whole pair may replace the one in use
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            _log.warning(
                "the certificate %s with key %s cannot be used, and the one before stays in use: %s",
                self._certificate, self._key, error,
            )  # fmt: skip
        else:
            _log.info("the certificate %s is in use for new connections", self._certificate)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A robot's threads read and write one TLS object. One that reads session tickets while the other sends the
        # websocket's request can lose that request; a robot that keeps its connection needs no tickets.
        context.num_tickets = 0
        context.load_cert_chain(self._certificate, self._key, self._password)
        return context

    def _password(self) -> str:
        """Refuse an encrypted key, also when it is loaded again: a service has no terminal to ask on."""
        raise ssl.SSLError(
            f"the key {self._key} is encrypted; decrypt it with 'openssl pkey' into a file that only the "
            "verifier's user can read"
        )


@dataclass(frozen=True)
class TokenHolder:
    """Who holds a token: a robot of the tokens file, or any robot (no name) where all share one token."""

    name: str
    secret: bytes = field(repr=False)  # SHA-256 of the token's header: looking it up takes no time that depends on it
    proof: Token = field(repr=False, compare=False)
    sessions: int | None = None  # at most; None: as the verifier's settings say


class Tokens:
    """The tokens that a verifier takes: one that all robots share, or the named ones of a tokens file."""

    def __init__(self, holders: Iterable[TokenHolder], file: Path | None = None, named: bool = False) -> None:
        self._holders = {holder.secret: holder for holder in holders}
        self._file, self._named = file, named

    @classmethod
    def shared(cls, token: str) -> Self:
        """One token for all robots."""
        return cls([_holder("", token)])

    @classmethod
    def of(cls, token_file: str, tokens_file: str = "") -> Self | None:
        """What one of the two files holds; None without a file. CredentialsError or ValueError, one sentence."""
        if not token_file and not tokens_file:
            return None
        file = user_path(tokens_file or token_file)
        return cls(_read(file, bool(tokens_file)), file, bool(tokens_file))

    @property
    def names(self) -> set[str]:
        """The robots' names."""
        return {holder.name for holder in self} - {""}

    def reload(self) -> bool:
        """Read the file again; whether it is in use now. An unusable one is logged, and the last one stays."""
        if self._file is None:
            return False
        try:
            holders = _read(self._file, self._named)
        except ValueError as error:
            _log.warning("the tokens cannot be used, and those before stay in use: %s", error)
            return False
        self._holders = {holder.secret: holder for holder in holders}
        _log.info("the tokens in %s are in use", self._file)
        return True

    def shown_by(self, header: str | None) -> TokenHolder | None:
        """Whose token an Authorization header shows."""
        return self._holders.get(_digest(header or ""))

    def proven_by(self, message: SessionRequest | Question) -> TokenHolder | None:
        """Whose token tagged an opening message."""
        return next((holder for holder in self if holder.proof.holds(message)), None)

    def __contains__(self, holder: TokenHolder) -> bool:
        """Whether the holder's token is still one that is taken."""
        now = self._holders.get(holder.secret)
        return now is not None and now.name == holder.name

    def __iter__(self) -> Iterator[TokenHolder]:
        return iter(self._holders.values())


def _digest(header: str) -> bytes:
    return hashlib.sha256(header.encode("utf-8", "surrogateescape")).digest()


def _holder(name: str, token: str, sessions: int | None = None) -> TokenHolder:
    return TokenHolder(name, _digest(bearer(token)), Token(token), sessions)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A robot of a tokens file: ``NAME: {token: TOKEN or [NEW, OLD], sessions: N}``, or ``NAME: TOKEN``."""

    token: str | Annotated[list[str], msgspec.Meta(min_length=1)]
    sessions: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None


def _read(file: Path, named: bool) -> list[TokenHolder]:
    if not named:
        return [_holder("", read_token(file))]
    try:
        robots = yaml.safe_load(secret_path(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CredentialsError(f"the tokens file {file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)  # the whole message would show a token
        where = f", line {mark.line + 1}," if mark is not None else ""
        raise CredentialsError(f"the tokens file {file}{where} is no YAML; write a line 'NAME: TOKEN'") from error
    if not isinstance(robots, dict) or not robots:
        raise CredentialsError(f"the tokens file {file} names no robot; write a line 'NAME: TOKEN' for each")
    holders: dict[bytes, TokenHolder] = {}
    for name, given in robots.items():
        try:
            found = _holders_of(name, given)
        except (ValueError, msgspec.ValidationError) as error:
            raise CredentialsError(f"the tokens file {file}, robot {str(name)[:64]!r}: {error}") from error
        for holder in found:
            if holder.secret in holders:
                raise CredentialsError(f"the tokens file {file}: the token of {name} stands there twice; give each one")
            holders[holder.secret] = holder
    return list(holders.values())


def _holders_of(name: Any, given: Any) -> list[TokenHolder]:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("that is no name; use letters, digits, '-', '_' and '.', at most 64")
    entry = msgspec.convert(given if isinstance(given, dict) else {"token": given}, _Entry)
    tokens = entry.token if isinstance(entry.token, list) else [entry.token]
    try:
        return [_holder(name, check_token(token), entry.sessions) for token in tokens]
    except ValueError as error:
        raise ValueError(f"the token cannot be used; write {error}") from error
