"""Counts the bytes between SuperNodes and the SuperLink: a TCP proxy that passes everything on unchanged."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator


class Meter(socketserver.ThreadingTCPServer):
    """Listens at ``address`` and connects each caller with ``port`` of this machine; ``bytes`` is what went through."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passage)
        self.port, self.bytes, self._lock = port, 0, threading.Lock()

    @property
    def address(self) -> str:
        """Where SuperNodes find it."""
        return f"127.0.0.1:{self.server_address[1]}"

    def count(self, number: int) -> None:
        with self._lock:
            self.bytes += number


class _Passage(socketserver.BaseRequestHandler):
    server: Meter

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.port)) as link:
            up = threading.Thread(target=self._pass, args=(self.request, link), daemon=True)
            up.start()
            self._pass(link, self.request)
            up.join()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.server.count(len(data))
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def metered(port: int) -> Iterator[Meter]:
    """Count what goes to ``port`` and back while the block runs."""
    with Meter(port) as meter:
        threading.Thread(target=meter.serve_forever, daemon=True).start()
        try:
            yield meter
        finally:
            meter.shutdown()
