"""The true kubectl, against an API server in memory that is strict by the published schemas."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import LaunchError
from meshwright.launch.kubernetes import run_kubectl
from tests.kubernetes_api import GROUPS, ApiServer
from tests.unit.test_kubernetes import MANY, RUN, pod

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl isn't here"),
]
START = Callable[..., ApiServer]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[START]:
    servers: list[ApiServer] = []

    def begin(*groups: str) -> ApiServer:
        servers.append(ApiServer(groups or tuple(GROUPS)))
        (tmp_path / "config").write_text(servers[-1].kubeconfig())
        return servers[-1]

    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    # kubectl keeps what it knows of a server under the home directory.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MESHWRIGHT_PODS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text("[train]\nsteps = 9\n")
    yield begin
    for server in servers:
        server.close()


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("more", [[], MANY])
def test_a_job_s_life(kind: str, more: list[str], start: START, capsys: pytest.CaptureFixture[str]) -> None:
    group = "jobset.x-k8s.io" if kind == "jobset" else "trainer.kubeflow.org"
    server = start("", group)
    namespace, name = ("team-a", "big") if more else ("team", "first-one")
    command = ["train", "recipe.toml", *RUN[1:], "--kubernetes.kind", kind, *more]
    assert main(command) == 0, capsys.readouterr().err
    assert (namespace, f"{kind}s", name) in server.objects
    assert any("dryRun=All" in request for request in server.requests) == (kind == "jobset")
    assert server.objects[namespace, "configmaps", f"{name}-recipe"]["data"] == {"recipe.toml": "[train]\nsteps = 9\n"}
    assert main(command) == 1 and "hasn't ended" in capsys.readouterr().err

    # The volume isn't here: the job is found by its label, in whatever namespace it is.
    made = pod(0, phase="Running")
    made["metadata"] |= {"namespace": namespace, "labels": {"jobset.sigs.k8s.io/jobset-name": name}}
    made["spec"]["containers"][0]["name"] = "node"
    server.objects[namespace, "pods", made["metadata"]["name"]] = {"apiVersion": "v1", "kind": "Pod", **made}
    server.logs = "2026-01-01T00:00:01.000000000Z step 1\n2026-01-01T00:00:02.000000000Z step 2\n"
    assert main(["logs", RUN[8]]) == 0
    assert [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["step 1", "step 2"]
    assert any("timestamps=true" in request and "/log?" in request for request in server.requests)
    assert main(["status", RUN[8], "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert (job["job"], job["state"], job["nodes"]) == (f"{kind}/{name}", "RUNNING", "1 of 1 pods, gpu-0")

    # An ended job makes way for the next one of the same run.
    server.objects[namespace, f"{kind}s", name]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    server.objects.pop((namespace, "pods", made["metadata"]["name"]))
    assert main(command) == 0, capsys.readouterr().err
    assert "status" not in server.objects[namespace, f"{kind}s", name]
    assert main(["cancel", RUN[8], "--now"]) == 0, capsys.readouterr().err
    assert server.objects == {}


def test_the_server_is_strict(start: START, capsys: pytest.CaptureFixture[str]) -> None:
    server = start()
    assert main([*RUN, "--dry-run"]) == 0
    text = capsys.readouterr().out
    with pytest.raises(LaunchError, match=r"strict decoding error: .*'restarts' was unexpected"):
        run_kubectl("create", "--filename=-", text=text.replace("replicas: 1", "replicas: 1\n    restarts: 2"))
    assert server.objects == {}
    run_kubectl("create", "--filename=-", text=text)
    assert list(server.objects) == [("team", "jobsets", "first-one")]


def test_the_record_keeps_the_namespace(start: START, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, run = start(), tmp_path / "volume" / "first"
    run.parent.mkdir()
    assert main([*RUN, "--kubernetes.mount", str(run.parent), "--run", str(run)]) == 0, capsys.readouterr().err
    assert json.loads((run / "launch" / "job.json").read_text())["namespace"] == "team"
    assert [key[0] for key in server.objects] == ["team"]


def test_a_cluster_without_the_kind_of_job_says_so(start: START, capsys: pytest.CaptureFixture[str]) -> None:
    server = start("")
    assert main(["train", "recipe.toml", *RUN[1:]]) == 1
    assert "jobset" in capsys.readouterr().err and server.objects == {}
    assert main(["status", RUN[8]]) == 2, "no job, no directory"
