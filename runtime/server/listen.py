"""The socket that the server listens on; apart from ``http.py``, so that it is bound before that is loaded."""

from __future__ import annotations

import errno
import socket


class PortError(Exception):
    """The address cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; held from here on, so nobody can take the port while the model loads. Raises PortError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise PortError(f"--host: cannot listen on {host!r}: {error.strerror}") from error
    sock = socket.socket(family, kind)
    try:
        # Lets a server restart while connections of its predecessor linger; two can still not listen at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortError(
                f"--port: port {port} on {host} is in use; stop who uses it or take another"
            ) from None
        raise PortError(f"--port: cannot listen on {host} port {port}: {error.strerror}") from error
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
