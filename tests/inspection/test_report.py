"""`rloo report`: one page that a browser draws without asking anybody for anything."""

import base64
import hashlib
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from assert_refused import assert_refused
from compare_cases import write

from rloo_cli.cli import report as report_verb
from rloo_cli.inspection.report import make_report, sections
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
NASTY = "</script><script>alert(1)</script><b>&amp;\x1b[31m"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(name: str = "one", steps: int = 12, root: str = "runs") -> Path:
    """A run's folder with samples whose texts are markup."""
    folder = write(Path(root), name, steps=0, scores=())
    lines: list[dict[str, Any]] = [{"step": 0, "eval_reward": 0.1}]
    for step in range(1, steps + 1):
        lines.append(
            {
                "step": step, "step_time": 2.0, "reward": step / steps, "kl": 0.01 * step,
                "entropy": 1.0, "completions/mean_length": 8.0, "completions/clipped_ratio": 0.9,
                "time/generation": 1.0, "time/update": 0.9, "perf/tokens_per_s": 100.0,
                "reward_std": 0.3, "grad_norm": 1.5, "num_tokens": 100 * step,
            }
        )  # fmt: skip
    lines.append({"step": steps, "eval_reward": 0.8})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "samples").mkdir()
    for step in sorted({1, max(1, steps // 2), steps}):
        samples = [
            {"draw": draw, "k": k, "prompt": f"prompt {draw} {NASTY}", "completion": NASTY,
             "score": float((draw + k) % 2), "rewards": {"exact_match": float((draw + k) % 2)},
             "completion_length": 5 + k, "advantage": 0.5, "finish_reason": "stop"}
            for draw in range(3)
            for k in range(4)
        ]  # fmt: skip
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        (folder / f"samples/step_{step:06d}.jsonl").write_text(text)
    (folder / "env.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13"}}))
    (folder / "overrides.txt").write_text("+recipe=quickstart\nseed=3\n")
    return folder


class Elements(HTMLParser):
    """The elements of a page, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open = tag

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open in ("script", "style") else data


def test_the_page_says_how_the_run_went_and_no_text_of_a_model_is_markup() -> None:
    page, figures = make_report(make_run())
    elements = Elements(page)
    assert "Held-out 0.1 → 0.8" in elements.text and "seed=3" in elements.text
    assert "completions are truncated" in elements.text and "completions/clipped_ratio" in page
    assert "<script>alert(1)</script>" in elements.text and "alert(1)</script>" not in page
    assert "\x1b" not in page
    assert {"reward, and held-out score", "scores over time", "score and length"} <= {
        *figures["charts"]
    }
    ids = [
        at["id"] for tag, at in elements.found if tag == "div" and "chart" in (at.get("id") or "")
    ]
    assert len(ids) == len(figures["charts"])
    outside = [
        at for tag, at in elements.found if str(at.get("src", at.get("href", "#")))[0] != "#"
    ]
    assert outside == [{"rel": "icon", "href": "data:,"}]


def test_numbers_that_a_reward_or_a_loss_logged_have_charts() -> None:
    path = make_run() / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    own = {"my_reward/words": 3.0, "algorithm/change": 0.2}
    path.write_text("".join(json.dumps(line | own) + "\n" for line in lines))
    assert {*own} <= {*make_report(path.parent)[1]["charts"]}


def test_the_held_out_score_has_its_interval_in_the_first_line_and_in_the_table() -> None:
    folder = make_run(steps=4)
    limits = {"eval_reward/se": 0.02, "eval_reward/low": 0.76, "eval_reward/high": 0.84}
    path = folder / "metrics.jsonl"
    first = json.dumps({"step": 0, "eval_reward": 0.1, **limits})
    *lines, last = path.read_text().splitlines()[1:]
    last = json.dumps(json.loads(last) | limits)
    path.write_text("".join(line + "\n" for line in [first, *lines, last]))
    text = Elements(make_report(folder)[0]).text
    assert "Held-out 0.1 (0.76 to 0.84) → 0.8 (0.76 to 0.84)" in text
    assert text.count("0.8 (0.76 to 0.84)") == 2


def test_an_episode_is_a_conversation_in_which_no_text_of_a_tool_is_markup() -> None:
    folder = make_run()
    path = folder / "samples/step_000012.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    got = [{"role": "tool", "name": NASTY, "content": [{"type": "text", "text": NASTY}]}]
    turns = [
        {"told": [], "said": NASTY, "calls": [{"name": NASTY, "arguments": {"a": NASTY}}]},
        *[{"told": got, "said": "then", "calls": []}] * 30,
    ]
    for sample in samples:
        sample |= {"turns": turns, "failed": NASTY, "episode": {"ended_by": "turns", "calls": 1}}
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    shown = {"agent/turns": 2.0, "agent/tool_s": 0.1, "agent/truncated_by/turns": 0.5}
    told_lines = [json.dumps(line | shown) + "\n" for line in lines]
    metrics.write_text("".join(told_lines))
    page, figures = make_report(folder)
    elements = Elements(page)
    assert "turns and calls of an episode" in figures["charts"]
    assert "seconds of a call" in figures["charts"]
    kinds = [at.get("class") for tag, at in elements.found if tag == "div"]
    assert {"part said", "part called", "part told"} <= {*kinds}
    assert "agent.max_turns, 1 call" in elements.text and "38 more" in page
    assert "alert(1)</script>" not in page and "<b>" not in page and "\x1b" not in page


def test_tokens_have_their_numbers_as_colours() -> None:
    folder = make_run()
    path = folder / "samples/step_000012.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    samples[0]["token_strip"] = {
        "text": ["<b>", "\n", " a", "end"], "lag": 3, "logp": [-1.0, -2.0, None, -1],
        "sampler_logp": [-1.5, -1.0, -1.0, -1], "ref_logp": ["x"], "advantage": "none",
    }  # fmt: skip
    samples[1]["token_strip"] = {"text": "nothing"}
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    page, _ = make_report(folder)
    strip = page[page.index('class="strip"') :].partition("</div>")[0]
    assert "border-left-color:rgb(220,38,38)" in strip and page.count('class="strip"') == 1
    spans = re.findall(r"<span(?: style=\"([^\"]*)\")? title=\"([^\"]*)\">([^<]*)</span>", strip)
    assert [text for _, _, text in spans] == ["&lt;b&gt;", "⏎", "·a", "end"]
    first, second, third, last = (style for style, _, _ in spans)
    assert "rgba(234,88,12,0.50)" in first and "rgba(37,99,235,1.00)" in second
    assert "background" not in third + last and "border-bottom-color:rgba(22,163,74,1.00)" in last
    got = dict(part.split(" ") for part in spans[0][1].split(", "))
    assert got == {"policy": "-1", "sampler": "-1.5", "gap": "0.5", "advantage": "0.5"}


def test_the_plan_stands_beside_what_was_measured() -> None:
    folder = make_run()
    about = json.loads((folder / "run.json").read_text())
    parts = {"decoding": 0.2, "update": 0.3, "junk": "x"}
    seconds = {"measured_step_s": 0.4, "predicted_step_s": 0.5, "predicted_parts_s": parts}
    seconds |= {"load_average": 6.25}
    memory = {"measured_bytes": 2**30, "predicted_bytes": 2**31, "predicted_parts": [1]}
    changes = [{"attempt": 2, "train.learning_rate": [1e-4, 1e-5]}]
    more = {"seconds": seconds, "memory": memory, "changes": changes}
    (folder / "run.json").write_text(json.dumps(about | more))
    text = Elements(make_report(folder)[0]).text
    assert "Predicted and measured" in text and "– decoding" in text
    assert "+100%" in text and "load was 6.2" in text
    assert "attempt 2: train.learning_rate 0.0001 → 1e-05" in text
    assert "the best score" in text and "within groups" in text


def test_equal_folders_give_equal_pages_wherever_they_lie() -> None:
    first, _ = make_report(make_run())
    second, _ = make_report(make_run(root="elsewhere"))
    assert first.replace("elsewhere", "runs") == second.replace("elsewhere", "runs")


def test_a_thousand_steps_stay_below_three_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(steps=1000)
    assert report_verb.run(["one"]) == 0
    assert capsys.readouterr().out.strip() == "runs/one/report.html"
    assert Path("runs/one/report.html").stat().st_size < 3_000_000


def test_damaged_interrupted_and_empty_runs(sentence) -> None:
    folder = make_run()
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"state": "stopped", "attempt": 3}))
    (folder / "samples/step_000012.jsonl").write_text('{"cut')
    (folder / "ledger.jsonl").write_text("no entry\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no line\n")
    text = Elements(make_report(folder)[0]).text
    assert "was stopped" in text and "damaged: metrics.jsonl" in text and "attempts" in text
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_text("")
    for words, key in (["one"], "runs/one"), (["one", "--out", "page.txt"], "page.txt"):
        with pytest.raises(ConfigError) as caught:
            report_verb.run(words)
        assert_refused(caught, 2, key)
        sentence(caught)


def test_a_run_before_its_first_step_has_a_page() -> None:
    page, figures = make_report(write(Path("runs"), "new", steps=0, scores=(), state="training"))
    assert figures["charts"] == [] and "vega" not in page


ATTACKS = (
    "</script><script>alert(1)</script>", "</pre><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>', "' onmouseover='alert(1)", "</title><script src=//evil.example>",
    "{{ 7*7 }}{% raw %}", "javascript:alert(1)", "<!--", "]]>", "</style><b>", "\u2028\u0000",
)  # fmt: skip


def hostile_run() -> Path:
    """A run each of whose texts, names and values is every attack at once."""
    attack = "".join(ATTACKS)
    folder = make_run()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["name"] = attack
    config["reward"] = {attack: {"type": attack, "weight": 1.0}}
    config["model"] = {"path": attack, attack: attack}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    about = json.loads((folder / "run.json").read_text())
    about |= {"name": attack, "plan": {"max_steps": 12, "model": attack, "algorithm": attack,
              "recipe": attack}, "ended": {"why": attack}, "state": "failed", "code": 7,
              "changes": [{"attempt": 2, attack: [attack, attack]}],
              "seconds": {"measured_step_s": 1.0, "assumed_device": attack,
                          "predicted_step_s": 1.0, "predicted_parts_s": {attack: 1.0}},
              "memory": {"measured_bytes": 1, "predicted_bytes": 1,
                         "predicted_parts": {attack: 1}}}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(about))
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    more = {f"rewards/{attack}/mean": 1.0, f"time/{attack}": 1.0, f"eval_{attack}": 0.5}
    metrics.write_text("".join(json.dumps(line | more) + "\n" for line in lines) + attack + "\n")
    sample = {
        "draw": 0, "prompt": [{"role": attack, "content": [{"type": "text", "text": attack}]}],
        "completion": attack, "rewards": {attack: 1.0}, "finish_reason": attack, "advantage": 1.0,
        "completion_length": 3, "row": {attack: attack}, "set": attack,
        "images": [f"data:image/jpeg;base64,{attack}", attack, f"x{attack}"],
        "token_strip": {"text": [attack], "logp": [-1.0], "sampler_logp": [-2.0], "lag": 1},
    }  # fmt: skip
    text = "".join(json.dumps(sample | {"k": k, "score": float(k)}) + "\n" for k in (0, 1))
    (folder / "samples/step_000012.jsonl").write_text(text)
    (folder / "env.json").write_text(json.dumps({"python": attack, "packages": {attack: attack}}))
    (folder / "overrides.txt").write_text(f"+recipe={attack}\n")
    return folder


def test_no_name_value_or_text_of_a_run_becomes_markup() -> None:
    page, _ = make_report(hostile_run())
    plain, attacked = Elements(make_report(make_run("plain"))[0]), Elements(page)
    assert {tag for tag, _ in attacked.found} <= {tag for tag, _ in plain.found} | {"img", "span"}
    assert not [at for _, at in attacked.found if any(name.startswith("on") for name in at)]
    addresses = [str(at.get(name)) for _, at in attacked.found for name in ("src", "href")]
    assert {address[:5] for address in addresses if address[0] != "#"} <= {"data:", "None"}
    assert attacked.text.count("alert(1)") > 20 and "{{ 7*7 }}" in attacked.text
    scripts = re.findall(r"<script[^>]*>", page)
    assert scripts == ['<script type="application/json" id="specs">', "<script>", "<script>"]


def test_the_page_allows_its_own_scripts_and_no_request() -> None:
    page, _ = make_report(make_run())
    (policy,) = [
        str(at["content"])
        for tag, at in Elements(page).found
        if "http-equiv" in at and tag == "meta"
    ]
    assert policy.startswith("default-src 'none'; script-src 'unsafe-eval' 'sha256-")
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    for script in re.findall(r"<script>(.*?)</script>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy and "\r" not in script
    empty, _ = make_report(write(Path("runs"), "new", steps=0, scores=(), state="training"))
    assert "script-src &#39;none&#39;" in empty


@pytest.mark.skipif(not CHROMIUM, reason="apt install chromium")
def test_a_real_browser_runs_no_script_that_was_put_into_the_page(
    proxy: tuple[str, list[str]],
) -> None:
    page, _ = make_report(make_run())
    bad = '<script>document.title = "pwned"</script><img src=x onerror="document.title=\'pwned\'">'
    bad += '<img src="http://evil.example/x.png">'
    out = Path("page.html")
    out.write_text(page.replace("<h1>", f"{bad}<h1>", 1))
    address, asked = proxy
    done = browse(out, address, "--dump-dom")
    assert "<title>pwned" not in done.stdout and 'class="marks"' in done.stdout
    assert "Content Security Policy" in done.stderr
    assert not [url for url in asked if "evil" in url]


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy that answers nothing and writes down who asked."""
    asked: list[str] = []

    class Refusing(http.server.BaseHTTPRequestHandler):
        def refuse(self) -> None:
            asked.append(self.path)
            self.send_error(403)

        do_GET = do_POST = do_CONNECT = refuse

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()


def browse(page: Path, proxy: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """The page in a real browser, which may reach nothing but that proxy."""
    assert CHROMIUM
    return subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--no-first-run", f"--user-data-dir={page.parent / 'profile'}", f"--proxy-server={proxy}",
         "--enable-logging=stderr", "--virtual-time-budget=8000", *words, page.resolve().as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.skipif(not CHROMIUM, reason="apt install chromium")
def test_a_real_browser_draws_every_chart_without_a_request_or_an_error(
    proxy: tuple[str, list[str]],
) -> None:
    page, figures = make_report(make_run())
    out = Path("page.html")
    out.write_text(page)
    address, asked = proxy
    done = browse(out, address, "--dump-dom")
    drawn = re.findall(r'id="chart-\w+-\d+"[^>]*>.*?<svg[^>]*class="marks"', done.stdout, re.DOTALL)
    assert len(drawn) == len(figures["charts"]), done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "<script>alert(1)" not in done.stdout.replace("&lt;script&gt;alert(1)", "")
    ours = [url for url in asked if not re.search(r"google|gstatic|gvt1", url)]
    assert not ours


def test_images_of_a_prompt_are_shown_and_no_other_address_is() -> None:
    images = ["data:image/jpeg;base64,AAAA", "https://example.org/a.png"]
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    shown = sections._shown_sample({"prompt": prompt, "completion": "red", "images": images})
    assert shown.images == images[:1] and shown.prompt == "[image]what?"
