# SPDX-License-Identifier: Apache-2.0
"""What a verifier reads from files and reads again when they change: its certificate, and the tokens of its robots."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dsd_ros.cloud.metrics_server import ServerError
from dsd_ros.paths import user_path
from dsd_ros.wire.authentication import Token
from dsd_ros.wire.channel import bearer, check_token, read_token
from dsd_ros.wire.messages import Question, SessionRequest

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LIMITS = ("sessions", "connections")
_MOST = 100_000
_MAX_TOKENS = 4  # of one robot, while it changes from one to the next


class CredentialsError(ValueError):
    """A file of tokens cannot be used; one sentence with the line."""


class WatchedFiles:
    """Notices when files are replaced or written."""

    def __init__(self, *files: str) -> None:
        self.files = [user_path(file) for file in files]
        self._known = self._state()

    def changed(self) -> bool:
        """Whether the files differ from what they were at the last call."""
        before, self._known = self._known, self._state()
        return before != self._known

    def _state(self) -> list[tuple[int, int, int]]:
        found = []
        for file in self.files:
            with contextlib.suppress(OSError):
                status = Path(file).stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return found


class Certificate:
    """A TLS certificate and its key."""

    def __init__(self, certificate: str, key: str) -> None:
        """ServerError when they cannot be used."""
        self._certificate, self._key = user_path(certificate), user_path(key)
        self._watched = WatchedFiles(certificate, key)
        try:
            self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except (OSError, ssl.SSLError) as error:
            raise ServerError(f"certificate {certificate} with key {key} cannot be used: {error}") from error

    def reload(self) -> None:
        """Use what the files hold now for new connections. What cannot be used is logged, and the last one stays."""
        if not self._watched.changed():
            return
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # only a whole pair may replace the one in use
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            _log.warning(
                "the changed certificate %s with key %s cannot be used, and the one before stays in use: %s",
                self._certificate, self._key, error,
            )  # fmt: skip
        else:
            _log.info("the certificate %s has changed and is in use for new connections", self._certificate)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
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
    sessions: int | None = None  # at most; None: the verifier's sessions_per_address
    connections: int | None = None  # at most; None: its connections_per_address


class Tokens:
    """The tokens that a verifier takes: one that all robots share, or the named ones of a tokens file."""

    def __init__(self, holders: Iterable[TokenHolder]) -> None:
        self._holders = {holder.secret: holder for holder in holders}
        self._watched: WatchedFiles | None = None
        self._named = False

    @classmethod
    def shared(cls, token: str) -> Self:
        """One token for all robots."""
        return cls([_holder("", token)])

    @classmethod
    def of(cls, token_file: str, tokens_file: str) -> Self | None:
        """What one of the two files holds; None without a file. CredentialsError or ValueError, one sentence."""
        if not token_file and not tokens_file:
            return None
        watched = WatchedFiles(tokens_file or token_file)
        tokens = cls(_read(watched.files[0], bool(tokens_file)))
        tokens._watched, tokens._named = watched, bool(tokens_file)
        return tokens

    @property
    def named(self) -> bool:
        """Whether each robot has a name and tokens of its own."""
        return self._named

    @property
    def names(self) -> set[str]:
        """The robots' names."""
        return {holder.name for holder in self} - {""}

    def reload(self) -> bool:
        """Read a changed file again; whether it is in use now. An unusable one is logged, and the last one stays."""
        if self._watched is None or not self._watched.changed():
            return False
        file = self._watched.files[0]
        try:
            holders = _read(file, self._named)
        except ValueError as error:
            _log.warning("the changed tokens cannot be used, and those before stay in use: %s", error)
            return False
        self._holders = {holder.secret: holder for holder in holders}
        _log.info("the tokens in %s have changed and are in use", file)
        return True

    def shown_by(self, header: str | None) -> TokenHolder | None:
        """Whose token an Authorization header shows."""
        return self._holders.get(_digest(header or ""))

    def proven_by(self, message: SessionRequest | Question, likely: TokenHolder | None = None) -> TokenHolder | None:
        """Whose token tagged an opening message; ``likely`` is tried first."""
        holders = [*([likely] if likely is not None and likely in self else []), *self._holders.values()]
        return next((holder for holder in holders if holder.proof.holds(message)), None)

    def __contains__(self, holder: TokenHolder) -> bool:
        """Whether the holder's token is still one that is taken."""
        now = self._holders.get(holder.secret)
        return now is not None and now.name == holder.name

    def __iter__(self) -> Iterator[TokenHolder]:
        return iter(self._holders.values())


def _digest(header: str) -> bytes:
    return hashlib.sha256(header.encode("utf-8", "surrogateescape")).digest()


def _holder(name: str, token: str, **limits: int) -> TokenHolder:
    return TokenHolder(name, _digest(bearer(token)), Token(token), **limits)


def _read(file: Path, named: bool) -> list[TokenHolder]:
    if not named:
        return [_holder("", read_token(file))]
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)  # nodes know their lines, and no token becomes a number
    except OSError as error:
        raise CredentialsError(f"the tokens file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CredentialsError(f"the tokens file {file} is no UTF-8 text; write it as YAML") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise CredentialsError(f"the tokens file {file}, line {line}, is no YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise CredentialsError(f"the tokens file {file} is no YAML: it holds a control character") from error
    return _Reader(file).robots(root)


class _Reader:
    """The robots of a tokens file: ``NAME: TOKEN`` or ``NAME: {token: TOKEN or [NEW, OLD], sessions: N, ...}``."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names: set[str] = set()
        self._holders: dict[bytes, TokenHolder] = {}

    def robots(self, root: yaml.Node | None) -> list[TokenHolder]:
        if not isinstance(root, yaml.MappingNode) or not root.value:
            raise CredentialsError(f"the tokens file {self._file} names no robot; write a line 'NAME: TOKEN' for each")
        for key, value in root.value:
            name = self._text(key, "a robot's name")
            if not _NAME.fullmatch(name):
                raise self._error(key, f"{name[:64]!r} is no name; use letters, digits, '-', '_' and '.', at most 64")
            if name in self._names:
                raise self._error(key, f"{name} stands here a second time; give each robot one entry")
            self._names.add(name)
            entry = self._entry(value, name) if isinstance(value, yaml.MappingNode) else {"token": value}
            limits = {limit: self._limit(entry[limit], limit) for limit in _LIMITS if limit in entry}
            for token in self._tokens(entry["token"], name):
                self._add(token, name, limits)
        return list(self._holders.values())

    def _entry(self, node: yaml.MappingNode, name: str) -> dict[str, yaml.Node]:
        entry: dict[str, yaml.Node] = {}
        for key, value in node.value:
            word = self._text(key, "a setting's name")
            if word not in ("token", *_LIMITS) or word in entry:
                raise self._error(key, f"{word[:64]!r} is unknown or repeated; use token, sessions and connections")
            entry[word] = value
        if "token" not in entry:
            raise self._error(node, f"{name} has no token; add 'token: ...', for example from `openssl rand -hex 32`")
        return entry

    def _tokens(self, node: yaml.Node, name: str) -> list[yaml.Node]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not 1 <= len(nodes) <= _MAX_TOKENS:
            raise self._error(node, f"{name} has {len(nodes)} tokens; give it 1 to {_MAX_TOKENS}")
        return list(nodes)

    def _add(self, node: yaml.Node, name: str, limits: dict[str, int]) -> None:
        try:
            holder = _holder(name, check_token(self._text(node, f"the token of {name}")), **limits)
        except CredentialsError:
            raise
        except ValueError as error:
            raise self._error(node, f"the token of {name} cannot be used; write {error}") from error
        if holder.secret in self._holders:
            raise self._error(node, f"the token of {name} stands here a second time; give each robot its own")
        self._holders[holder.secret] = holder

    def _limit(self, node: yaml.Node, what: str) -> int:
        text = self._text(node, what)
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _MOST):
            raise self._error(node, f"{what} is {text[:20]!r}; use 1 to {_MOST}")
        return int(text)

    def _text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, f"{what} must be one word")
        return str(node.value)

    def _error(self, node: yaml.Node, sentence: str) -> CredentialsError:
        return CredentialsError(f"the tokens file {self._file}, line {node.start_mark.line + 1}: {sentence}")
