"""Kubernetes without Kubernetes: manifests against published schemas, what is refused, and what kubectl is told."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.errors import LaunchError
from meshwright.launch.kubernetes import pod_place
from tests.kubernetes_cluster import FakeCluster, errors_of, load, validators

BASE = ["train", "--on", "kubernetes", "--kubernetes.image", "reg.io/mw:1", "--kubernetes.claim", "vol"]
RUN = [*BASE, "--run", "/shared/runs/First_one", "--kubernetes.nodes", "2", "--kubernetes.gpus-per-node", "4"]
JOBSETS = "jobsets.jobset.x-k8s.io"
KNOWN = validators()
_MANY = """
--kubernetes.memory 480Gi --kubernetes.shm 64Gi --kubernetes.cpus-per-node 32 --kubernetes.resources rdma/hca=1 x.io/y=2
--kubernetes.namespace team-a --kubernetes.name big --kubernetes.workdir /shared/code --kubernetes.python python3.12
--kubernetes.setup date --kubernetes.env NCCL_DEBUG=INFO A=$(B) --kubernetes.env-secrets hub --kubernetes.key-secret k.1
--kubernetes.pull-secret reg --kubernetes.service-account trainer --kubernetes.user 1000 --kubernetes.priority high
--kubernetes.queue gpus --kubernetes.node-selector a.b/c=h100 d= --kubernetes.tolerations nvidia.com/gpu a=b:NoSchedule
--kubernetes.topology topology.kubernetes.io/zone --kubernetes.lost-s 0 --kubernetes.restarts 2000000000
"""
MANY = _MANY.split()


@pytest.fixture(autouse=True)
def outside_of_pods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MESHWRIGHT_PODS", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return FakeCluster(tmp_path / "cluster", monkeypatch)


def render(capsys: pytest.CaptureFixture[str], *words: str, base: list[str] = RUN) -> list[dict[str, Any]]:
    assert main([*base, "--dry-run", *words]) == 0
    return load(capsys.readouterr().out)


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    spec = job["spec"] if job["kind"] == "JobSet" else job["spec"]["template"]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("recipe", [False, True])
@pytest.mark.parametrize("more", [[], MANY, [*MANY, "--kubernetes.exclusive"], ["--devices", "2"]])
def test_manifests_fit_the_published_schemas(
    kind: str, recipe: bool, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "# with: colons, and 'quotes'\n[train]\nsteps = 9\n"
    (tmp_path / "recipe.toml").write_text(text)
    base = ["train", str(tmp_path / "recipe.toml"), *RUN[1:]] if recipe else RUN
    manifests = render(capsys, "--kubernetes.kind", kind, *more, base=base)
    assert [made["kind"] for made in manifests] == [
        *(["ConfigMap"] if recipe else []), *(["JobSet"] if kind == "jobset" else ["TrainingRuntime", "TrainJob"]),
    ]  # fmt: skip
    for made in manifests:
        assert errors_of(made, KNOWN) == []
    if recipe:
        assert manifests[0]["data"] == {"recipe.toml": text}
    container = pod_of(manifests[-1] if kind == "jobset" else manifests[-2])["containers"][0]
    assert ("/etc/meshwright/recipe.toml" in " ".join(container["command"])) == recipe


def test_planted_errors_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """The schemas above refuse what a hand may get wrong."""
    (jobset,) = render(capsys)
    runtime, trainjob = render(capsys, "--kubernetes.kind", "trainjob")
    job: Callable[[Any], Any] = lambda made: made["spec"]["replicatedJobs"][0]["template"]["spec"]  # noqa: E731
    container: Callable[[Any], Any] = lambda made: job(made)["template"]["spec"]["containers"][0]  # noqa: E731
    plants: list[Callable[[Any], Any]] = [
        lambda made: job(made).update(backoffLimit="40"),
        lambda made: job(made).update(backoffLimit=2**31),
        lambda made: job(made).update(restartPolicy="OnFailure"),
        lambda made: job(made)["template"]["spec"].update(terminationGracePeriod=30),
        lambda made: container(made)["env"].append({"name": "A", "value": 1}),
        lambda made: container(made)["resources"]["limits"].update({"memory": "480 GB"}),
        lambda made: container(made)["volumeMounts"][0].pop("mountPath"),
        lambda made: container(made).pop("name"),
        lambda made: made["spec"].update(replicas=2),
        lambda made: made["spec"]["network"].update(enableDNSHostnames="true"),
        lambda made: made["spec"]["failurePolicy"].update(restartStrategy="InPlace"),
        lambda made: made["metadata"].update(name="First"),
        lambda made: made.update(apiVersion="jobset.x-k8s.io/v1"),
    ]
    for plant in plants:
        made = copy.deepcopy(jobset)
        plant(made)
        assert errors_of(made, KNOWN), plant
    trainjob["spec"]["trainer"]["nodes"] = 2
    runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["retries"] = 1
    assert errors_of(trainjob, KNOWN) and errors_of(runtime, KNOWN)


def test_a_job_leaves_recovery_to_the_supervisors(capsys: pytest.CaptureFixture[str]) -> None:
    (made,) = render(capsys, "--launch.stop-s", "900", "--kubernetes.shm", "8Gi", "--kubernetes.memory", "64Gi")
    (group,) = made["spec"]["replicatedJobs"]
    job, pod = group["template"]["spec"], pod_of(made)
    assert (group["replicas"], job["parallelism"], job["completions"], job["completionMode"]) == (1, 2, 2, "Indexed")
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 0} and pod["restartPolicy"] == "OnFailure"
    assert job["backoffLimit"] == 40 and pod["terminationGracePeriodSeconds"] >= 900
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"] == "shm" and volumes[mounts["/shared"]]["persistentVolumeClaim"] == {"claimName": "vol"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "memory": "64Gi"}
    words = container["command"]
    assert words[:4] == ["python", "-m", "meshwright", "train"] and words[-2:] == ["--on", "kubernetes"]
    assert words[words.index("--devices") + 1] == "8" and words[words.index("--run-dir") + 1] == RUN[8]
    assert int(words[words.index("--launch.owner-s") + 1]) >= 900, "waits for the pod that it replaces"


def test_no_secret_stands_in_a_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    (made,) = render(capsys, "--kubernetes.key-secret", "run-key", "--kubernetes.env-secrets", "hub")
    (container,) = pod_of(made)["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert {"name": "key", "secret": {"secretName": "run-key"}} in pod_of(made)["volumes"]
    assert {"name": "MESHWRIGHT_KEY", "value": "/etc/meshwright-key/key"} in container["env"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--kubernetes.nodes 0", "kubernetes.nodes = 0"),
        ("--kubernetes.name First", "small letters, digits and -, a letter first"),
        (f"--kubernetes.name {'a' * 55}", "give a shorter --kubernetes.name"),
        ("--kubernetes.namespace a.b", "no name by RFC 1123"),
        ("--kubernetes.claim Vol", "no name by RFC 1123"),
        ("--kubernetes.memory 480GB", "a number and a unit, as 480Gi"),
        ("--kubernetes.memory 0Gi", "a number and a unit"),
        ("--kubernetes.memory 8Gi", "lies in the pod's memory"),
        ("--kubernetes.resources cpu=1", "set by other settings"),
        ("--kubernetes.env RANK=1", "set by the launcher"),
        ("--kubernetes.env lonely", "is no variable"),
        ("--kubernetes.node-selector gpu", "is no label"),
        ("--kubernetes.tolerations a=b:Never", "by the taint"),
        ("--kubernetes.exclusive", "needs kubernetes.topology"),
        ("--kubernetes.mount shared", "an absolute path"),
        ("--kubernetes.mount /dev", "would hide"),
        ("--kubernetes.image= ", "needs --kubernetes.image"),
        ("--kubernetes.claim= ", "needs --kubernetes.claim"),
        ("--run runs/first", "isn't under kubernetes.mount = /shared"),
        ("--run /sharedx/first", "isn't under kubernetes.mount"),
        ("--run /shared/../home/first", "isn't under kubernetes.mount"),
        ("--devices 3", "equally many ranks"),
        ("--devices 16", "have 8 GPUs"),
        ("--layout shard=4", "multiply to 4"),
        ("--recovery.copies 2", "recovery.copies = 2"),
        ("--trials 2", "drop trials"),
        ("--recovery.enabled false", "drop --recovery.enabled false"),
        ("--nodes 2 --node 0 --meet here", "numbers the nodes by itself"),
        ("--hostfile hosts", "--on ssh and --hostfile"),
        ("--kubernetes.kind pods", "pods"),
        ("--json", "meshwright status RUN --json"),
    ],
)
def test_settings_are_refused_before_kubectl_is_called(
    words: str, sentence: str, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, *words.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert cluster.calls() == []


def test_ranks_are_never_guessed_from_cores_that_a_pod_sees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--run", "/shared/a", "--dry-run"]) == 2
    assert "how many ranks?" in capsys.readouterr().err


def test_a_machine_without_kubectl_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(RUN) == 1
    assert "kubectl isn't here" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_job_is_created_asked_about_and_ended(
    kind: str, cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text("[train]\nsteps = 9\n")
    command = ["train", "recipe.toml", *RUN[1:], "--kubernetes.kind", kind, "--kubernetes.namespace", "team"]
    assert main(command) == 0
    assert f"{kind}/first-one trains in /shared/runs/First_one" in capsys.readouterr().out
    resource = JOBSETS if kind == "jobset" else "trainjobs.trainer.kubeflow.org"
    created = cluster.objects(resource)["first-one"]
    assert errors_of(created, KNOWN) == [] and "first-one-recipe" in cluster.objects("configmaps")
    asked = [call["words"] for call in cluster.calls()]
    assert all("team" in words for words in asked if words[0] in ("create", "apply", "get"))
    assert ("--dry-run=server" in str(asked)) == (kind == "jobset"), "a TrainJob's runtime must be there first"

    assert main(command) == 1
    assert "hasn't ended; meshwright cancel /shared/runs/First_one" in capsys.readouterr().err
    cluster.put(resource, created | {"status": {"conditions": [{"type": "Failed", "status": "True", "message": "m"}]}})
    assert main([*command, "--run", "/shared/other/first-one"]) == 1
    assert "is there, the run /shared/runs/First_one" in capsys.readouterr().err
    assert main(["status", RUN[8], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["state"] == "FAILED"
    assert main(command) == 0, "an ended job of the same run makes way"

    capsys.readouterr()
    assert main(["cancel", RUN[8]]) == 0
    assert "ended; its directory isn't here" in capsys.readouterr().out
    assert not cluster.objects(resource) and not cluster.objects("configmaps")
    assert not cluster.objects("trainingruntimes.trainer.kubeflow.org")
    assert main(["status", RUN[8]]) == 2


def test_what_the_cluster_refuses_is_said_in_its_words(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text("[train]\nsteps = 9\n")
    command = ["train", "recipe.toml", *RUN[1:]]
    cluster.fail("--dry-run=server", 'Error from server (NotFound): namespaces "team" not found')
    assert main(command) == 1
    assert 'Kubernetes refuses: namespaces "team" not found' in capsys.readouterr().err
    assert not cluster.objects("configmaps")
    cluster.fail(
        "create --output=json", 'Error from server (Forbidden): error when creating "STDIN": exceeded quota: q'
    )
    assert main(command) == 1
    assert "Kubernetes refuses: exceeded quota: q" in capsys.readouterr().err
    assert not cluster.objects("configmaps"), "nothing is left"
    assert not any(call["words"][0] == "delete" and JOBSETS in call["words"] for call in cluster.calls())
    cluster.fail("get", "Unable to connect to the server: dial tcp: lookup k8s: no such host")
    assert main(command) == 1
    assert "no such host" in capsys.readouterr().err


def pod(index: int, **status: Any) -> dict[str, Any]:
    labels = {"jobset.sigs.k8s.io/jobset-name": "first-one"}
    containers = [{"command": ["/bin/sh", "-c", "date\nexec python3.12 -m meshwright train"]}]
    spec = {"nodeName": f"gpu-{index}", "containers": containers}
    return {"metadata": {"name": f"first-one-node-0-{index}-x7k2p", "labels": labels}, "spec": spec, "status": status}


def test_status_and_logs_come_from_the_pods(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    assert main(["status", RUN[8], "--json"]) == 0
    status = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status["state"], status["job"]["state"]) == ("queued", "PENDING")
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    cluster.put("pods", pod(0, phase="Pending", containerStatuses=[waiting]))
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient nvidia.com/gpu"}
    cluster.put("pods", pod(1, phase="Pending", conditions=[unschedulable]))
    assert main(["status", RUN[8]]) == 0
    shown = capsys.readouterr().out
    assert "ImagePullBackOff: no such image; 0/3 nodes: Insufficient nvidia.com/gpu" in shown

    for index in range(2):
        cluster.put("pods", pod(index, phase="Running"))
    inside = status | {"state": "running", "step": 7, "steps": 9, "loss": 2.5, "job": None}
    (cluster.root / "exec").write_text(json.dumps(inside))
    assert main(["status", RUN[8]]) == 0
    shown = capsys.readouterr().out
    assert "7 of 9, loss 2.5" in shown and "RUNNING, on 2 of 2 pods, gpu-0, gpu-1" in shown
    (ask,) = [call["words"] for call in cluster.calls() if call["words"][0] == "exec"]
    assert ask[ask.index("--") + 1 :] == ["python3.12", "-m", "meshwright", "status", RUN[8], "--json"]
    (cluster.root / "exec").write_text('{"state": "running"}')
    assert main(["status", RUN[8]]) == 0, "a pod's answer of another kind is none"

    stamp = "2026-01-01T00:00:0{}.000000000Z"
    lines = [f"[pod/first-one-node-0-{index}-x7k2p/node] {stamp.format(index)} step {index}" for index in range(2)]
    (cluster.root / "logs").write_text("\n".join([*lines, "error: container is waiting"]) + "\n")
    capsys.readouterr()
    assert main(["logs", RUN[8]]) == 0
    assert capsys.readouterr().out.splitlines() == ["node 0: step 0", "node 1: step 1"]


def test_logs_are_followed_without_repetition(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    made = cluster.objects(JOBSETS)["first-one"]
    line = "[pod/first-one-node-0-0-x7k2p/node] 2026-01-01T00:00:0{}.000000000Z step {}\n"
    (cluster.root / "logs").write_text(line.format(1, 1) + line.format(2, 2))
    from meshwright.jobs.run_control import run_output

    lines = run_output(Path(RUN[8]), follow=True)
    assert [next(lines), next(lines)] == ["node 0: step 1", "node 0: step 2"]
    (cluster.root / "logs").write_text("".join(line.format(step, step) for step in (1, 2, 3)))
    cluster.put(JOBSETS, made | {"status": {"conditions": [{"type": "Completed", "status": "True"}]}})
    assert list(lines) == ["node 0: step 3"]
    assert any("--since-time=2026-01-01T00:00:02.000000000Z" in call["words"] for call in cluster.calls())


def test_a_run_directory_that_is_here_too_has_a_record(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mount, run = tmp_path / "volume", tmp_path / "volume" / "first"
    mount.mkdir()
    words = [*BASE, "--kubernetes.mount", str(mount), "--run", str(run), "--devices", "1"]
    assert main(words) == 0
    assert json.loads((run / "launch" / "job.json").read_text())["job"] == "jobset/first"
    (run / "config.toml").write_text("[train]\nsteps = 9\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 2.5, "tokens_per_s": 10.0}) + "\n")
    capsys.readouterr()
    assert main(["cancel", str(run), "--now"]) == 0
    assert "ended after step 3" in capsys.readouterr().out
    deleted = [call["words"] for call in cluster.calls() if call["words"][:2] == ["delete", "pods"]]
    assert len(deleted) == 1 and "--now" in deleted[0]
    cluster.fail("get", "Unable to connect to the server")
    assert main(["cancel", str(run)]) == 1
    assert "Unable to connect" in capsys.readouterr().err, "not: nobody trains"


def test_a_directory_of_another_config_is_seen_before_a_pod_sees_it(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "volume" / "first"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("[train]\nbatch = 3\n")
    words = [*BASE, "--kubernetes.mount", str(run.parent), "--run", str(run), "--devices", "1"]
    assert main(words) == 2
    assert "belongs to another config" in capsys.readouterr().err and cluster.calls() == []


def test_a_process_finds_its_place_in_a_job() -> None:
    values = {"MESHWRIGHT_PODS": "3", "JOB_COMPLETION_INDEX": "1", "MESHWRIGHT_POD_IPS": "fd00::7,10.0.0.7"}
    assert pod_place({}) is None
    place = pod_place(values)
    assert place is not None and (place.node, place.nodes, place.address) == (1, 3, "10.0.0.7")
    for name, value, sentence in (
        ("JOB_COMPLETION_INDEX", "", "isn't complete"),
        ("JOB_COMPLETION_INDEX", "3", "in a job of 3 pods"),
        ("MESHWRIGHT_POD_IPS", "fd00::7", "no IPv4 address"),
    ):
        with pytest.raises(LaunchError, match=sentence):
            pod_place(values | {name: value})


def test_the_key_of_a_secret_becomes_a_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.jobs.kubernetes import _copy_key
    from meshwright.transport.key import read_key

    (tmp_path / "..data").write_text("ab" * 32)
    (tmp_path / "key").symlink_to(tmp_path / "..data")
    os.chmod(tmp_path / "..data", 0o644)
    with pytest.raises(LaunchError):
        read_key(tmp_path / "key")
    copied = _copy_key(str(tmp_path / "key"))
    try:
        assert read_key(copied).secret == bytes.fromhex("ab" * 32)
    finally:
        copied.unlink()
