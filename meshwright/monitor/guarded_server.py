"""A small HTTP server for one page: who may read it, whose requests count, and how much anybody may send.

Everybody who can reach the port is a stranger (docs/security.md). Reading takes the page's token, or a connection of
the same user on the same machine. The name that a browser asked for is checked, so that a stranger's page can't reach
this one under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import socket
import sys
import threading
import zlib
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from meshwright.errors import ConfigError
from meshwright.records import parse_json

HTML, JSON, TEXT, SCRIPT = (
    "text/html; charset=utf-8",
    "application/json; charset=utf-8",
    "text/plain; charset=utf-8",
    "text/javascript; charset=utf-8",
)
"""Content types."""
write_json = partial(json.dumps, separators=(",", ":"), allow_nan=False)
"""Writes an answer."""
_TEMPLATES = Path(__file__).with_name("templates")
_MOST_CONNECTIONS = 32
_SILENT_S = 10.0
"""Seconds after which a connection that sends nothing is closed."""
_HEADERS = {
    # Nothing is loaded from elsewhere, and no script runs but the server's own file.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def read_script(name: str) -> bytes:
    """Returns a script of the folder of templates, which a page's own server sends."""
    return (_TEMPLATES / name).read_bytes()


class GuardedServer(ThreadingMixIn, HTTPServer):
    """Serves a page. The socket is bound at once, so that an address in use is known before anything starts.

    Args:
        address: host and port; any free port for 0.
        handler: of one request.
        token: who has it may read, as text.
        named: how the user named the address, for the message when it can't be bound.

    Raises:
        ConfigError: when the address can't be bound.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 32
    other_name = ""
    """What else the user can do where a browser asked by a name that isn't known, as the end of a sentence."""

    def __init__(self, address: tuple[str, int], handler: type[GuardedHandler], token: str, named: str) -> None:
        self.token = token
        self._token, self._host = token.encode(), address[0]
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, handler)
        except OSError as error:
            raise ConfigError(f"{named}: {error.strerror}; give another port, or 0 for any free one") from None
        self._names = {"localhost", self._host.lower(), socket.gethostname().lower()}
        self.cookie = f"meshwright-{zlib.crc32(self._token):08x}"
        """Name of the cookie: the pages of several runs on one machine share a host name."""
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    @property
    def url(self) -> str:
        """The address to open, without the token."""
        host = self._host if self._host not in ("", "0.0.0.0", "::") else socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread of its own, or closes it where there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of single connections, which strangers can cause at will."""

    def knows(self, token: str) -> bool:
        """Whether a text is the page's token."""
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token)

    def serves_name(self, host: str) -> bool:
        """Whether a Host header names this server: an IP address, or a name of this machine; no other name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        # A name can be made to point here; an address says where the browser went.
        return True


class GuardedHandler(BaseHTTPRequestHandler):
    """One request; a page's own handler answers what it asks for."""

    server: GuardedServer
    server_version, sys_version = "meshwright", ""
    timeout = _SILENT_S
    most_body_bytes = 1024
    """Most bytes of a request's body."""

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: addresses and headers of readers are nobody's business, and hold tokens."""

    def names_this_server(self) -> bool:
        """Whether the request names this server; answers it where it doesn't."""
        if self.server.serves_name(self.headers.get("Host", "")):
            return True
        text = f"this name isn't the server's; open it by its address{self.server.other_name}"
        self.refuse(HTTPStatus.MISDIRECTED_REQUEST, text)
        return False

    def read_body(self) -> dict[str, Any] | None:
        """Reads a small JSON object; answers and returns None for anything else."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > self.most_body_bytes or "Transfer-Encoding" in self.headers:
            self.refuse(
                HTTPStatus.BAD_REQUEST, f"a body of up to {self.most_body_bytes} bytes, with its length, is due"
            )
            return None
        # A form of another site can't send this type without asking first (CORS).
        if self.headers.get_content_type() != "application/json":
            self.refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "JSON is due")
            return None
        try:
            body = parse_json(self.rfile.read(int(length)))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self.refuse(HTTPStatus.BAD_REQUEST, "a JSON object is due")
            return None
        return body

    def _bearer(self) -> str:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""

    def start_session(self) -> None:
        """Exchanges the token, which was checked, for a cookie that scripts can't read."""
        cookie = f"{self.server.cookie}={self._bearer()}; HttpOnly; SameSite=Strict; Path=/"
        self.send(HTTPStatus.NO_CONTENT, b"", TEXT, {"Set-Cookie": cookie} if self._bearer() else {})

    def has_token(self) -> bool:
        """Whether the request carries the page's token, as a header or as the cookie."""
        try:
            morsel = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            morsel = None
        # Both are compared, so that the time taken doesn't say which one was given.
        return self.server.knows(self._bearer()) | self.server.knows(morsel.value if morsel is not None else "")

    def is_own_origin(self) -> bool:
        """Whether no other site's page asks: browsers send the origin, and no page may leave out or change it."""
        origin = self.headers.get("Origin")
        if origin is None:
            # Not from a browser's page: then the token was sent by hand, not by a cookie that goes along by itself.
            return bool(self._bearer())
        return urlsplit(origin).netloc.lower() == self.headers.get("Host", "").lower()

    def is_same_user(self) -> bool:
        """Whether the other end is a process of this user on this machine."""
        if self.connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return _owner_of(self.client_address[0], self.client_address[1], self.server.server_address[1]) == os.geteuid()

    def refuse(self, status: HTTPStatus, text: str) -> None:
        """Answers with a sentence."""
        self.send(status, f"{text}\n".encode("utf-8", "replace"), TEXT)

    def send(
        self, status: HTTPStatus, body: bytes, content_type: str, more_headers: dict[str, str] | None = None
    ) -> None:
        """Answers with a body, and with what every answer forbids browsers to do."""
        self.send_response(status)
        for name, value in {**_HEADERS, **(more_headers or {}), "Content-Type": content_type}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _owner_of(host: str, port: int, server_port: int) -> int | None:
    """Returns the user of a connection's other end, where that is on this machine; None where it isn't known.

    Args:
        host: address of the other end.
        port: its port.
        server_port: this end's port.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
        return None
    wanted = (f"{_kernel_address(address)}:{port:04X}", f":{server_port:04X}")
    try:
        table = Path(f"/proc/net/tcp{'6' if address.version == 6 else ''}").read_text()
    except OSError:
        return None
    for line in table.splitlines()[1:]:
        # Source: proc_pid_net(5): sl, local address, remote address, state, tx:rx, tr:when, retrnsmt, uid.
        fields = line.split()
        # The whole address: another user may have the same port of another loopback address. 01: established.
        if fields[1] == wanted[0] and fields[2].endswith(wanted[1]) and fields[3] == "01":
            return int(fields[7])
    return None


def _kernel_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Returns an address as /proc/net/tcp writes it: 32-bit words of the machine's byte order, in hexadecimal."""
    words = (address.packed[start : start + 4] for start in range(0, len(address.packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
