"""``meshwright plan --serve``: who may ask, what may be asked, that searches don't pile up, what the page shows."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.cluster import catalogue
from meshwright.errors import ConfigError
from meshwright.jobs import plan_desk
from meshwright.jobs.plan_desk import PlanDesk, PlanProcess, Superseded, Unanswered
from meshwright.jobs.plan_model import model_of_sizes
from meshwright.jobs.plan_question import BOUNDS, MOST_DEVICES, PlanQuestion, networks, page_presets
from meshwright.jobs.plan_server import PlanServer
from meshwright.jobs.plan_worker import answer_line
from meshwright.jobs.requests import PlanConfig
from meshwright.monitor import guarded_server
from meshwright.spec.layout_fields import PRECISIONS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SMALL = {"layers": 4, "width": 512, "heads": 8, "kv_heads": 0, "ffn": 0, "vocab": 32000, "batch": 16, "sequence": 512}
STAND_IN = """
import json, sys, time
for line in sys.stdin:
    message = json.loads(line)
    batch = message["question"]["batch"]
    if batch == 13:
        sys.exit(3)
    open(sys.argv[1], "a").write(f"{message['kind']} {batch}\\n")
    while batch >= 1000:
        time.sleep(0.01)
    sections = {"head": f"<p>{message['kind']} {batch}</p>"}
    print(json.dumps({"sections": sections, "state": "done"}), flush=True)
"""
"""A worker that answers at once, never (from 1,000 rows on), or dies (of 13 rows); it writes down what it is asked."""


@dataclasses.dataclass
class Site:
    """A page that is served in a thread."""

    server: PlanServer
    asked: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def ask(self, path: str = "/api/plan", body: object = None, method: str = "", **headers: str):
        """Asks without anything that a browser or a token would add."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if data is not None:
            sent = {"Content-Type": "application/json"} | sent
        connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
        answer = connection.getresponse()
        answer.text = answer.read().decode()
        connection.close()
        return answer

    def plan(self, number: int = 1, page: str = "a", kind: str = "plan", **fields: object):
        return self.ask(body={"kind": kind, "page": page, "number": number, "question": fields})

    def lines(self) -> list[str]:
        return self.asked.read_text().splitlines() if self.asked.exists() else []

    def wait_for(self, line: str) -> None:
        """Waits until the worker was asked something."""
        while line not in self.lines():
            time.sleep(0.01)


@contextlib.contextmanager
def site(process: PlanProcess, asked: Path, question: PlanQuestion | None = None) -> Iterator[Site]:
    running = PlanServer(0, question or PlanQuestion(), PlanDesk(process))
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Site(running, asked)
    finally:
        running.shutdown()
        running.server_close()
        process.close()
        thread.join()


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Site]:
    asked = tmp_path / "asked"
    with site(PlanProcess((sys.executable, "-c", STAND_IN, str(asked)), limit_s=30.0), asked) as running:
        yield running


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(PlanProcess(), tmp_path_factory.mktemp("serve") / "asked") as running:
        yield running


def test_it_is_bound_to_this_machine_alone(stand_in: Site) -> None:
    assert stand_in.server.server_address[0] == "127.0.0.1"
    assert stand_in.server.url.startswith("http://127.0.0.1:")
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
        if not own.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((own, stand_in.server.server_address[1]), timeout=2)


def test_another_user_needs_the_token(stand_in: Site, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    assert stand_in.plan().status == 200
    monkeypatch.setattr(guarded_server, "_owner_of", lambda *_: 12345)
    token, cookie = stand_in.server.token, stand_in.server.cookie
    assert stand_in.plan().status == 401
    front = stand_in.ask("/")
    assert "token" in front.text and "nodes" not in front.text and token not in front.text
    for wrong in (
        {"Authorization": "Bearer " + "0" * 64},
        {"Cookie": f"{cookie}="},
        {"Cookie": f"{cookie}={'0' * 64}"},
    ):
        assert stand_in.ask("/api/session", {}, **wrong).status == 401
    body = {"kind": "plan", "page": "a", "number": 1, "question": {}}
    assert stand_in.ask(body=body, Authorization=f"Bearer {token}").status == 200
    login = stand_in.ask("/api/session", {}, Authorization=f"Bearer {token}", Origin=f"http://{stand_in.address}")
    assert login.status == 204 and "HttpOnly" in login.getheader("Set-Cookie")
    assert 'name="nodes"' in stand_in.ask("/", Cookie=f"{cookie}={token}").text
    captured = capfd.readouterr()
    assert token not in captured.out + captured.err


def test_pages_of_other_sites_and_other_names_are_refused(stand_in: Site) -> None:
    body = {"kind": "plan", "page": "a", "number": 1, "question": {}}
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert stand_in.ask(body=body, Origin=origin).status == 403
    assert stand_in.ask(body=body, Origin=f"http://{stand_in.address}").status == 200
    assert stand_in.ask(body=body, Host="evil.example").status == 421
    assert stand_in.ask("/", Host="evil.example").status == 421
    # A form of another site can send text without asking first, and no more.
    assert stand_in.ask(body=body, Content_Type="text/plain").status == 415
    policy = stand_in.ask("/").getheader("Content-Security-Policy")
    assert "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
    text = stand_in.ask("/").text
    assert text.count("<script") == 1 and not re.search(r"\son\w+=", text)


def test_what_is_no_question_is_refused_in_a_sentence_before_anything_is_searched(stand_in: Site) -> None:
    good = {"kind": "plan", "page": "a", "number": 1, "question": {}}
    bodies = [
        ([], "object"),
        ("plan", "object"),
        (b"{", "object"),
        (b'{"kind": NaN}', "object|kind"),
        ({}, "kind"),
        (good | {"kind": "rm"}, "kind"),
        (good | {"kind": ["plan"]}, "kind"),
        (good | {"page": "x" * 65}, "page"),
        (good | {"number": -1}, "number"),
        (good | {"number": True}, "number"),
        (good | {"number": 2**64}, "number"),
        (good | {"question": [1]}, "question"),
        (good | {"question": {"layer": 3}}, "layers"),
        (good | {"question": {"layers": "3"}}, "layers"),
        (good | {"question": {"layers": 3.5}}, "layers"),
        (good | {"question": {"layers": True}}, "layers"),
        (good | {"question": {"device": "h1000"}}, "h1000.*h100"),
        (good | {"question": {"device": "cpu"}}, "device"),
        (good | {"question": {"device": "/etc/passwd"}}, "device"),
        (good | {"question": {"network": "nvlink4"}}, "network"),
        (good | {"question": {"precision": "int1"}}, "precision"),
        (good | {"question": {"objective": "fun"}}, "objective"),
        (good | {"question": {"nodes": 4096}}, "32768 devices"),
        (good | {"question": {"experts": 8}}, "active_experts"),
        (good | {"question": {"dense_layers": 64}}, "dense_layers"),
        (
            good | {"question": {"experts": 8, "active_experts": 2, "expert_ffn": 64, "dense_layers": 32}},
            "leave none for the experts",
        ),
        (good | {"page": "x" * 5000}, "4096 bytes"),
    ]
    bodies += [(good | {"question": {name: most + 1}}, name) for name, (_, most) in BOUNDS.items()]
    bodies += [(good | {"question": {name: least - 1}}, name) for name, (least, _) in BOUNDS.items()]
    for body, why in bodies:
        answer = stand_in.ask(body=body)
        assert answer.status == 400 and re.search(why, answer.text), (body, answer.text)
    assert stand_in.ask(body=b"", Transfer_Encoding="chunked").status == 400
    assert stand_in.ask("/api/other", body=good).status == 404 and stand_in.ask("/etc/passwd").status == 404
    assert stand_in.ask("/../../pyproject.toml").status == 404 and stand_in.ask(method="DELETE").status == 501
    assert stand_in.lines() == []


def test_a_replaced_question_is_not_searched_and_a_slow_one_is_ended(
    stand_in: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_desk, "PATIENCE_S", 0.0)
    answers: dict[int, int] = {}

    def ask(number: int, batch: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.__setitem__(number, stand_in.plan(number, batch=batch).status))
        thread.start()
        return thread

    endless = ask(1, 1000)
    stand_in.wait_for("plan 1000")
    newer = ask(2, 20)
    for thread in (endless, newer):
        thread.join()
    assert answers == {1: 409, 2: 200}
    # What comes late from a page that is further on isn't searched at all.
    assert stand_in.plan(1, batch=21).status == 409
    assert stand_in.lines() == ["plan 1000", "plan 20"]
    # Another page is none of its business; an answer is remembered.
    assert stand_in.plan(1, page="b", batch=22).status == 200
    assert stand_in.plan(3, batch=20).status == 200
    assert stand_in.lines() == ["plan 1000", "plan 20", "plan 22"]


def test_a_slider_searches_the_first_and_the_last_of_its_questions(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    process = PlanProcess((sys.executable, "-c", STAND_IN, str(asked)))
    desk, released, outcomes = PlanDesk(process), threading.Event(), {}
    search = process.ask

    def slow(message, is_wanted):
        answer = search(message, is_wanted)
        released.wait(30)
        return answer

    process.ask = slow

    def ask(number: int) -> None:
        try:
            outcomes[number] = desk.answer("plan", PlanQuestion(batch=number), "a", number)["state"]
        except Superseded:
            outcomes[number] = "superseded"

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20, 25)]
    try:
        threads[0].start()
        while not asked.exists():
            time.sleep(0.01)
        for thread in threads[1:-1]:
            thread.start()
        while desk._waiting == 0:
            time.sleep(0.01)
        threads[-1].start()
        while desk._newest["a"] != 24 or not {21, 22, 23} <= outcomes.keys():
            time.sleep(0.01)
        released.set()
        for thread in threads:
            thread.join()
    finally:
        released.set()
        process.close()
    assert outcomes == {20: "done", 21: "superseded", 22: "superseded", 23: "superseded", 24: "done"}
    assert asked.read_text().splitlines() == ["plan 20", "plan 24"]


def test_nothing_is_searched_for_ever_and_only_so_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    with site(PlanProcess((sys.executable, "-c", STAND_IN, str(asked)), limit_s=0.5), asked) as running:
        late = running.plan(1, batch=1001)
        assert late.status == 503 and "longer than 0.5 s" in late.text
        dead = running.plan(2, batch=13)
        assert dead.status == 503 and "without an answer" in dead.text
        assert running.plan(3, batch=14).status == 200
        monkeypatch.setattr(plan_desk, "MOST_WAITING", 0)
        full = running.plan(4, batch=15)
        assert full.status == 503 and "ask again" in full.text


def test_pages_and_answers_that_are_remembered_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_desk, "MOST_ANSWERS", 3)
    monkeypatch.setattr(plan_desk, "MOST_PAGES", 5)
    process = PlanProcess((sys.executable, "-c", STAND_IN, str(tmp_path / "asked")))
    desk = PlanDesk(process)
    try:
        for index in range(14, 24):
            desk.answer("plan", PlanQuestion(batch=index), f"page {index}", 1)
    finally:
        desk.close()
    assert len(desk._answers) == 3 and len(desk._newest) == 5


def test_the_page_has_the_figures_of_plan_json(real: Site, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {**SMALL, "nodes": 1, "per_node": 2, "network": "ethernet-25g"}
    answer = real.plan(**fields)
    assert answer.status == 200
    sections = json.loads(answer.text)["sections"]
    command = re.sub(r"<[^>]*>", "", re.search(r"<pre>(.*?)</pre>", sections["the-same-on-the-command-line"])[1])
    words = command.split()
    assert words[:2] == ["meshwright", "plan"] and "1x2xh100@ethernet-25g" in words
    assert main([*words[1:], "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert f"<b>{best[0]['mfu']:.1%}</b>" in sections["head"]
    assert f"<b>{best[0]['tflops_per_device']:.1f} TFLOP/s</b>" in sections["head"]
    assert best[0]["layout"]["text"] in sections["head"].replace("<wbr>", "")
    shown = [
        float(share) for share in re.findall(r'class="filled" style="width:([\d.]+)%', sections["the-best-layouts"])
    ]
    longest = max(candidate["price"]["step_s"] for candidate in best)
    assert shown == pytest.approx([100 * candidate["price"]["step_s"] / longest for candidate in best], abs=0.01)
    curve = json.loads(real.plan(kind="curve", **fields).text)["sections"]["more-or-fewer-devices"]
    config = PlanQuestion.from_dict(fields).curve_config()
    assert config.devices == "1,2,4,8"
    assert main(["plan", "--sizes", config.sizes, "--cluster", config.cluster, "--devices", config.devices,
                 "--batch", "16", "--sequence", "512", "--json"]) == 0  # fmt: skip
    points = json.loads(capsys.readouterr().out)
    knee = re.search(r"The knee is at (\d+) devices", curve)
    assert (int(knee[1]) if knee else None) == points["knee"]
    for point in points["points"]:
        assert f"{point['best']['mfu']:.1%}" in curve


def test_what_fits_nowhere_is_said(real: Site) -> None:
    answer = real.plan(**page_presets()["llama-3-405b"], device="t4", nodes=1)
    assert answer.status == 422 and "nearest that would" in answer.text
    odd = real.plan(width=1000, heads=3, kv_heads=0)
    assert odd.status == 422 and "3 heads" in odd.text
    assert "refused" in answer_line(json.dumps({"kind": "plan", "question": {"layers": 0}}))


def test_every_precision_of_the_form_is_planned(real: Site) -> None:
    for precision in PRECISIONS:
        answer = real.plan(**SMALL, nodes=1, precision=precision)
        assert answer.status == 200 and "TFLOP/s, dense" in answer.text, answer.text


def test_fields_of_experts_mean_nothing_of_a_dense_model(real: Site) -> None:
    """A field may keep its number while the number of experts is set to 0."""
    question = PlanQuestion(active_experts=2, expert_ffn=64, shared_ffn=64, dense_layers=1)
    assert question.command() == PlanQuestion().command()
    assert real.plan(**SMALL, nodes=1, active_experts=2).status == 200


def test_a_question_is_the_commands() -> None:
    asked = PlanConfig(
        sizes="layers=8,width=2048,heads=16,vocab=32000,tied=yes", cluster="4x8xh100@ethernet-25g", batch=64
    )
    question = PlanQuestion.of_config(asked)
    assert (question.nodes, question.per_node, question.network, question.tied) == (4, 8, "ethernet-25g", True)
    assert (question.kv_heads, question.ffn, question.batch, question.sequence) == (0, 0, 64, 2048)
    assert model_of_sizes(question.config().sizes).shape == model_of_sizes(asked.sizes).shape
    for config, why in (
        (PlanConfig(cluster="8xh100+8xa100-80"), "equal nodes"),
        (PlanConfig(cluster="8xh100", fix="tp=2"), "--serve doesn't take fix"),
        (PlanConfig(sizes="layers=8,width=2048,heads=16,vocab=32000,window=128"), "no window"),
        (PlanConfig(cluster="4xcpu"), "device = cpu"),
    ):
        with pytest.raises(ConfigError, match=why):
            PlanQuestion.of_config(config)


@pytest.mark.parametrize(
    ("name", "billions"),
    # Parameters as the models' cards and papers give them.
    [("gpt2-xl", 1.558), ("gpt-3-175b", 174.6), ("llama-3-8b", 8.03), ("llama-3-70b", 70.55),
     ("llama-3-405b", 405.85), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.53), ("mixtral-8x7b", 46.70)],
)  # fmt: skip
def test_presets_have_the_models_parameters(name: str, billions: float) -> None:
    question = PlanQuestion.from_dict(page_presets()[name])
    question.check_all()
    parameters = model_of_sizes(question.config().sizes).shape.parameters
    assert parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_networks_are_links_between_nodes() -> None:
    outside = {values["outside"] for values in catalogue.nodes().values()}
    assert {name for name in outside if not name.startswith(("nvlink", "pcie"))} <= set(networks())
    assert not {values["inside"] for values in catalogue.nodes().values()} & set(networks()) - outside
    assert MOST_DEVICES == 2**14


def test_the_address_and_the_words_are_checked(stand_in: Site, capsys: pytest.CaptureFixture[str]) -> None:
    port = stand_in.server.server_address[1]
    assert main(["plan", "--serve", str(port)]) == 2
    assert f"--serve {port}: Address already in use" in capsys.readouterr().err
    assert main(["plan", "--serve", "70000"]) == 2
    assert main(["plan", "--serve", "--model", "llama", "--cluster", "8xh100"]) == 2
    assert "--serve doesn't take model" in capsys.readouterr().err


def test_unanswered_is_no_refusal_of_the_planner() -> None:
    assert issubclass(Superseded, Unanswered) and not issubclass(Unanswered, ConfigError)


def test_the_search_needs_numpy_and_jinja_alone() -> None:
    """It starts in well under a second of a core, since it loads none of the large packages."""
    question = {"kind": "plan", "question": SMALL | {"nodes": 1, "per_node": 2}}
    code = (
        "import sys, json\n"
        "for name in ('torch', 'transformers', 'rich', 'tyro', 'yaml', 'tokenizers', 'pyarrow', 'tensorboard'):\n"
        "    sys.modules[name] = None\n"
        "from meshwright.jobs.plan_worker import answer_line\n"
        f"answer = answer_line({json.dumps(question)!r})\n"
        # numpy's random numbers bring Cython's own module along.
        "ours = {'meshwright', 'numpy', 'cython_runtime', 'jinja2', 'markupsafe', '__main__'}\n"
        "others = {n.split('.')[0] for n, m in sys.modules.items() if m} - set(sys.stdlib_module_names) - ours\n"
        "print(json.dumps([sorted(answer), sorted(n for n in others if not n.startswith('_'))]))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55, check=True).stdout
    assert json.loads(said) == [["sections", "state"], []]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_link_shows_its_plan_in_a_browser(real: Site, tmp_path: Path) -> None:
    fields = {
        **SMALL,
        "nodes": 1,
        "per_node": 4,
        "device": "a100-80",
        "gated": "true",
        "evil": "<img src=x onerror=alert(1)>",
    }
    query = "&".join(f"{name}={value}" for name, value in fields.items())
    command = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--virtual-time-budget=20000", "--dump-dom", f"http://{real.address}/?{query}"),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=55).stdout
    assert "on 4xa100-80</h1>" in shown and "16 rows of 512 tokens" in shown
    assert "More or fewer devices" in shown and 'aria-busy="true"' not in shown and "<img" not in shown
    plan = json.loads(real.plan(number=2, **{**SMALL, "nodes": 1, "per_node": 4, "device": "a100-80"}).text)
    assert re.search(r"<b>[\d.]+ TFLOP/s</b>", plan["sections"]["head"])[0] in shown
