"""What may stand between two servers: a line that is cut at chosen bytes, and one that speaks TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.http.server import DEADLINE

Wrap = Callable[[socket.socket], socket.socket]


class Proxy:
    """Passes bytes on. A connection may have a cut: after so many bytes up (to the server) or down it is reset."""

    def __init__(self, port: int, wrap: Wrap | None = None) -> None:
        self._port = port
        self._wrap = wrap
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._changed = threading.Condition()
        self._cut: tuple[str, int] | None = None
        self._open: set[socket.socket] = set()
        self.cuts = 0
        # The first bytes of each connection, as the server got them.
        self.heard = b""
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            for each in self._open:
                _reset(each)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"{'http' if self._wrap is None else 'https'}://127.0.0.1:{self.port}"

    def cut(self, direction: str, after: int) -> None:
        """The next connection ends after so many bytes; those that are open end now."""
        with self._changed:
            self._cut = (direction, after)
            for each in self._open:
                _reset(each)

    def wait_for_cut(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.cuts >= number, DEADLINE), f"cut {number} never came"

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(inner,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            client.settimeout(DEADLINE)
            if self._wrap is not None:
                client = self._wrap(client)
            server = socket.create_connection(("127.0.0.1", self._port), DEADLINE)
        except OSError as error:
            self.failures.append(str(error))
            client.close()
            return
        client.settimeout(None)
        server.settimeout(None)
        with self._changed:
            cut, self._cut = self._cut, None
            self._open |= {client, server}
        limits = {cut[0]: cut[1]} if cut is not None else {}
        down = threading.Thread(target=self._pump, args=(server, client, limits.get("down"), False), daemon=True)
        down.start()
        self._pump(client, server, limits.get("up"), True)
        down.join()
        with self._changed:
            self._open -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, dest: socket.socket, limit: int | None, is_up: bool) -> None:
        passed = 0
        try:
            while limit is None or passed < limit:
                data = source.recv(1 << 16 if limit is None else min(1 << 16, limit - passed))
                if not data:
                    break
                if is_up:
                    self.heard += data[:4096]
                dest.sendall(data)
                passed += len(data)
        except (OSError, ValueError):
            pass
        is_cut = limit is not None and passed >= limit
        for each in (source, dest):
            if is_cut:
                _reset(each)
            else:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        if is_cut:
            with self._changed:
                self.cuts += 1
                self._changed.notify_all()


def _reset(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


def make_certificate(directory: Path, name: str = "IP:127.0.0.1") -> tuple[Path, Wrap]:
    """A CA of its own, and how a server with a certificate by it for a name takes connections."""
    directory.mkdir()
    ca, ca_key, key, request, cert = (directory / each for each in ("ca.pem", "ca.key", "key", "csr", "cert"))
    extensions = directory / "ext"
    extensions.write_text(f"subjectAltName={name}\n")

    def openssl(*words: str | Path) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=DEADLINE)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-days", "2", "-subj", "/CN=test-ca", "-keyout", ca_key, "-out", ca)
    openssl("req", *new, "-subj", "/CN=test-server", "-keyout", key, "-out", request)
    signing = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extensions)
    openssl("x509", "-req", "-in", request, *signing, "-out", cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    def wrap(client: socket.socket) -> socket.socket:
        return context.wrap_socket(client, server_side=True)

    return ca, wrap
