"""The file that `hacrl report` writes: size, time, what is in it, and the command around it."""

from __future__ import annotations

import gzip
import json
import random
import re
import string
import subprocess
import sys
import time
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run
from typer.testing import CliRunner, Result

from hacrl.cli import app
from hacrl.report.page import write_report

LIMIT = 5_000_000
HOSTILE = "</script><script>alert(1)</script><!--<script>\ud800\x00"


class Scripts(HTMLParser):
    """The script elements of a page as a parser of HTML finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.found.append(dict(attrs))
            self._inside = dict(attrs).get("id") or "program"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside] = self.texts.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._inside = None


def packed(page: Path, name: str) -> Any:
    parser = Scripts()
    parser.feed(page.read_text(encoding="utf-8"))
    return json.loads(gzip.decompress(b64decode(parser.texts[name])))


def report(*arguments: str | Path, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "300"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == expect, result.output
    return result


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    page = tmp_path / "pages" / "r.html"
    assert "r.html" in report(run, "--output", page).output
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert page.stat().st_size < LIMIT / 2


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=2)
    first, second = (write_report([run], tmp_path / name).read_bytes() for name in ("1.html", "2.html"))
    assert first == second


def test_errors_are_told(tmp_path: Path) -> None:
    assert "no such folder" in report(tmp_path / "none", expect=1).output
    run = write_run(tmp_path / "a", steps=1)
    assert "choose another --output" in report(run, "--output", tmp_path, expect=1).output
    report(expect=2)


def test_the_command_loads_nothing_heavy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=1)
    code = (
        "import sys\n"
        "from hacrl.cli import app\n"
        "try:\n"
        f"    app({['report', str(run), '--output', str(tmp_path / 'r.html')]!r})\n"
        "finally:\n"
        "    loaded = {'torch', 'transformers', 'datasets', 'numpy', 'pandas'} & set(sys.modules)\n"
        "    assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_names_no_address_and_allows_no_connection(tmp_path: Path) -> None:
    text = write_report([write_run(tmp_path / "a", steps=1)], tmp_path / "r.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-\S+' 'sha256-\S+'", rules["script-src"])


def test_texts_cannot_leave_their_element(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "</script><script>alert(2)</script>",
        steps=1,
        text=lambda *_: HOSTILE,
        prompt=HOSTILE,
        task_id=HOSTILE,
    )
    page = write_report([run], tmp_path / "r.html")
    parser = Scripts()
    parser.feed(page.read_text(encoding="utf-8"))
    assert [attributes.get("id") for attributes in parser.found] == ["data", "rollouts", "plotly", None]
    for name in ("data", "rollouts", "plotly"):
        assert set(parser.texts[name]) <= set(string.ascii_letters + string.digits + "+/=")
    [group, *_] = packed(page, "rollouts")
    assert group["rollouts"][0]["text"] == HOSTILE
    assert group["prompt"] == [["", HOSTILE]]


@pytest.mark.slow
def test_five_methods_of_five_seeds_stay_below_the_limit(tmp_path: Path) -> None:
    words = random.Random(0)
    long_text = ["".join(words.choices(string.ascii_letters + " ", k=5000)) for _ in range(64)]
    methods: list[Any] = [
        *("hacpo", "naive", "gspo", "grpo", {"name": "hacpo", "alpha": 3.0}),
    ]
    runs = [
        write_run(
            tmp_path / f"{number}-{seed}",
            algorithm=algorithm,
            seed=seed,
            steps=60,
            tasks=2,
            group=4,
            text=lambda step, author, index: long_text[(step * 7 + index + 31 * len(author)) % 64],
        )
        for number, algorithm in enumerate(methods)
        for seed in range(5)
    ]
    page = write_report(runs, tmp_path / "r.html")
    assert page.stat().st_size < LIMIT
    content = packed(page, "data")
    shown = sum(len(group["rollouts"]) for group in packed(page, "rollouts"))
    assert content["rollouts"]["shown"] == shown
    assert content["rollouts"]["total"] == 25 * 60 * 16
    assert shown > 200
    assert len(content["methods"]) == 5


@pytest.mark.slow
def test_ten_runs_of_a_hundred_steps_take_seconds(tmp_path: Path) -> None:
    text = "A step of a long answer. " * 60
    runs = [
        write_run(
            tmp_path / f"{method}-{seed}",
            algorithm=method,
            seed=seed,
            steps=100,
            tasks=8,
            group=4,
            text=lambda *_: text,
        )
        for method in ("hacpo", "gspo")
        for seed in range(5)
    ]
    start = time.process_time()
    write_report(runs, tmp_path / "r.html")
    assert time.process_time() - start < 20
