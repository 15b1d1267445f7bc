"""The part of Kubernetes' API that kubectl asks for, over objects in memory, strict by the published schemas."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kubernetes_cluster import errors_of, validators

GROUPS = {
    "": ("v1", {"configmaps": "ConfigMap", "pods": "Pod"}),
    "jobset.x-k8s.io": ("v1alpha2", {"jobsets": "JobSet"}),
    "trainer.kubeflow.org": ("v1alpha1", {"trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime"}),
}


class ApiServer:
    """Serves objects on a port of this machine; what isn't of the schemas is refused in the API's form.

    Args:
        groups: names of the API groups that this cluster has.
    """

    def __init__(self, groups: tuple[str, ...] = tuple(GROUPS)) -> None:
        self.groups = {name: GROUPS[name] for name in groups}
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        """Objects by namespace, resource and name."""
        self.requests: list[str] = []
        """Method and path of each request."""
        self.logs = ""
        self._known = validators()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def kubeconfig(self) -> str:
        """Returns the text of a kubeconfig for this server."""
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}
        users = [{"name": "u", "user": {}}]
        return json.dumps(
            {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": users,
             "current-context": "c"}
        )  # fmt: skip

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def discovery(self, path: str) -> dict[str, Any] | None:
        """Returns what kubectl asks about the API itself; None for other paths."""
        if path == "/version":
            return {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = []
            for name, (version, _) in self.groups.items():
                known = {"groupVersion": f"{name}/{version}", "version": version}
                groups += [{"name": name, "versions": [known], "preferredVersion": known}] if name else []
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        roots = {_root(name, version): (name, version, kinds) for name, (version, kinds) in self.groups.items()}
        if path == "/openapi/v3":
            return {"paths": {root[1:]: {"serverRelativeURL": f"/openapi/v3{root}"} for root in roots}}
        if path.startswith("/openapi/v3/"):
            return _open_api(*roots[path.removeprefix("/openapi/v3")])
        if path not in roots:
            return None
        name, version, kinds = roots[path]
        resources = [
            {
                "name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind,
                "verbs": ["create", "delete", "get", "list", "patch", "deletecollection"],
            }
            for plural, kind in kinds.items()
        ]  # fmt: skip
        return {"kind": "APIResourceList", "groupVersion": f"{name}/{version}".strip("/"), "resources": resources}

    def change(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Carries out a request for objects; returns the HTTP status and the answer."""
        for name, (version, kinds) in self.groups.items():
            root = _root(name, version)
            if not path.startswith(f"{root}/"):
                continue
            parts = path.removeprefix(f"{root}/").split("/")
            namespace = parts[1] if parts[0] == "namespaces" else ""
            plural, *rest = parts[2:] if namespace else parts
            if plural not in kinds:
                break
            group_version = f"{name}/{version}".strip("/")
            if method == "POST":
                return self._create(namespace, plural, query, body)
            if rest:
                return self._one(method, (namespace, plural, rest[0]), body)
            items = self._select(namespace, plural, query.get("labelSelector", ""))
            if method == "DELETE":
                for key in items:
                    del self.objects[key]
            kind = f"{kinds[plural]}List"
            return 200, {"kind": kind, "apiVersion": group_version, "metadata": {}, "items": list(items.values())}
        return _status(404, "NotFound", "the server could not find the requested resource")

    def _create(
        self, namespace: str, plural: str, query: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        key = (namespace, plural, body["metadata"]["name"])
        if query.get("fieldValidation") != "Strict":
            return _status(400, "BadRequest", "the test wants strict validation")
        if key in self.objects:
            return _status(409, "AlreadyExists", f'{plural} "{key[2]}" already exists')
        metadata = {name: value for name, value in body["metadata"].items() if name != "creationTimestamp"}
        errors = errors_of({**body, "metadata": metadata}, self._known)
        if errors:
            return _status(400, "BadRequest", "strict decoding error: " + "; ".join(errors))
        # A server refuses a namespace in the object that isn't the request's.
        if metadata.get("namespace", namespace) != namespace:
            return _status(400, "BadRequest", "the namespace of the object does not match the request")
        made = {**body, "metadata": {**metadata, "namespace": namespace, "uid": str(len(self.requests))}}
        if query.get("dryRun") != "All":
            self.objects[key] = made
        return 201, made

    def _one(self, method: str, key: tuple[str, str, str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if key not in self.objects:
            return _status(404, "NotFound", f'{key[1]} "{key[2]}" not found')
        if method == "DELETE":
            return 200, self.objects.pop(key)
        if method == "PATCH":
            self.objects[key] = self.objects[key] | {name: body[name] for name in body if name != "metadata"}
        return 200, self.objects[key]

    def _select(self, namespace: str, plural: str, selector: str) -> dict[tuple[str, str, str], dict[str, Any]]:
        label, _, value = selector.partition("=")
        return {
            key: made
            for key, made in self.objects.items()
            if key[1] == plural
            and namespace in ("", key[0])
            and (not label or made["metadata"].get("labels", {}).get(label) == value)
        }


def _root(group: str, version: str) -> str:
    return f"/apis/{group}/{version}" if group else f"/api/{version}"


def _open_api(group: str, version: str, kinds: dict[str, str]) -> dict[str, Any]:
    """Returns what of an OpenAPI document kubectl looks at: that the server validates fields by itself."""
    paths = {}
    for plural, kind in kinds.items():
        operation = {
            "parameters": [{"name": name, "in": "query"} for name in ("dryRun", "fieldValidation")],
            "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
        }
        path = f"{_root(group, version)}/namespaces/{{namespace}}/{plural}"
        paths |= {path: {"post": operation}, f"{path}/{{name}}": {"patch": operation}}
    return {"openapi": "3.0.0", "info": {"title": "t", "version": "v"}, "paths": paths}


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return code, {**status, "message": message}


def _handler(server: ApiServer) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            server.requests.append(f"{self.command} {self.path}")
            if url.path.endswith("/log"):
                self._answer(200, server.logs.encode(), "text/plain")
                return
            found = server.discovery(url.path) if self.command == "GET" else None
            status, answer = (200, found) if found else server.change(self.command, url.path, query, body)
            self._answer(status, json.dumps(answer).encode(), "application/json")

        do_GET = do_POST = do_PATCH = do_DELETE = _serve

        def _answer(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    return Handler
