"""The live page over HTTP: who may read it, who may ask something of the run, what changes, and what strings can do."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.jobs.watch import make_server
from meshwright.monitor import guarded_server, live_page, rundir
from meshwright.monitor.server import PageServer
from meshwright.train.hooks import Request
from meshwright.train.page_requests import PageRequests, split_stop_count
from tests import simulated_run

HOSTILE = "\"'></text></title></style></pre></script><img src=x onerror=\"document.title='pwned'\">{{ 7 * 7 }}\\\n\r#"
UNESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Site:
    """A page that is served in a thread."""

    run: Path
    server: PageServer
    requests: PageRequests

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def ask(self, path: str, body: object = None, **headers: str) -> http.client.HTTPResponse:
        """Asks without anything that a browser or a token would add."""
        connection = http.client.HTTPConnection(self.address, timeout=20)
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            sent = {"Content-Type": "application/json"} | sent
        connection.request("GET" if body is None else "POST", path, data, sent)
        answer = connection.getresponse()
        answer.text = answer.read().decode()
        connection.close()
        return answer


@contextlib.contextmanager
def site(run: Path) -> Iterator[Site]:
    requests = PageRequests()
    running = make_server(run, ("127.0.0.1", 0), requests, 0.25)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Site(run, running, requests)
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Site]:
    with site(simulated_run.write(tmp_path / "run", 60, ranks=4, every=20)) as running:
        yield running


def test_a_stranger_on_this_machine_reads_nothing_and_asks_nothing(small, monkeypatch, capfd):
    monkeypatch.setattr(guarded_server, "_owner_of", lambda *_: 12345)
    token = small.server.token
    wrong = token[:-1] + ("1" if token.endswith("0") else "0")
    for path in ("/api/sections", "/api/steps", "/metrics", "/api/sections?since=0"):
        assert small.ask(path).status == 401
        assert small.ask(path, Authorization="Bearer " + wrong).status in (401,)
        assert small.ask(path, Cookie=f"{small.server.cookie}=").status == 401
        assert small.ask(path, Authorization=f"Bearer {token}").status == 200
    front = small.ask("/")
    assert front.status == 200 and "<form" in front.text
    assert "replicate" not in front.text and "sim" not in front.text  # nothing of the run
    assert "replicate" in small.ask("/", Authorization=f"Bearer {token}").text
    assert "fastest of" in small.ask("/api/sections", Authorization=f"Bearer {token}").text
    assert small.ask("/api/request", {"action": "stop"}).status == 403
    assert small.requests.share() == 0.0
    captured = capfd.readouterr()
    assert token not in captured.out + captured.err


def test_the_same_user_reads_without_the_token_and_asks_nothing_without_it(small):
    assert small.ask("/api/sections").status == 200
    assert small.ask("/api/request", {"action": "stop"}).status == 403
    assert small.ask("/api/request", {"action": "stop"}, Authorization="Bearer no").status == 403
    assert small.requests.share() == 0.0


def test_a_name_that_was_made_to_point_here_is_refused(small):
    # DNS rebinding: the browser thinks that it asks evil.example, and its page may read the answer.
    for host in ("evil.example", "evil.example:8787", "localhost.evil.example", "", "127.0.0.1.evil.example", "[::1"):
        assert small.ask("/", Host=host).status == 421
        headers = {"Authorization": f"Bearer {small.server.token}", "Origin": f"http://{host}"}
        assert small.ask("/api/request", {"action": "stop"}, Host=host, **headers).status == 421
    for host in ("localhost:1", "127.0.0.1", "[::1]:8787", "LOCALHOST"):
        assert small.ask("/api/steps", Host=host).status == 200
    assert small.requests.share() == 0.0


def test_asking_takes_the_token_and_the_pages_own_origin(small):
    token, cookie = small.server.token, small.server.cookie
    login = small.ask("/api/session", {}, Authorization=f"Bearer {token}", Origin=f"http://{small.address}")
    assert login.status == 204
    given = login.getheader("Set-Cookie")
    assert given.startswith(f"{cookie}=") and "HttpOnly" in given and "SameSite=Strict" in given
    with_cookie = {"Cookie": f"other=1; {cookie}={token}"}
    # A cookie goes along by itself: another site's page, and one without an origin, ask for nothing.
    for origin in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {}):
        assert small.ask("/api/request", {"action": "stop"}, **with_cookie, **origin).status == 403
    form = {"Content_Type": "text/plain", "Origin": f"http://{small.address}"}
    assert small.ask("/api/request", {"action": "stop"}, **with_cookie, **form).status == 415
    assert small.requests.share() == 0.0
    own = {"Origin": f"http://{small.address}"}
    assert small.ask("/api/request", {"action": "checkpoint"}, **with_cookie, **own).status == 202
    assert split_stop_count(small.requests.share()) == (0.0, Request.CHECKPOINT)
    assert small.ask("/api/request", {"action": "stop"}, Authorization=f"Bearer {token}").status == 202
    assert split_stop_count(small.requests.share()) == (0.0, Request.CHECKPOINT | Request.STOP)
    for wrong in ({"action": "rm"}, {"action": ["stop"]}, {}, [], "stop", {"action": "x" * 2000}):
        assert small.ask("/api/request", wrong, **with_cookie, **own).status == 400


def test_every_answer_forbids_scripts_of_others(small):
    for path in ("/", "/live.js", "/api/sections", "/metrics", "/nothing"):
        answer = small.ask(path)
        policy = answer.getheader("Content-Security-Policy")
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
    page = small.ask("/").text
    assert page.count("<script") == 1 and '<script src="/live.js" defer></script>' in page
    assert not re.search(r"\son\w+=", page) and "http" not in re.sub(r"<title>.*?</title>", "", page.split("<body")[0])


def test_only_what_changed_is_sent_again(small, monkeypatch):
    monkeypatch.setattr(live_page, "LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(live_page, "CPU_SHARE", math.inf)
    first = json.loads(small.ask("/api/sections?since=0").text)
    assert {"head", "course", "traffic", "last-recorded-step", "who-waits-for-whom", "experts"} <= first[
        "sections"
    ].keys()
    assert first["pause_ms"] == 0, "the reader asks at once for what takes longer"
    rest = json.loads(small.ask(f"/api/sections?since={first['version']}").text)
    # Timelines, the most of a page, are read after what a reader sees first; nothing else is sent twice.
    assert {key for key, html in rest["sections"].items() if html} == {"last-recorded-step", "who-waits-for-whom"}
    again = json.loads(small.ask(f"/api/sections?since={rest['version']}").text)
    assert again["sections"] == {} and again["version"] == rest["version"]
    with (small.run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "brand_new", "rank": 0, "time": 1_760_000_900.0}) + "\n")
    later = json.loads(small.ask(f"/api/sections?since={rest['version']}").text)
    assert "brand_new" in later["sections"]["events"]
    assert not {"course", "traffic", "last-recorded-step", "experts"} & later["sections"].keys()
    steps = json.loads(small.ask("/api/steps?since=55").text)
    assert steps["last"] == 60 and steps["curves"]["loss"]["step"] == [56, 57, 58, 59, 60]


def parsed_metrics(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Parses the text format strictly: HELP, TYPE, then samples of that family, labels unescaped; nothing twice."""
    samples, family, seen = {}, None, set()
    assert text.endswith("\n")
    for line in text.split("\n")[:-1]:
        if match := re.fullmatch(r"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) ([^\n\r]+)", line):
            assert match[1] not in seen
            family = match[1]
            seen.add(family)
        elif match := re.fullmatch(r"# TYPE (\S+) (gauge|counter)", line):
            assert match[1] == family
            assert (match[2] == "counter") == family.endswith("_total")
        else:
            match = re.fullmatch(r'(\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (\S+)', line)
            assert match and match[1] == family, line
            pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")
            labels = tuple((name, re.sub(r"\\.", lambda found: UNESCAPED[found[0]], value)) for name, value in pairs)
            assert (family, labels) not in samples
            samples[family, labels] = float(match[3])
    return samples


def test_metrics_say_what_the_newest_line_says_in_prometheus_format(tmp_path):
    run = simulated_run.write(tmp_path / "run", 40, ranks=4, every=20, name=HOSTILE)
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": HOSTILE, "rank": 0, "time": 1.0}) + "\n")
    with site(run) as running:
        answer = running.ask("/metrics")
    assert answer.getheader("Content-Type").startswith("text/plain; version=0.0.4")
    samples = parsed_metrics(answer.text)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert samples["meshwright_loss", ()] == last["loss"] and samples["meshwright_step", ()] == 40
    for total in last["comm"]:
        labels = (("axis", total["axis"]), ("op", total["op"]))
        assert samples["meshwright_comm_bytes", labels] == total["bytes"]
    assert samples["meshwright_events_total", (("kind", HOSTILE.replace("\r", " ")),)] == 1
    assert sum(samples["meshwright_run_state", (("state", state),)] for state in ("running", "finished")) == 1
    with contextlib.suppress(ImportError):
        from prometheus_client.parser import text_string_to_metric_families

        assert len(list(text_string_to_metric_families(answer.text))) > 15
    dashboard = json.loads((Path(live_page.__file__).parent / "templates" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for text in expressions for name in re.findall(r"meshwright_\w+", text)}
    assert len(names) > 15 and names <= {family for family, _ in samples}


def test_damaged_files_are_said_and_the_page_stays(tmp_path):
    run = simulated_run.write(tmp_path / "run", 5, ranks=2, every=5)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": "x", "experts": 7, "comm": 3, "memory": [], "parts": 1}\n')
    with site(run) as running:
        for path in ("/", "/metrics", "/api/steps", "/api/sections"):
            answer = running.ask(path)
            assert answer.status == 200 or (answer.status == 500 and "can't be shown" in answer.text)
        assert running.ask("/live.js").status == 200


def test_a_port_in_use_is_refused_before_anything_starts(small):
    with pytest.raises(ConfigError, match=r"monitor.port = \d+: Address already in use"):
        make_server(small.run, ("127.0.0.1", small.server.server_address[1]), None, 0.25)


def test_a_page_without_a_run_to_ask_has_no_buttons(tmp_path):
    run = simulated_run.write(tmp_path / "run", 10, ranks=2, every=5)
    running = make_server(run, ("127.0.0.1", 0), None, 0.25)
    running.server_close()
    assert running.actions == () and "<button" not in running.page.document()


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 1000, 2**20 - 1])
def test_requests_travel_in_the_stop_count_and_change_nothing_else_of_it(ranks):
    for stops in {0, 1, ranks}:
        for cuts in {0, 1, ranks}:
            for action in (
                (),
                ("stop",),
                ("evaluate",),
                ("checkpoint", "evaluate"),
                ("stop", "checkpoint", "evaluate"),
            ):
                requests = PageRequests()
                for name in action:
                    requests.make(name)
                    requests.make(name)
                count, asked = split_stop_count(stops + cuts * 2.0**-20 + requests.share())
                assert count == stops + cuts * 2.0**-20
                assert {flag.name.lower() for flag in asked} == set(action)
                requests.answer(asked)
                assert requests.share() == 0.0


def dump(address: str, profile: Path, *flags: str, budget_ms: int = 4000) -> str:
    """Returns a page's elements after its scripts have run, in real Chromium."""
    command = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *flags),
        *(f"--virtual-time-budget={budget_ms}", "--dump-dom", address),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_hostile_strings_are_text_in_a_browser_and_a_grown_run_is_shown(tmp_path):
    run = simulated_run.write(tmp_path / "run", 30, ranks=4, every=10, name=HOSTILE)
    with site(run) as running:
        shown = dump(f"http://{running.address}/", tmp_path / "profile")
    assert "<title>run" in shown and "pwned" not in shown.split("</title>")[0]
    # Of the page's own elements the only image is the heat map, and no element has a handler.
    assert shown.count("<img") == 1 and 'src="data:image/png' in shown
    assert "&lt;img src=x onerror" in shown and "{{ 7 * 7 }}" in shown
    # The script of the page ran: it replaced the text of the state.
    assert "running, step 30" in shown


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_token_behind_the_hash_opens_the_page_and_leaves_the_address(tmp_path, monkeypatch):
    monkeypatch.setattr(guarded_server, "_owner_of", lambda *_: 12345)
    run = simulated_run.write(tmp_path / "run", 20, ranks=2, every=10)
    with site(run) as running:
        locked = dump(f"http://{running.address}/", tmp_path / "profile")
        opened = dump(f"http://{running.address}/#token={running.server.token}", tmp_path / "profile")
        wrong = dump(f"http://{running.address}/#token=wrong", tmp_path / "other")
    assert "page-token" in locked and "Tokens/s" not in locked
    assert "Tokens/s" in opened and running.server.token not in opened
    assert "not the token" in wrong and "Tokens/s" not in wrong


def test_a_run_of_64_ranks_and_ten_thousand_steps_costs_little(tmp_path):
    """Updates take under a tenth of a core in the mean, by their own pause, and their markup stays small."""
    run = simulated_run.write(tmp_path / "run", 10_000, every=500)
    page = live_page.LivePage(run, 0.25)
    page.sections_since(0)
    page.sections_since(1)
    page._next_at = -math.inf
    started_s = time.thread_time()
    news = page.sections_since(1)
    spent_s = time.thread_time() - started_s
    assert spent_s / (news["pause_ms"] / 1e3) < 0.1
    assert sum(map(len, news["sections"].values())) < 700_000
    assert len(json.dumps(page.steps_since(0))) < 400_000


def test_the_first_document_has_the_newest_figures_and_waits_for_no_rendering(tmp_path):
    run = simulated_run.write(tmp_path / "run", 3_000, ranks=4, every=500)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = sum(line["loss"] for line in lines[-50:]) / 50
    with site(run) as running:
        # Whoever renders has the lock; a document doesn't ask for it.
        with running.server.page._lock:
            document = running.ask("/").text
        sections = json.loads(running.ask("/api/sections").text)["sections"]
    for text in ("running · 3000 steps · ", f"<b>{loss:.4f}</b>", "mean of the last 50 steps"):
        assert text in document and text in sections["head"]
    assert len(document) < 20_000 < len(sections["course"])


def test_the_first_document_reads_the_end_of_the_events_alone(tmp_path, monkeypatch):
    """However many there are: its cost must not grow with the run."""
    run = simulated_run.write(tmp_path / "run", 20, every=10)
    event = json.dumps({"kind": "evaluated", "step": 1, "loss": 1.0, "time": 1.0, "rank": 0})
    with (run / "events.jsonl").open("a") as file:
        file.write(f"{event}\n" * 20_000)
        file.write(json.dumps({"kind": "interrupted", "step": 20, "time": 2.0, "rank": 0}) + "\n")
    parsed, parse = [], rundir.parse_json
    monkeypatch.setattr(rundir, "parse_json", lambda text: parsed.append(text) or parse(text))
    document = live_page.LivePage(run, 0.25).document()
    assert "interrupted · 20 steps" in document
    assert sum(map(len, parsed)) < 400_000 < (run / "events.jsonl").stat().st_size
