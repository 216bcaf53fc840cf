"""A TCP proxy that a test can shut: connections stay open, but no data passes any more."""

from __future__ import annotations

import contextlib
import socket
import threading


class Gate:
    """Listens on the loopback at `port` and forwards data to and from a server until it is shut.

    shut_after: shut automatically after this many bytes to the server; None: never.
    """

    def __init__(self, server: int, shut_after: int | None = None) -> None:
        self._server = server
        self._left = shut_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self.was_shut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self) -> None:
        self.was_shut.set()

    def close(self) -> None:
        """Close all connections."""
        for connection in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._sockets += [client, server]
                threading.Thread(target=self._pass_on, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counted and self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        self.shut()
                if self.was_shut.is_set():
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
