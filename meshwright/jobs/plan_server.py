"""The planner's page: a question in sliders and fields, and the plan that follows; on this machine alone."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlsplit

from markupsafe import Markup

from meshwright.errors import ConfigError
from meshwright.jobs.plan_desk import PlanDesk, PlanProcess, Superseded, Unanswered
from meshwright.jobs.plan_question import BOUNDS, PlanQuestion, devices, networks, page_presets
from meshwright.jobs.plan_sections import FRONT, HEAD, LAYOUTS, MEMORY, NOTES, PIPELINE, SCALING
from meshwright.jobs.plan_worker import COMMAND, KINDS
from meshwright.json_types import JsonObject
from meshwright.monitor.guarded_server import HTML, JSON, SCRIPT, GuardedHandler, GuardedServer, read_script, write_json
from meshwright.monitor.page import Section, login_page, macro, page
from meshwright.planner.question import OBJECTIVES
from meshwright.spec.layout_fields import PRECISIONS

HOST = "127.0.0.1"
"""The only address that the page is bound to; from another machine the port is forwarded by ssh."""
DEFAULT_PORT = 8790
"""Port when none is given."""
QUESTION = "What to plan"
_SECTIONS = (HEAD, LAYOUTS, SCALING, MEMORY, PIPELINE, FRONT, NOTES, COMMAND)
_SCRIPTS = {f"/{name}": read_script(name) for name in ("plan.js", "live.js")}
_MOST_NUMBER = 1 << 53
"""Largest number of a question: JavaScript's whole numbers end there."""
_SLIDERS = {"nodes": 12, "batch": 17, "sequence": 20}
"""Numbers with a slider over powers of two, up to this one."""
_NUMBERS = (
    ("layers", "layers"),
    ("width", "width"),
    ("heads", "heads"),
    ("kv_heads", "key-value heads (0: as many)"),
    ("head_size", "size of a head (0: width / heads)"),
    ("ffn", "feed-forward (0: 4 x width)"),
    ("vocab", "vocabulary"),
    ("experts", "experts (0: dense)"),
    ("active_experts", "experts of a token"),
    ("expert_ffn", "feed-forward of an expert"),
    ("shared_ffn", "feed-forward of shared experts"),
    ("dense_layers", "layers without experts"),
)

_form = macro("plan.html", "form")


class PlanServer(GuardedServer):
    """Serves the planner's page on this machine.

    Args:
        port: any free one for 0.
        question: with which the page begins.
        desk: that has questions answered.

    Raises:
        ConfigError: when the port can't be bound.
    """

    def __init__(self, port: int, question: PlanQuestion, desk: PlanDesk) -> None:
        self.desk = desk
        self.document = _document(question).encode()
        super().__init__((HOST, port), _PlanHandler, secrets.token_hex(32), f"--serve {port}")


class _PlanHandler(GuardedHandler):
    """One request."""

    server: PlanServer
    most_body_bytes = 4096

    def do_GET(self) -> None:
        """Answers with the page, or with its scripts."""
        if not self.names_this_server():
            return
        path = urlsplit(self.path).path
        if path in _SCRIPTS:
            self.send(HTTPStatus.OK, _SCRIPTS[path], SCRIPT)
        elif path != "/":
            self.refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        elif self.has_token() or self.is_same_user():
            self.send(HTTPStatus.OK, self.server.document, HTML)
        else:
            self.send(
                HTTPStatus.OK, login_page("The planner", "behind # in the address that it printed").encode(), HTML
            )

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Exchanges the token for a cookie, or plans."""
        if not self.names_this_server():
            return
        body = self.read_body()
        if body is None:
            return
        if not (self.has_token() or self.is_same_user()):
            self.refuse(HTTPStatus.UNAUTHORIZED, "the page's token is missing")
        # A page of another site can't leave its origin out.
        elif self.headers.get("Origin") is not None and not self.is_own_origin():
            self.refuse(HTTPStatus.FORBIDDEN, "another site's page asks")
        elif self.path == "/api/session" and self.has_token():
            self.start_session()
        elif self.path == "/api/plan":
            self._plan(body)
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "there is no such request")

    def _plan(self, body: JsonObject) -> None:
        try:
            answer = self.server.desk.answer(*_read_request(body))
        except Superseded as error:
            self.refuse(HTTPStatus.CONFLICT, str(error))
        except Unanswered as error:
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except ConfigError as error:
            self.refuse(HTTPStatus.BAD_REQUEST, str(error))
        else:
            if "refused" in answer:
                self.refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(answer["refused"]))
            else:
                self.send(HTTPStatus.OK, write_json(answer).encode(), JSON)


def _read_request(body: JsonObject) -> tuple[str, PlanQuestion, str, int]:
    """Returns kind, question, page and number of a request.

    Raises:
        ConfigError: for anything else.
    """
    kind, values, name, number = (body.get(key) for key in ("kind", "question", "page", "number"))
    if kind not in KINDS:
        raise ConfigError(f"kind: {' or '.join(KINDS)} is due")
    if not isinstance(name, str) or len(name) > 64:
        raise ConfigError("page: a name of up to 64 characters is due")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MOST_NUMBER:
        raise ConfigError(f"number: a whole number from 0 to {_MOST_NUMBER} is due")
    if not isinstance(values, dict):
        raise ConfigError("question: an object is due")
    question = PlanQuestion.from_dict(values)
    question.check_all()
    return kind, question, name, number


def _document(question: PlanQuestion) -> str:
    sections: list[Section] = [(QUESTION, [_question_form(question)]), *((heading, ()) for heading in _SECTIONS)]
    return page("meshwright plan", sections, (), "plan.js")


def _question_form(question: PlanQuestion) -> Markup:
    values = question.to_dict()

    def number(name: str, label: str) -> dict[str, object]:
        least, most = BOUNDS[name]
        field = {"name": name, "label": label, "least": least, "most": most, "value": values[name]}
        return {**field, "kind": "number", "slider": _SLIDERS.get(name)}

    def select(name: str, label: str, options: tuple[str, ...], empty: str = "") -> dict[str, object]:
        choices = [("", empty)] if empty else []
        choices += [(option, option) for option in options]
        return {"name": name, "label": label, "kind": "select", "options": choices, "value": values[name]}

    def switch(name: str, label: str) -> dict[str, object]:
        return {"name": name, "label": label, "kind": "switch", "value": values[name]}

    machines = [
        select("device", "device", devices()),
        number("nodes", "nodes"),
        number("per_node", "devices of a node (0: as usual)"),
        select("network", "network", networks(), "as usual for these nodes"),
    ]
    job = [
        number("batch", "rows of a batch"),
        number("sequence", "tokens of a row"),
        select("precision", "precision", PRECISIONS),
        select("objective", "least", OBJECTIVES),
        switch("compile", "compiled layers"),
    ]
    sizes = [number(name, label) for name, label in _NUMBERS]
    sizes += [switch("gated", "gated (Llama's block, else GPT's)"), switch("tied", "head is the embedding")]
    presets = [(name, write_json(sizes)) for name, sizes in page_presets().items()]
    return _form([("Machines", machines), ("Batch", job)], sizes, presets)


def serve_plans(question: PlanQuestion, port: int, started: Callable[[str], None]) -> None:
    """Serves the planner's page until Ctrl-C.

    Args:
        question: with which the page begins.
        port: any free one for 0.
        started: called with the address once the port is bound.

    Raises:
        ConfigError: when the port can't be bound.
    """
    process = PlanProcess()
    with PlanServer(port, question, PlanDesk(process)) as server:
        try:
            # Its imports are done before the first question.
            process.start()
            # What isn't a terminal may be a log, which others read.
            started(f"page: {server.url}" + (f"#token={server.token}" if sys.stderr.isatty() else ""))
            server.serve_forever()
        except KeyboardInterrupt:
            return
        finally:
            process.close()
