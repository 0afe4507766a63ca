"""What is noted about the circumstances of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hacrl.environment import describe_start


def test_versions_platform_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hacrl", "train", "gsm8k.yaml"])
    start = describe_start()
    assert start["command"] == ["hacrl", "train", "gsm8k.yaml"]
    assert start["python"] == ".".join(map(str, sys.version_info[:3]))
    for package in ("torch", "transformers", "tokenizers", "peft", "datasets", "hacrl"):
        assert start["packages"][package] == metadata.version(package)
    assert start["cpu_count"] >= 1
    json.dumps(start, allow_nan=False)


def test_the_commit_of_the_working_directory_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_start()["git"] is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "a")
    (tmp_path / "untracked").touch()
    assert describe_start()["git"] == {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert describe_start()["git"]["dirty"] is True


def test_no_git_is_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_start()["git"] is None


def test_torch_is_not_loaded_for_it() -> None:
    code = (
        "import sys, hacrl.run_directory, hacrl.metrics; from hacrl.environment import describe_start; "
        "assert describe_start()['gpus'] == []; assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
