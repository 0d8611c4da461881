"""Connections to Milvus: a folder opened by Milvus Lite in this process, a Milvus Lite server, or a cluster."""

import atexit
import contextlib
import logging
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SUFFIX = ".db"
SCHEMES = ("http://", "https://", "tcp://", "unix:")
CONNECT_S = 10.0
RETRIES = 3
"""pymilvus would try 75 times, for minutes, to reach a server that has gone."""
NO_PINGS = {"grpc.keepalive_permit_without_calls": False, "grpc.keepalive_time_ms": 2**31 - 1}
"""pymilvus pings every 10 s; Milvus Lite takes that for abuse ("too_many_pings") and hangs up on all connections."""
EXTRA = "pip install 'mmcl[milvus]'"
PASSWORD = re.compile(r"(?<=//)[^/]*@")


@dataclass
class Lite:
    """A Milvus Lite server inside this process; it listens on loopback, at a free port, and holds the folder's lock."""

    server: Any
    database: Any
    address: str
    users: int = 0


OPEN: dict[str, Lite] = {}
OPENING = threading.RLock()
LITE_TURN = threading.RLock()
"""Milvus Lite promises nothing for writes that meet, nor for a search that meets a flush: one call after the other."""


class Connection:
    """A client of one server. Whatever fails names the server and never the token.

    Args:
        uri: a folder whose name ends in ".db", made where missing unless `must_exist`; or http://host:port,
            https://host:port.
        token: "user:password" or an API key.
    Raises: ValueError for a uri of another form; FileNotFoundError where a folder is missing; ImportError without
        pymilvus or milvus-lite; ConnectionError that says why the server cannot be reached.
    """

    def __init__(self, uri: Any, token: str | None = None, must_exist: bool = False):
        uri = check_uri(uri)
        self._folder = None if uri.startswith(SCHEMES) else os.path.realpath(uri)
        self.name = self._folder or without_password(uri)
        self._secrets = secrets(uri, token)
        client_type = load_client()
        address = uri if self._folder is None else open_lite(self._folder, must_exist)
        try:
            options = {"timeout": CONNECT_S, "grpc_options": NO_PINGS}
            self._client = client_type(uri=address, token=token or "", dedicated=True, **options)
            self.version = str(self._client.get_server_version(timeout=CONNECT_S))
        except Exception as error:  # pymilvus lets grpc's and its own through, of no common type
            if self._folder is not None:
                close_lite(self._folder)
            raise ConnectionError(f"cannot connect to Milvus at {self.name}: {self._reason(error)}") from None
        self.is_lite = self.version.startswith("milvus_lite")
        self.writing: Any = LITE_TURN if self.is_lite else threading.RLock()
        """To be held from a check to the write that relies on it."""
        self._closed = False

    def call(self, method: str, **arguments: Any) -> Any:
        """What the client's `method` returns. RuntimeError with the server's reason where it refuses."""
        import grpc
        from pymilvus.exceptions import MilvusException

        if self._closed:
            raise RuntimeError(f"the connection to Milvus at {self.name} is closed")
        with LITE_TURN if self.is_lite else contextlib.nullcontext():
            try:
                return getattr(self._client, method)(**arguments, retry_times=RETRIES)
            except (MilvusException, grpc.RpcError) as error:
                reason = self._reason(error)
                if "UNAVAILABLE" in reason or "connecting" in reason:
                    raise ConnectionError(f"lost the connection to Milvus at {self.name}: {reason}") from None
                raise RuntimeError(f"Milvus at {self.name} refused {method}: {reason}") from None

    def new_schema(self) -> Any:
        """A collection schema without fields."""
        return self._client.create_schema(auto_id=False, enable_dynamic_field=False)

    def new_index(self, **parameters: Any) -> Any:
        """What `create_collection` takes for one index."""
        return self._client.prepare_index_params(**parameters)

    def close(self) -> None:
        """Close the connection; the last one to a folder of Milvus Lite writes it out and gives up its lock."""
        if not self._closed:
            self._closed = True
            self._client.close()
            if self._folder is not None:
                close_lite(self._folder)

    def _reason(self, error: Exception) -> str:
        details = getattr(error, "details", None)  # grpc's own errors: their str is a page
        reason = " ".join(str(details() if callable(details) else getattr(error, "message", "") or error).split())
        for secret in self._secrets:
            reason = reason.replace(secret, "...")
        return reason


def check_uri(uri: Any) -> str:
    """The uri as a str; ValueError where it is neither a .db folder nor the address of a server."""
    text = os.fspath(uri) if isinstance(uri, str | Path) else ""
    if not (is_address(text) if "://" in text else text.startswith("unix:") or text.endswith(SUFFIX)):
        shown = without_password(text) if text else uri
        raise ValueError(
            f"uri must be a path that ends in {SUFFIX!r} (Milvus Lite in this process) or a server's http://host:port, "
            f"got {shown!r}"
        )
    return text


def is_address(uri: str) -> bool:
    """Whether it has one of the schemes that pymilvus knows, a host, and a port that is a number."""
    try:
        parts = urlsplit(uri)
        return uri.startswith(SCHEMES) and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def without_password(uri: str) -> str:
    """The uri as it may be shown."""
    return PASSWORD.sub("", uri)


def secrets(uri: str, token: str | None) -> list[str]:
    """What no message may contain, the longest first: tokens, and the passwords in them."""
    whole = [token or "", *(found.rstrip("@") for found in PASSWORD.findall(uri))]
    return sorted(filter(None, (*whole, *(each.partition(":")[2] for each in whole))), key=len, reverse=True)


def load_client() -> Any:
    """pymilvus's client class; its log is silenced, since all that it says is raised as well."""
    try:
        from pymilvus import MilvusClient
    except ImportError:
        raise ImportError(f"the Milvus backend needs pymilvus: {EXTRA}") from None
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    return MilvusClient


def open_lite(folder: str, must_exist: bool) -> str:
    """Address of the Milvus Lite server of a folder in this process; started where nobody has opened it yet."""
    path = Path(folder)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to keep {path.name} in")
    if must_exist and not path.exists():
        raise FileNotFoundError(f"there is no Milvus Lite database at {folder}")
    if path.is_file():
        raise ValueError(f"{folder} is a file; Milvus Lite keeps its database as a folder")
    with OPENING:
        lite = OPEN.get(folder) or start_lite(folder)
        lite.users += 1
        OPEN[folder] = lite
        return lite.address


def start_lite(folder: str) -> Lite:
    """Milvus Lite on a folder. ConnectionError where another process has it open."""
    try:
        from milvus_lite.adapter.grpc.server import start_server_in_thread
        from milvus_lite.exceptions import DataDirLockedError
    except ImportError:
        raise ImportError(f"a {SUFFIX} path needs milvus-lite: {EXTRA}") from None
    logging.getLogger("milvus_lite").setLevel(logging.CRITICAL)
    try:
        server, database, port = start_server_in_thread(folder, host="127.0.0.1", port=0)
    except DataDirLockedError:
        raise ConnectionError(
            f"{folder} is open elsewhere: one process at a time; to share it, start `milvus-lite server "
            f"--host 127.0.0.1 --max-workers 1 --data-dir {folder}` and connect to http://127.0.0.1:19530"
        ) from None
    return Lite(server, database, f"http://127.0.0.1:{port}")


def close_lite(folder: str) -> None:
    """One user fewer; the last one stops the server."""
    with OPENING:
        lite = OPEN.get(folder)
        if lite is None:
            return
        lite.users -= 1
        if lite.users <= 0:
            del OPEN[folder]
            stop_lite(lite)


def stop_lite(lite: Lite) -> None:
    """Answer what was asked, write what is in memory, and give up the folder's lock."""
    lite.server.stop(grace=2).wait()
    lite.database.close()


@atexit.register
def close_all() -> None:
    """Nothing would be lost (Milvus Lite replays its log), but the next start is quicker."""
    with OPENING:
        while OPEN:
            stop_lite(OPEN.popitem()[1])
