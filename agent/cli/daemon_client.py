"""Talks to the daemon over its ``admin.sock``."""

import getpass
import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from agent.admin.peercred import GROUP
from agent.cli.whose import SERVICE, folders_here

TIMEOUT_S: Final = 10.0
ANSWER_MOST: Final = 64 * 1024 * 1024
T = TypeVar("T")


class Unreachable(Exception):
    """No daemon answers; the message says which socket was tried and what to do."""


class Refused(Exception):
    """The daemon said no: HTTP ``status``, ``code`` for programs, ``detail`` for people."""

    def __init__(self, status: int, code: str, detail: str = "") -> None:
        super().__init__(f"{detail} ({code})" if detail else code)
        self.status = status
        self.code = code
        self.detail = detail


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


class DaemonClient:
    """One request per call. Every call raises ``Unreachable`` or ``Refused``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def here(cls) -> "DaemonClient":
        """The client of the daemon that this command line means."""
        return cls(folders_here().admin_socket)

    def read(self, path: str) -> bytes:
        """The body of a document."""
        return self._ask("GET", path, None)

    def get(self, path: str, kind: type[T]) -> T:
        """A document as ``kind``; unknown fields of a newer daemon are ignored."""
        return msgspec.json.decode(self.read(path), type=kind)

    def ask(self, path: str, question: object, kind: type[T]) -> T:
        """The answer to a question, as ``kind``."""
        return msgspec.json.decode(self._ask("POST", path, msgspec.json.encode(question)), type=kind)

    def do(self, verb: str, **arguments: object) -> dict[str, Any]:
        """Have ``verb`` done; its answer."""
        body = msgspec.json.encode(arguments)
        return msgspec.json.decode(self._ask("POST", f"/v1/do/{quote(verb)}", body), type=dict[str, Any])

    def _ask(self, method: str, path: str, body: bytes | None) -> bytes:
        connection = _UnixConnection(self.path)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            reply = connection.getresponse()
            answer = reply.read(ANSWER_MOST)
        except (OSError, HTTPException) as exc:
            raise Unreachable(_advice(self.path, exc)) from exc
        finally:
            connection.close()
        if reply.status == 403:
            raise Unreachable(_advice(self.path, PermissionError()))
        if reply.status != 200:
            raise _refusal(reply.status, answer)
        return answer


class _Said(msgspec.Struct):
    error: str = "refused"
    detail: str = ""
    faults: tuple[str, ...] = ()


def _refusal(status: int, answer: bytes) -> Refused:
    try:
        said = msgspec.json.decode(answer, type=_Said)
    except msgspec.DecodeError:
        said = _Said()
    return Refused(status, said.error, said.detail or "; ".join(said.faults))


def _advice(path: Path, exc: Exception) -> str:
    match exc:
        case PermissionError():
            return f"may not use {path}: {_entrance(path)}"
        case FileNotFoundError() if path == SERVICE.admin_socket:
            return f"no daemon: the service is installed, but there is no {path}. See 'systemctl status pairmesh'"
        case FileNotFoundError():
            service = " or 'systemctl start pairmesh'" if SERVICE.state.is_dir() else ""
            return (
                f"no daemon: there is no {path}, and no service at {SERVICE.runtime}. Start one with 'pairmesh run'{service}, "
                "or, if it runs with other folders, set STATE_DIRECTORY and RUNTIME_DIRECTORY as it has them"
            )
        case ConnectionRefusedError():
            return (
                f"no daemon: nobody listens on {path} any more. Start it with 'pairmesh run' and read its log"
            )
        case TimeoutError():
            return f"the daemon on {path} did not answer within {TIMEOUT_S:.0f} s: read its log"
        case _:
            return f"the daemon on {path} broke off ({type(exc).__name__}): read its log"


def _entrance(path: Path) -> str:
    """What a user has to be to get in. The folder tells where the socket itself may not be looked at."""
    for place in (path, path.parent):
        try:
            if place.stat().st_mode & 0o070 == 0:
                break
            group, user = place.group(), getpass.getuser()
        except (OSError, KeyError):
            continue
        if group == GROUP:
            return f"run this as root, or join the group {group} (sudo usermod -aG {group} {user}) and log in again"
    return "run this as root or as the daemon's user"
