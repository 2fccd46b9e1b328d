"""A TCP proxy on a real port, in its own threads: it cuts connections, falls silent, and speaks TLS."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from psycopg2.extensions import parse_dsn

_PIECE = 64 << 10
#: What a client of PostgreSQL sends before TLS: the length, and the number of an SSLRequest.
_SSL_REQUEST = struct.pack(">II", 8, 80877103)


class Proxy:
    """Passes bytes to a server and back, until a test says otherwise."""

    def __init__(
        self, family: int, address: str | tuple[str, int], tls: ssl.SSLContext | None
    ) -> None:
        self._family, self._address, self._tls = family, address, tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        #: Set when the network loses everything that connections opened so far send.
        self._silence = threading.Event()
        self._refusing = False
        self._left: int | None = None
        #: Set once `cut_after` has cut.
        self.was_cut = threading.Event()
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, refuse: bool = False) -> None:
        """Reset all connections; with `refuse`, those to come too, until `mend`."""
        self._refusing = refuse
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut_after(self, size: int) -> None:
        """Reset all connections once so many more bytes came from the server."""
        self.was_cut.clear()
        self._left = size

    def silence(self) -> None:
        """Lose what the open connections send from now on, without closing them."""
        self._silence.set()
        self._silence = threading.Event()

    def mend(self) -> None:
        self._refusing = False

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept`, which `close` does not
        self._listening.close()
        self.cut(refuse=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if self._refusing:
                client.close()
                continue
            self.connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                if client.recv(len(_SSL_REQUEST), socket.MSG_PEEK) == _SSL_REQUEST:
                    client.recv(len(_SSL_REQUEST))
                    client.sendall(b"S")
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.socket(self._family, socket.SOCK_STREAM)
        except OSError:
            client.close()
            return
        with self._lock:
            self._open |= {client, server}
        with suppress(OSError):
            server.connect(self._address)
        if self._refusing:  # since it was accepted
            self.cut(refuse=True)
        for source, target, counted in ((client, server, False), (server, client, True)):
            threading.Thread(target=self._pump, args=(source, target, counted), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        silenced = self._silence
        with suppress(OSError, ValueError):
            while data := source.recv(_PIECE):
                if silenced.is_set():
                    continue
                target.sendall(data)
                if counted and self._left is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        self._left = None
                        self.cut()
                        self.was_cut.set()
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(source)
        source.close()


@contextmanager
def proxy_to_postgres(uri: str, tls: ssl.SSLContext | None = None) -> Iterator[tuple[Proxy, str]]:
    """A proxy before a server with a Unix socket, and the address of the database through it."""
    given = parse_dsn(uri)
    proxy = Proxy(socket.AF_UNIX, f"{given['host']}/.s.PGSQL.5432", tls)
    try:
        yield proxy, f"postgresql://postgres@127.0.0.1:{proxy.port}/{given['dbname']}"
    finally:
        proxy.close()


@contextmanager
def proxy_to_server(endpoint: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy before a server of streams, and its own address."""
    upstream = urlsplit(endpoint)
    assert upstream.hostname is not None
    assert upstream.port is not None
    proxy = Proxy(socket.AF_INET, (upstream.hostname, upstream.port), None)
    try:
        yield proxy, f"http://127.0.0.1:{proxy.port}"
    finally:
        proxy.close()
