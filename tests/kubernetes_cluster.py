"""Kubernetes without a cluster: strict schemas of what it takes, a kubectl with a memory, pods as local processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMAS = Path(__file__).parent / "data" / "kubernetes" / "schemas.json"
_SCHEMA_WORDS = (
    "type",
    "enum",
    "pattern",
    "required",
    "minimum",
    "maximum",
    "maxItems",
    "minItems",
    "maxLength",
    "minLength",
)
_CONFIG_MAP = {
    "type": "object",
    "properties": {
        "apiVersion": {"enum": ["v1"]},
        "kind": {"enum": ["ConfigMap"]},
        "metadata": {},
        "data": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["apiVersion", "kind", "metadata"],
    "additionalProperties": False,
}
_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        "namespace": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        "labels": {
            "type": "object",
            "propertyNames": {"pattern": r"^([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"},
            "additionalProperties": {
                "type": "string",
                "pattern": r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$",
            },
        },
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}
"""Source: Kubernetes API conventions, metadata; only what a creator may set."""


def _strict(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Returns JSON Schema for a structural schema of Kubernetes, where a field that isn't named is an error."""
    if "$ref" in schema:
        target: Any = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        return _strict(target, root)
    result = {key: schema[key] for key in _SCHEMA_WORDS if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        pattern = result.pop("pattern", "")
        result["anyOf"] = [{"type": "integer"}, {"type": "string", "pattern": pattern}]
    if schema.get("format") == "int32":
        result |= {"minimum": schema.get("minimum", -(2**31)), "maximum": 2**31 - 1}
    if "items" in schema:
        result["items"] = _strict(schema["items"], root)
    if schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        rest = schema.get("additionalProperties")
        properties = {key: _strict(value, root) for key, value in schema.get("properties", {}).items()}
        result["properties"] = properties
        result["additionalProperties"] = _strict(rest, root) if isinstance(rest, dict) else False
    return result


def validators() -> dict[str, jsonschema.Draft202012Validator]:
    """Returns a validator by kind."""
    root = json.loads(SCHEMAS.read_text())
    schemas = {kind: _strict(schema, root) for kind, schema in root.items()} | {"ConfigMap": _CONFIG_MAP}
    groups = {"JobSet": "jobset.x-k8s.io/v1alpha2"}
    for kind, schema in schemas.items():
        schema["properties"]["metadata"] = _METADATA
        if kind != "ConfigMap":
            group = groups.get(kind, "trainer.kubeflow.org/v1alpha1")
            schema["properties"] |= {"apiVersion": {"enum": [group]}, "kind": {"enum": [kind]}}
            schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return {kind: jsonschema.Draft202012Validator(schema) for kind, schema in schemas.items()}


def errors_of(manifest: dict[str, Any], known: dict[str, jsonschema.Draft202012Validator]) -> list[str]:
    """Returns what a cluster would complain of."""
    return [f"{error.json_path}: {error.message}" for error in known[manifest["kind"]].iter_errors(manifest)]


KUBECTL = r'''#!{python}
"""Answers as kubectl does, of objects in a folder, and notes each call."""
import json, os, pathlib, sys
import yaml
root = pathlib.Path(os.environ["FAKE_CLUSTER"])
words = sys.argv[1:]
text = sys.stdin.read() if "--filename=-" in words else ""
with (root / "calls.jsonl").open("a") as file:
    file.write(json.dumps({{"words": words, "text": text}}) + "\n")
def fail(sentence):
    sys.stderr.write(sentence + "\n")
    sys.exit(1)
verb, dry = words[0], "--dry-run=server" in words
for line in (root / "fail").read_text().splitlines() if (root / "fail").exists() else ():
    pattern, _, sentence = line.partition("|")
    if pattern in " ".join(words) + text:
        fail(sentence)
plurals = {{"JobSet": "jobsets.jobset.x-k8s.io", "TrainJob": "trainjobs.trainer.kubeflow.org",
           "TrainingRuntime": "trainingruntimes.trainer.kubeflow.org", "ConfigMap": "configmaps"}}
if verb in ("create", "apply"):
    for made in filter(None, yaml.safe_load_all(text)):
        path = root / plurals[made["kind"]] / made["metadata"]["name"]
        if verb == "create" and path.exists():
            start = 'Error from server (AlreadyExists): error when creating "STDIN":'
            fail(f'{{start}} {{path.parent.name}} "{{path.name}}" already exists')
        if not dry:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(made))
        if "--output=json" in words:
            print(json.dumps(made))
elif verb in ("get", "delete"):
    values = [word for word in words[1:] if not word.startswith("-")]
    selector = words[words.index("--selector") + 1] if "--selector" in words else ""
    skip = {{words[words.index(flag) + 1] for flag in ("--selector", "--namespace") if flag in words}}
    resource, names = values[0], [value for value in values[1:] if value not in skip]
    folder, items = root / resource, []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        item = json.loads(path.read_text())
        labels = item["metadata"].get("labels", {{}})
        if path.name in names or (selector and labels.get(selector.split("=")[0]) == selector.split("=")[1]):
            items.append((path, item))
    if verb == "delete":
        for path, _ in items:
            path.unlink()
            if resource == "jobsets.jobset.x-k8s.io":
                for pod in (root / "pods").iterdir() if (root / "pods").is_dir() else ():
                    pod.unlink()
    elif names:
        print(json.dumps(items[0][1]) if items else "", end="")
    else:
        print(json.dumps({{"kind": "List", "items": [item for _, item in items]}}))
elif verb == "logs":
    since = next((word.split("=", 1)[1] for word in words if word.startswith("--since-time=")), "")
    for line in (root / "logs").read_text().splitlines() if (root / "logs").exists() else ():
        if line.split(" ")[1] >= since:
            print(line)
elif verb == "exec":
    print((root / "exec").read_text())
else:
    fail(f'error: unknown command "{{verb}}" for "kubectl"')
'''


class FakeCluster:
    """A ``kubectl`` on PATH that keeps objects in a folder and notes every call.

    Args:
        root: folder of the objects.
        monkeypatch: sets PATH.
    """

    def __init__(self, root: Path, monkeypatch: Any) -> None:
        self.root = root
        program = root / "bin" / "kubectl"
        program.parent.mkdir(parents=True)
        program.write_text(KUBECTL.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        monkeypatch.setenv("FAKE_CLUSTER", str(root))

    def calls(self) -> list[dict[str, Any]]:
        """Returns the words and the input of each call."""
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def fail(self, pattern: str, sentence: str) -> None:
        """Lets calls whose words or input have a text in them fail with a sentence."""
        (self.root / "fail").write_text(f"{pattern}|{sentence}\n")

    def objects(self, resource: str) -> dict[str, Any]:
        """Returns the objects of a resource by name."""
        folder = self.root / resource
        return {path.name: json.loads(path.read_text()) for path in folder.iterdir()} if folder.is_dir() else {}

    def put(self, resource: str, value: dict[str, Any]) -> None:
        """Writes an object."""
        (self.root / resource).mkdir(exist_ok=True)
        (self.root / resource / value["metadata"]["name"]).write_text(json.dumps(value))


class Pod:
    """A container of a rendered job as a local process, started again as the kubelet does.

    Args:
        manifests: the rendered objects.
        index: completion index of the pod.
        root: folder for the files that the pod would have mounted, and its output.
    """

    def __init__(self, manifests: list[dict[str, Any]], index: int, root: Path) -> None:
        (job,) = (made for made in manifests if made["kind"] == "JobSet")
        template = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        self._container, self._restarts = template["containers"][0], template["restartPolicy"] == "OnFailure"
        self._grace_s = template["terminationGracePeriodSeconds"]
        self.index, self.starts, self._output = index, 0, root / f"pod-{index}.log"
        self._mounts = {}
        for made in manifests:
            if made["kind"] == "ConfigMap":
                for name, text in made["data"].items():
                    path = root / "mounted" / name
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(text)
                    self._mounts[f"/etc/meshwright/{name}"] = str(path)
        self.start()

    def start(self) -> None:
        """Starts the container."""
        variables = {"JOB_COMPLETION_INDEX": str(self.index)}
        for variable in self._container["env"]:
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            # Each pod has an address of its own; this machine's loopback network has enough.
            value = (
                f"fd00::{self.index + 2},127.0.0.{self.index + 2}" if source == "status.podIPs" else variable["value"]
            )
            variables[variable["name"]] = _expand(value, variables)
        words = [_expand(word, variables) for word in self._container["command"]]
        words = [self._mounts.get(word, word) for word in words]
        self.starts += 1
        with self._output.open("ab") as file:
            self.process = subprocess.Popen(
                words, cwd=self._container["workingDir"], env=os.environ | variables, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def poll(self) -> int | None:
        """Returns the exit status of a container that has ended well; starts it again when it failed."""
        status = self.process.poll()
        if status in (None, 0) or not self._restarts:
            return status
        self.kill()
        self.start()
        return None

    def text(self) -> str:
        """Returns what it printed."""
        return self._output.read_text(errors="replace")

    def kill(self) -> None:
        """Kills every process of the container, as its cgroup's end does."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, ProcessLookupError):
                    session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                    if session == self.process.pid:
                        os.kill(int(entry.name), signal.SIGKILL)
        self.process.wait(30)

    def terminate(self) -> int:
        """Sends SIGTERM as the kubelet does, waits for the grace, and returns the exit status."""
        self.process.terminate()
        return self.process.wait(self._grace_s)


def run_to_end(pods: list[Pod], limit_s: float) -> None:
    """Plays kubelet until every container has ended well."""
    deadline = time.monotonic() + limit_s
    # Each is looked at, since a look starts a container again.
    while None in [pod.poll() for pod in pods]:
        assert time.monotonic() < deadline, "\n".join(pod.text() for pod in pods)
        time.sleep(0.1)


def _expand(text: str, variables: dict[str, str]) -> str:
    """Returns a text with ``$(NAME)`` expanded. Source: Kubernetes, third_party/forked/golang/expansion."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def load(text: str) -> list[dict[str, Any]]:
    """Returns the documents of a YAML stream."""
    return [made for made in yaml.safe_load_all(text) if made]
