"""The commands as a user meets them: what is printed, exit codes, files, and that nothing heavy loads too early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import run_config
from typer.testing import CliRunner, Result

from hacrl.cli import app
from hacrl.report.figures import charts
from hacrl.report.methods import group_runs
from hacrl.report.rollouts import sample
from hacrl.report.runs import read_runs

BROKEN = {
    "agents": [{"name": "a", "model": "m", "learning_rat": 1}],
    "tasks": {"train": {"dataset": "t.jsonl"}},
    "reward": "exact",
    "steps": 1,
    "prompts_per_step": 0,
    "output": "out",
}


def hacrl(*arguments: str | Path, expect: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == expect, result.output
    return result


def write(path: Path, config: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run of two agents, one with LoRA, and what `hacrl train` printed."""
    folder = tmp_path_factory.mktemp("cli")
    config = run_config(tiny_models, folder / "run", steps=2, evaluation={"k": 2, "every": 1})
    config["agents"][1]["lora"] = {"rank": 2}
    result = hacrl("train", write(folder / "run.yaml", config), "agents.qwen.learning_rate=2e-3")
    return folder / "run", result.output


# ---------------------------------------------------------------- quick things


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["check", "BROKEN"],
        ["train", "BROKEN"],
        ["compare", "BROKEN"],
        ["compare", "BROKEN", "--methods", "hapco", "--axis", "flops"],
    ],
)
def test_help_and_config_errors_do_not_load_torch(arguments: list[str], tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.yaml", BROKEN)
    arguments = [str(broken) if argument == "BROKEN" else argument for argument in arguments]
    code = (
        "import sys\n"
        "from hacrl.cli import app\n"
        "try:\n"
        f"    app({arguments!r})\n"
        "finally:\n"
        "    loaded = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "    assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == (2 if str(broken) in arguments else 0), done.stderr
    assert "Traceback" not in done.stderr


def test_version() -> None:
    assert hacrl("--version").output.startswith("hacrl ")


def test_all_faults_of_a_configuration_are_told_at_once(tmp_path: Path) -> None:
    output = hacrl("check", write(tmp_path / "broken.yaml", BROKEN), expect=2).output
    assert "learning_rat: unknown option; did you mean 'learning_rate'?" in output
    assert "prompts_per_step: got 0" in output


def test_brackets_in_a_message_are_not_markup(tmp_path: Path) -> None:
    assert "[bold]none[/bold].yaml: no such file" in hacrl("train", "[bold]none[/bold].yaml", expect=2).output
    assert "override '[red]'" in hacrl("train", write(tmp_path / "b.yaml", BROKEN), "[red]", expect=2).output


def test_unexpected_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a fault of the program")

    monkeypatch.setattr("hacrl.config.load_config", fail)
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert isinstance(result.exception, ZeroDivisionError)


def test_an_empty_call_shows_the_commands() -> None:
    output = CliRunner().invoke(app, []).output
    for command in ("demo", "train", "compare", "check", "eval", "export", "report"):
        assert command in output


# ---------------------------------------------------------------- train


def test_train_prints_a_line_per_step_and_the_end(trained: tuple[Path, str]) -> None:
    run, output = trained
    lines = output.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 2
    assert any(line.startswith("step 2/2  qwen ") and "held-out" in line for line in lines)
    assert "Held-out avg@2" in output
    assert f"Run folder   {run}" in output
    assert f"Model        {run / 'agents' / 'llama'}" in output
    assert f"hacrl eval {run}" in output


def test_quiet_prints_only_the_end(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", run_config(tiny_models, tmp_path / "run", steps=1))
    output = hacrl("train", config, "--quiet").output
    assert "step 1/1" not in output
    assert "Run folder" in output
    # A finished run has nothing left to do, and says how it ended.
    assert "Held-out avg@2" in hacrl("train", config, "--quiet").output


def test_errors_during_a_run_have_no_traceback(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    config = write(tmp_path / "run.yaml", run_config(tiny_models, tmp_path / "run"))
    output = hacrl("train", config, expect=1).output
    assert "error:" in output
    assert "thesis.tex" in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_is_saved_and_says_how_to_go_on(
    tiny_models: Mapping[str, Path], tmp_path: Path, number: signal.Signals
) -> None:
    config = write(tmp_path / "run.yaml", run_config(tiny_models, tmp_path / "run", steps=500))
    process = subprocess.Popen(
        [sys.executable, "-m", "hacrl.cli", "train", str(config), "seed=3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            process.send_signal(number)
            break
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    assert f"hacrl train {config} seed=3" in rest
    assert "Traceback" not in errors
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert f"after step {int(saved[-1].name.removeprefix('step-'))}, which is saved" in rest


# ---------------------------------------------------------------- check


def test_check_reports_everything(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run", reward="exact", export="none")
    output = " ".join(hacrl("check", write(tmp_path / "run.yaml", config)).output.split())
    for shown in (
        "'<|im_end|>'",
        "12 own + 12 of llama rows in minibatches of 12: 1 update on own rows, then 1 on foreign rows",
        "[0.11 at m=1, 1]",
        "qwen ← llama",
        "different tokenizers",
        "the author's end '</s>' becomes '<|im_end|>'",
        "Reference answers",
        "k = 2",
        "peak on cpu",
        "no errors",
    ):
        assert shown in output
    assert not (tmp_path / "run").exists()


def test_check_warns(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run")
    config["tasks"]["eval"] = config["tasks"]["train"]
    config["agents"][0]["prompt_format"] = "auto"
    config["agents"][1]["sampling"] = {"max_new_tokens": 190}
    output = " ".join(hacrl("check", write(tmp_path / "run.yaml", config)).output.split())
    assert "12 of 12 held-out tasks ask what is also trained on" in output
    assert "long answers of llama take more than qwen's max_new_tokens (8)" in output


def test_check_of_a_shared_lora_base_counts_it_once(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run")
    for name, agent in zip(("one", "two"), config["agents"], strict=True):
        agent |= {"name": name, "model": str(tiny_models["qwen"]), "lora": {"rank": 2}}
    output = hacrl("check", write(tmp_path / "run.yaml", config)).output
    assert "two (base: one)" in output
    assert "same tokenizer: token ids are passed on" in output


def test_check_refuses_what_training_would_refuse(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run", reward="exact")
    config["agents"][0]["model"] = str(tmp_path / "nowhere")
    output = hacrl("check", write(tmp_path / "run.yaml", config), expect=2).output
    assert "agent qwen" in output


# ---------------------------------------------------------------- eval, export


def test_eval_of_a_run_repeats_its_own_evaluation(trained: tuple[Path, str], tmp_path: Path) -> None:
    run, _ = trained
    output = hacrl("eval", run, "--checkpoint", "last", "--json", tmp_path / "a" / "e.json").output
    assert "avg@2" in output
    entries = json.loads((tmp_path / "a" / "e.json").read_text())
    recorded = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    last = {entry["agent"]: entry for entry in recorded if entry["step"] == 2}
    for entry in entries:
        assert entry["step"] == 2
        assert entry["avg@k"] == last[entry["agent"]]["avg@k"]


def test_eval_of_a_configuration(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", run_config(tiny_models, tmp_path / "run"))
    assert "avg@3" in hacrl("eval", config, "evaluation.k=3").output
    assert not (tmp_path / "run").exists()
    assert "only the folder of a run" in hacrl("eval", config, "--checkpoint", "best", expect=2).output


def test_eval_without_held_out_tasks_says_so(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run")
    del config["tasks"]["eval"]
    assert "tasks.eval" in hacrl("eval", write(tmp_path / "run.yaml", config), expect=2).output


def test_export(trained: tuple[Path, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = trained
    output = hacrl("export", run, "--checkpoint", "1", "--output", tmp_path).output
    assert output.split() == [str(tmp_path / "qwen"), str(tmp_path / "llama")]
    for name in ("qwen", "llama"):
        AutoModelForCausalLM.from_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(tmp_path / name)
    assert "| steps | 1 |" in (tmp_path / "qwen" / "README.md").read_text()


def test_export_of_one_agent_as_adapter(trained: tuple[Path, str], tmp_path: Path) -> None:
    run, _ = trained
    hacrl("export", run, "--agent", "llama", "--adapter", "--output", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
    assert (tmp_path / "llama" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--checkpoint", "77"], 1, "no checkpoint of step 77; kept are those of step(s)"),
        (["--checkpoint", "newest"], 2, "it must be best, last or the number of a step"),
        (["--agent", "lama"], 2, "learners are qwen, llama"),
    ],
)
def test_export_of_what_is_not_there(
    trained: tuple[Path, str], arguments: list[str], status: int, message: str
) -> None:
    assert message in " ".join(hacrl("export", trained[0], *arguments, expect=status).output.split())


def test_export_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    hacrl("export", tmp_path, expect=2)


# ---------------------------------------------------------------- report


def test_report_of_a_real_run(trained: tuple[Path, str], tmp_path: Path) -> None:
    output = hacrl("report", trained[0], "--output", tmp_path / "report.html").output
    assert "report.html" in output
    methods = group_runs(read_runs([trained[0]])[0])
    assert methods[0].shares
    made = {chart.id for chart in charts(methods, sample(methods))}
    assert made >= {
        "held-out-0",
        "reward",
        "capability",
        "omega",
        "shares",
        "weight",
        "drift",
        "clip",
        "entropy",
        "time",
    }


# ---------------------------------------------------------------- the public names


def test_public_names_are_there_and_import_lazily() -> None:
    code = (
        "import sys, hacrl\n"
        "assert callable(hacrl.load_config) and hacrl.Task and hacrl.Verdict and hacrl.ConfigError\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(hacrl.__all__) <= set(dir(hacrl))\n"
        "for name in hacrl.__all__: getattr(hacrl, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
