"""Serves a run's live page over HTTP: who may read it, who may ask something of the run, and nothing else.

Everybody who can reach the port is a stranger (docs/security.md). Reading takes the run's token, or a connection of the
same user on the same machine; asking something of the run always takes the token. The name that a browser asked for is
checked, so that a stranger's page can't reach this one under a name of its own (DNS rebinding).
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
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit

from meshwright.errors import ConfigError
from meshwright.monitor import prometheus
from meshwright.monitor.live_page import LivePage
from meshwright.monitor.page import login_page
from meshwright.records import parse_json

TOKEN = "page-token"
"""Name of the token's file in a run directory."""
_LIVE_SCRIPT = (Path(__file__).with_name("templates") / "live.js").read_bytes()
_MOST_BODY_BYTES = 1024
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

Act = Callable[[str], None]
"""Asks an action of the run, by its name."""


class PageServer(ThreadingMixIn, HTTPServer):
    """Serves a page. The socket is bound at once, so that an address in use is known before a rank starts.

    Args:
        address: host and port; any free port for 0.
        page: what is served.
        token: the run's, as text.
        actions: what a POST may ask for; empty for a page that is only looked at.
        act: asks it.

    Raises:
        ConfigError: when the address can't be bound.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 32

    def __init__(
        self, address: tuple[str, int], page: LivePage, token: str, actions: tuple[str, ...], act: Act
    ) -> None:
        self.page, self.token, self.actions, self.act = page, token, actions, act
        self._token, self._host = token.encode(), address[0]
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise ConfigError(
                f"monitor.host = {address[0]}, monitor.port = {address[1]}: {error.strerror}; give another port, or 0 "
                "for any free one"
            ) from None
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

    def serve(self) -> None:
        """Serves until the process ends; the first reader needn't wait for a long run's files."""
        self.page.document()
        self.serve_forever()

    def knows(self, token: str) -> bool:
        """Whether a text is the run's token."""
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


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer
    server_version, sys_version = "meshwright", ""
    timeout = _SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: addresses and headers of readers are nobody's business, and hold tokens."""

    def do_GET(self) -> None:
        """Answers what only reads."""
        if not self._names_this_server():
            return
        url = urlsplit(self.path)
        if url.path == "/live.js":
            self._send(HTTPStatus.OK, _LIVE_SCRIPT, "text/javascript; charset=utf-8")
            return
        page = self.server.page
        pages = {
            "/": lambda: (page.document(), "text/html; charset=utf-8"),
            "/metrics": lambda: (page.metrics(), prometheus.CONTENT_TYPE),
            "/api/sections": lambda: (_json(page.sections_since(_since(url.query))), _JSON),
            "/api/steps": lambda: (_json(page.steps_since(_since(url.query))), _JSON),
        }
        if url.path not in pages:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        elif self._has_token() or self._is_same_user():
            try:
                text, content_type = pages[url.path]()
            # Files that a run doesn't write so: the page of a damaged directory fails, and says so.
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, OSError) as error:
                text = f"the run's files can't be shown ({type(error).__name__})"
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, text)
                return
            self._send(HTTPStatus.OK, text.encode("utf-8", "replace"), content_type)
        elif url.path == "/":
            self._send(HTTPStatus.OK, login_page().encode(), "text/html; charset=utf-8")
        else:
            self._refuse(HTTPStatus.UNAUTHORIZED, "the run's token is missing")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Exchanges the token for a cookie, or asks something of the run."""
        if not self._names_this_server():
            return
        body = self._read_body()
        if body is None:
            return
        if not self._has_token() or not self._is_own_origin():
            self._refuse(HTTPStatus.FORBIDDEN, "the run's token is missing, or another site's page asks")
        elif self.path == "/api/session":
            cookie = f"{self.server.cookie}={self._bearer()}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.NO_CONTENT, b"", "text/plain", {"Set-Cookie": cookie} if self._bearer() else {})
        elif self.path == "/api/request":
            action = body.get("action")
            if not isinstance(action, str) or action not in self.server.actions:
                known = ", ".join(self.server.actions) or "nothing, from this page"
                self._refuse(HTTPStatus.BAD_REQUEST, f"what can be asked for: {known}")
                return
            self.server.act(action)
            self._send(HTTPStatus.ACCEPTED, _json({"asked": action}).encode(), _JSON)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such request")

    def _names_this_server(self) -> bool:
        if self.server.serves_name(self.headers.get("Host", "")):
            return True
        text = "this name isn't the server's; open it by its address, or give the name as monitor.host"
        self._refuse(HTTPStatus.MISDIRECTED_REQUEST, text)
        return False

    def _read_body(self) -> dict[str, Any] | None:
        """Reads a small JSON object; answers and returns None for anything else."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BODY_BYTES or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.BAD_REQUEST, f"a body of up to {_MOST_BODY_BYTES} bytes, with its length, is due")
            return None
        # A form of another site can't send this type without asking first (CORS).
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "JSON is due")
            return None
        try:
            body = parse_json(self.rfile.read(int(length)))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._refuse(HTTPStatus.BAD_REQUEST, "a JSON object is due")
            return None
        return body

    def _bearer(self) -> str:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""

    def _has_token(self) -> bool:
        try:
            morsel = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            morsel = None
        # Both are compared, so that the time taken doesn't say which one was given.
        return self.server.knows(self._bearer()) | self.server.knows(morsel.value if morsel is not None else "")

    def _is_own_origin(self) -> bool:
        """Whether no other site's page asks: browsers send the origin, and no page may leave out or change it."""
        origin = self.headers.get("Origin")
        if origin is None:
            # Not from a browser's page: then the token was sent by hand, not by a cookie that goes along by itself.
            return bool(self._bearer())
        return urlsplit(origin).netloc.lower() == self.headers.get("Host", "").lower()

    def _is_same_user(self) -> bool:
        """Whether the other end is a process of this user on this machine."""
        if self.connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return _owner_of(self.client_address[0], self.client_address[1], self.server.server_address[1]) == os.geteuid()

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(status, f"{text}\n".encode(), "text/plain; charset=utf-8")

    def _send(
        self, status: HTTPStatus, body: bytes, content_type: str, more_headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(more_headers or {}), "Content-Type": content_type}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


_JSON = "application/json; charset=utf-8"
_json = partial(json.dumps, separators=(",", ":"), allow_nan=False)


def _since(query: str) -> int:
    values = parse_qs(query).get("since", ["0"])
    return int(values[0]) if values[0].isdecimal() and len(values[0]) < 20 else 0


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
