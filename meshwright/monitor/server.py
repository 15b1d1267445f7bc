"""Serves a run's live page over HTTP: who may read it, who may ask something of the run, and nothing else.

Reading takes the run's token, or a connection of the same user on the same machine; asking something of the run always
takes the token (`monitor.guarded_server`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from meshwright.monitor import prometheus
from meshwright.monitor.guarded_server import HTML, JSON, SCRIPT, GuardedHandler, GuardedServer, read_script, write_json
from meshwright.monitor.live_page import LivePage
from meshwright.monitor.page import login_page

TOKEN = "page-token"
"""Name of the token's file in a run directory."""
_DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, OSError)
"""Errors of files that a run doesn't write so: the page of a damaged directory fails, and says so."""
_LIVE_SCRIPT = read_script("live.js")

Act = Callable[[str], None]
"""Asks an action of the run, by its name."""


class PageServer(GuardedServer):
    """Serves a run's page.

    Args:
        address: host and port; any free port for 0.
        page: what is served.
        token: the run's, as text.
        actions: what a POST may ask for; empty for a page that is only looked at.
        act: asks it.

    Raises:
        ConfigError: when the address can't be bound.
    """

    other_name = ", or give the name as monitor.host"

    def __init__(
        self, address: tuple[str, int], page: LivePage, token: str, actions: tuple[str, ...], act: Act
    ) -> None:
        self.page, self.actions, self.act = page, actions, act
        super().__init__(address, _Handler, token, f"monitor.host = {address[0]}, monitor.port = {address[1]}")

    def serve(self) -> None:
        """Serves until the process ends; a long run's files are read meanwhile."""
        # Templates are compiled before the first reader.
        self.page.document()
        threading.Thread(target=self._read_ahead, daemon=True).start()
        self.serve_forever()

    def _read_ahead(self) -> None:
        # Damaged files are answered to who asks.
        with contextlib.suppress(*_DAMAGED):
            self.page.sections_since(0)


class _Handler(GuardedHandler):
    """One request."""

    server: PageServer

    def do_GET(self) -> None:
        """Answers what only reads."""
        if not self.names_this_server():
            return
        url = urlsplit(self.path)
        if url.path == "/live.js":
            self.send(HTTPStatus.OK, _LIVE_SCRIPT, SCRIPT)
            return
        page = self.server.page
        pages = {
            "/": lambda: (page.document(), HTML),
            "/metrics": lambda: (page.metrics(), prometheus.CONTENT_TYPE),
            "/api/sections": lambda: (write_json(page.sections_since(_since(url.query))), JSON),
            "/api/steps": lambda: (write_json(page.steps_since(_since(url.query))), JSON),
        }
        if url.path not in pages:
            self.refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        elif self.has_token() or self.is_same_user():
            try:
                text, content_type = pages[url.path]()
            except _DAMAGED as error:
                text = f"the run's files can't be shown ({type(error).__name__})"
                self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, text)
                return
            self.send(HTTPStatus.OK, text.encode("utf-8", "replace"), content_type)
        elif url.path == "/":
            login = login_page("A run's page", "the contents of the file page-token in the run directory")
            self.send(HTTPStatus.OK, login.encode(), HTML)
        else:
            self.refuse(HTTPStatus.UNAUTHORIZED, "the run's token is missing")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Exchanges the token for a cookie, or asks something of the run."""
        if not self.names_this_server():
            return
        body = self.read_body()
        if body is None:
            return
        if not self.has_token() or not self.is_own_origin():
            self.refuse(HTTPStatus.FORBIDDEN, "the run's token is missing, or another site's page asks")
        elif self.path == "/api/session":
            self.start_session()
        elif self.path == "/api/request":
            action = body.get("action")
            if not isinstance(action, str) or action not in self.server.actions:
                known = ", ".join(self.server.actions) or "nothing, from this page"
                self.refuse(HTTPStatus.BAD_REQUEST, f"what can be asked for: {known}")
                return
            self.server.act(action)
            self.send(HTTPStatus.ACCEPTED, write_json({"asked": action}).encode(), JSON)
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "there is no such request")


def _since(query: str) -> int:
    values = parse_qs(query).get("since", ["0"])
    return int(values[0]) if values[0].isdecimal() and len(values[0]) < 20 else 0
