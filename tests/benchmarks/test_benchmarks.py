"""Benchmarks: on rows of each set's schema a right answer is right and a near miss is not, any model can be evaluated,
and whatever is wrong is told before a model loads. The rows in `data/` are made up; columns and forms are the sets'."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from test_cli import hacrl
from tiny_runs import run_config

from hacrl import evaluate, train
from hacrl.benchmarks import Benchmark, load_benchmarks
from hacrl.benchmarks.benchmark import _DEFINITIONS
from hacrl.config import EvaluationConfig
from hacrl.evaluation import summarise
from hacrl.rewards import math as judge
from hacrl.tasks import load_tasks
from hacrl.types import Completion, Rollout, Task, Verdict

DATA = Path(__file__).parent / "data"
NAMES = ("math500", "math", "gsm8k", "aime25", "amc23", "minerva", "olympiadbench")
# Room for prompts and answers in the 256 positions of the tiny models.
SHORT = ["sampling.max_prompt_tokens=240", "evaluation.max_new_tokens=4"]


def benchmark(name: str) -> Benchmark:
    (found,) = load_benchmarks([name])
    return found.found_in(DATA)


def score(name: str, answer: Any, text: str) -> float | None:
    arguments = benchmark(name).reward.arguments
    return judge.math([None], [text], answer=[answer], **arguments)[0]


def right_answers(name: str) -> list[tuple[Any, str]]:
    found = benchmark(name)
    references = [task.columns["answer"] for task in load_tasks(found.tasks, name=name)]
    return [(item, str(judge.gold(answer=item, **found.reward.arguments))) for item in references]


# ---------------------------------------------------------------- definitions


def test_the_definitions_are_complete() -> None:
    assert tuple(yaml.safe_load(_DEFINITIONS.read_text())) == NAMES
    for found in load_benchmarks(NAMES):
        assert found.source.startswith(f"https://huggingface.co/datasets/{found.tasks.dataset} ")
        assert found.tasks.answer is not None
        assert "\\boxed{}" in found.tasks.template
        assert found.evaluation.max_new_tokens == 4096
        assert (found.evaluation.k == 1) == (found.evaluation.temperature == 0)
        # What the reward finds by itself in a completion is what the instruction asks for.
        assert (found.reward.function, found.reward.arguments.get("final_answer")) == ("math", None)
    assert {found.name: found.evaluation.k for found in load_benchmarks(NAMES) if found.evaluation.k > 1} == {
        "aime25": 30
    }


def test_page_and_help_name_every_benchmark() -> None:
    page = (Path(__file__).parents[2] / "docs/evaluation.md").read_text()
    shown = re.sub(r"[\s│|]+", " ", hacrl("eval", "--help").output)
    for found in load_benchmarks(NAMES):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{found.name}` |"))
        for fact in (found.tasks.dataset, found.tasks.split, found.tasks.prompt, found.tasks.answer, str(found.size)):
            assert str(fact) in row
        assert found.name in shown


def test_unknown_benchmarks_are_told_with_those_there_are() -> None:
    output = hacrl("eval", "any/model", "--benchmark", "maths500,gsm8k,foo", expect=2).output
    assert "benchmark 'maths500': there is none of this name; did you mean 'math500'?" in output
    assert "benchmark 'foo'" in output
    assert all(name in output for name in NAMES)


# ---------------------------------------------------------------- references and answers


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_given_as_the_answer_is_right(name: str) -> None:
    found = right_answers(name)
    assert found
    for reference, text in found:
        assert len(text) < 80, "a whole solution is no answer"
        assert score(name, reference, f"We see that it is {text}.") == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_the_answers_to_other_tasks_are_wrong(name: str) -> None:
    found = right_answers(name)
    for index, (reference, _) in enumerate(found):
        for other, (_, text) in enumerate(found):
            assert index == other or score(name, reference, text) == 0.0


ANSWERS = [
    ("math500", "100", r"\boxed{100}", 1.0),
    ("math500", r"\left( 2, \frac{\pi}{2} \right)", r"\boxed{(2, \pi/2)}", 1.0),
    ("math500", r"\left( 2, \frac{\pi}{2} \right)", r"\boxed{(\pi/2, 2)}", 0.0),
    ("math500", r"\text{Friday}", r"\boxed{Friday}", 1.0),
    ("math", r"the digit is $\boxed 1$.", r"\boxed{1}", 1.0),
    ("math", r"is $\boxed{12{,}000}$.", r"\boxed{12,000}", 1.0),
    ("math", r"is $\boxed{12{,}000}$.", r"\boxed{12}", 0.0),
    ("math", r"so $\boxed{\frac{5}{6}}$.", r"\boxed{\dfrac{10}{12}}", 1.0),
    ("gsm8k", "<<3*24=72>>72 pens.\n#### 72", r"\boxed{72}", 1.0),
    ("gsm8k", "<<3*24=72>>72 pens.\n#### 72", "#### 72", 1.0),
    ("gsm8k", "= 1250.\n#### 1,250", r"\boxed{1250}", 1.0),
    ("gsm8k", "= 1250.\n#### 1,250", r"\boxed{\$1,250}", 1.0),
    ("gsm8k", "= 1250.\n#### 1,250", r"\boxed{250}", 0.0),
    ("gsm8k", "= 3.\n#### -3", r"\boxed{3}", 0.0),
    ("aime25", "70", r"\boxed{70}", 1.0),
    ("aime25", 70, r"\boxed{070}", 1.0),
    ("aime25", "025", r"\boxed{25}", 1.0),
    ("aime25", "588", r"\boxed{58}", 0.0),
    ("amc23", "27.0", r"\boxed{27}", 1.0),
    ("amc23", 27.0, r"\boxed{27}", 1.0),
    ("amc23", 27.0, r"\boxed{27.1}", 0.0),
    ("minerva", "4.5e33", r"\boxed{4.5 \times 10^{33}}", 1.0),
    ("minerva", "4.5e33", r"\boxed{4.5 \times 10^{32}}", 0.0),
    ("minerva", r"\arcsin{1.3 \sin{\theta_w}}", r"\boxed{\arcsin(1.3 \sin\theta_w)}", 1.0),
    ("minerva", "2 e^{-t}", r"\boxed{x(t) = 2e^{-t}}", 1.0),
    ("minerva", "2 e^{-t}", r"\boxed{2e^{t}}", 0.0),
    ("minerva", "-0.75", r"\boxed{-\frac{3}{4}}", 1.0),
    ("olympiadbench", ["2", r"$\frac{1}{2}$"], r"\boxed{\frac12, 2}", 1.0),
    ("olympiadbench", ["2", r"$\frac{1}{2}$"], r"\boxed{2}", 0.0),
    ("olympiadbench", ["2", r"$\frac{1}{2}$"], r"\boxed{2, \frac13}", 0.0),
    ("olympiadbench", ["$(1,8,19), (2,7,13), (4,5,7)$"], r"\boxed{(4,5,7), (1,8,19), (2,7,13)}", 1.0),
    ("olympiadbench", ["$(1,8,19), (2,7,13), (4,5,7)$"], r"\boxed{(1,8,19)}", 0.0),
    ("olympiadbench", ["$2^{n}-1$"], r"\boxed{2^n - 1}", 1.0),
    ("olympiadbench", [r"$[-\frac{1}{2}, 1)$"], r"\boxed{[-0.5, 1)}", 1.0),
    ("olympiadbench", [r"$[-\frac{1}{2}, 1)$"], r"\boxed{(-0.5, 1)}", 0.0),
]


@pytest.mark.parametrize(("name", "reference", "text", "expected"), ANSWERS)
def test_answers_as_models_give_them(name: str, reference: Any, text: str, expected: float) -> None:
    assert score(name, reference, text) == expected


class Knowing:
    """A fleet that answers every task right."""

    names = ("knowing",)
    absent: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.settings: list[EvaluationConfig] = []
        self.prompts: list[str] = []

    def sample_evaluation(self, tasks: Sequence[Task], settings: EvaluationConfig) -> list[Completion]:
        self.settings.append(settings)
        self.prompts += [str(task.prompt) for task in tasks]
        return [
            Completion(
                task_id=task.id,
                author="knowing",
                index=index,
                text=f"So it is {judge.gold(answer=task.columns['answer'], answer_list='all')}.",
                token_ids=(1,),
                logprobs=(0.0,),
                finish_reason="stop",
                weights_version=0,
            )
            for task in tasks
            for index in range(settings.k)
        ]


def test_who_knows_every_answer_gets_every_score(
    tiny_models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Knowing()

    @contextmanager
    def knowing(*_: Any, **__: Any) -> Iterator[Knowing]:
        yield fleet

    monkeypatch.setattr("hacrl.saved_run._fleet", knowing)
    shutil.copytree(tiny_models["qwen"], tmp_path / "knowing")
    config = json.loads((tmp_path / "knowing" / "config.json").read_text())
    (tmp_path / "knowing" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    with pytest.warns(RuntimeWarning, match="tasks here, and the benchmark is known to have") as told:
        entries = evaluate(tmp_path / "knowing", benchmarks=NAMES, data=DATA)
    assert len(told) == len(NAMES), [str(item.message) for item in told]
    assert [(entry["split"], entry["avg@k"], entry["best@k"], entry["unscored"]) for entry in entries] == [
        (name, 1.0, 1.0, 0) for name in NAMES
    ]
    aime = entries[NAMES.index("aime25")]
    assert (aime["k"], aime["sampling"]) == (30, {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 4096})
    assert "solve" not in fleet.prompts[0]
    assert fleet.prompts[0].endswith("step by step and output the final answer within \\boxed{}.")


# ---------------------------------------------------------------- models, runs, settings


def test_eval_of_a_model_folder(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "out" / "figures.json"
    arguments = ["--benchmark", "gsm8k,aime25", "--data", DATA, "--limit", "2", "--k", "2", "--json", path]
    output = hacrl("eval", tiny_models["qwen"], "evaluation.temperature=0.9", *SHORT, *arguments).output
    assert "gsm8k" in output
    assert "best@2" in output
    gsm8k, aime25 = json.loads(path.read_text())
    for entry in (gsm8k, aime25):
        assert (entry["agent"], entry["step"], entry["tasks"], entry["k"]) == ("qwen", 0, 2, 2)
        assert entry["reward"] == [{"function": "math", "weight": 1.0, "arguments": {}}]
        assert entry["grader"].keys() >= {"hacrl", "math-verify", "sympy", "latex2sympy2-extended"}
        assert entry["tasks_from"]["limit"] == 2
        assert entry["avg@k_stderr"] is not None
        assert entry["best@k_stderr"] is not None
    assert gsm8k["tasks_from"]["dataset"] == str(DATA / "gsm8k.jsonl")
    assert aime25["sampling"] == {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 4}
    assert gsm8k["sampling"] == {"temperature": 0.9, "top_p": 1.0, "max_new_tokens": 4}


def test_eval_of_a_run_and_of_what_it_exported(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    run = train(run_config(tiny_models, tmp_path / "run", steps=1, evaluation={"at_end": False, "at_start": False}))
    options: Any = {"benchmarks": ["minerva"], "data": DATA, "limit": 3}
    overrides = [*SHORT, "evaluation.k=2", "evaluation.temperature=1", "evaluation.max_new_tokens=6"]
    of_run = evaluate(run, overrides, **options)
    assert [(entry["agent"], entry["step"], entry["split"], entry["k"]) for entry in of_run] == [
        ("qwen", 1, "minerva", 2),
        ("llama", 1, "minerva", 2),
    ]
    # The same weights, name and seed: the same answers.
    (exported,) = evaluate(run / "agents" / "qwen", overrides, **options)
    assert exported["mean_tokens"] == of_run[0]["mean_tokens"]


def test_a_model_without_chat_template(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "1 plain"
    shutil.copytree(tiny_models["llama"], folder)
    (folder / "chat_template.jinja").unlink()
    (entry,) = evaluate(folder, SHORT, benchmarks=["amc23"], data=DATA, limit=1)
    assert (entry["agent"], entry["tasks"]) == ("1plain", 1)


def test_training_tasks_are_not_needed(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    config = run_config(tiny_models, tmp_path / "run")
    config["tasks"]["train"] = {"dataset": str(tmp_path / "gone.jsonl")}
    assert [entry["tasks"] for entry in evaluate(config, limit=2)] == [2, 2]


# ---------------------------------------------------------------- told before a model loads


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hacrl.saved_run.LocalFleet", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.usefixtures("no_models")
def test_missing_columns_are_told(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "math500.jsonl").write_text('{"question": "?", "answer": "1"}\n')
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "?", "answr": "1"}\n')
    arguments = ["--benchmark", "math500,gsm8k", "--data", tmp_path]
    output = " ".join(hacrl("eval", tiny_models["qwen"], SHORT[0], *arguments, expect=2).output.split())
    assert "no column 'problem' (option `prompt`); available: question, answer" in output
    assert "no column 'answer' (option `answer`); available: question, answr; did you mean 'answr'?" in output


@pytest.mark.usefixtures("no_models")
def test_without_a_hub_data_is_named(tiny_models: Mapping[str, Path]) -> None:
    output = hacrl("eval", tiny_models["qwen"], SHORT[0], "--benchmark", "math500", expect=2).output
    assert "HuggingFaceH4/MATH-500 (split 'test') cannot be loaded" in output
    assert "--data DIR" in output


@pytest.mark.usefixtures("no_models")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL"], "a model alone has no held-out tasks; name a benchmark"),
        (
            ["MODEL", "--benchmark", "math500", "--data", "EMPTY"],
            "holds no file math500 (.parquet, .jsonl, .json, .csv)",
        ),
        (["MODEL", "--benchmark", "math500", "--checkpoint", "last"], "only the folder of a run has checkpoints"),
        (["EMPTY", "--benchmark", "math500"], "holds neither a run (config.yaml) nor a model (config.json)"),
        (["MODEL", "--benchmark", "math500", "--data", "DATA"], "the model's context holds 256 tokens; lower"),
        (
            ["no/such-model", "--benchmark", "math500", "--data", "DATA"],
            "no tokenizer can be loaded from 'no/such-model'",
        ),
        (["runs/gone"], "runs/gone: no such file"),
        (["runs/gone.yaml", "--benchmark", "math500"], "runs/gone.yaml: no such file"),
        (["MODEL", "--data", "DATA"], "it holds benchmarks; name them, e.g. --benchmark math500"),
    ],
)
def test_what_cannot_be_evaluated(
    tiny_models: Mapping[str, Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"MODEL": str(tiny_models["qwen"]), "EMPTY": str(tmp_path), "DATA": str(DATA)}
    output = hacrl("eval", *(places.get(item, item) for item in arguments), expect=2).output
    assert message in " ".join(output.split())


# ---------------------------------------------------------------- error bars


def test_answers_to_one_task_are_one_cluster() -> None:
    rewards = {"a": [1.0] * 4, "b": [0.0] * 4, "c": [1.0, 0.0, 0.0, 0.0]}
    rollouts = [
        Rollout(
            completion=Completion(
                task_id=task,
                author="x",
                index=index,
                text="",
                token_ids=(1,),
                logprobs=(0.0,),
                finish_reason="stop",
                weights_version=0,
            ),
            verdict=Verdict(reward=reward),
        )
        for task, mine in rewards.items()
        for index, reward in enumerate(mine)
    ]
    figures = summarise(rollouts)
    # Over the task means 1, 0, 1/4: deviations 7/12, -5/12, -2/12; over the 12 answers it would be 0.149.
    assert figures["avg@k"] == pytest.approx(5 / 12)
    assert figures["avg@k_stderr"] == pytest.approx((78 / 144 / 2 / 3) ** 0.5)
    assert figures["best@k"] == pytest.approx(2 / 3)
    assert figures["best@k_stderr"] == pytest.approx(1 / 3)
    assert figures["maj@k_stderr"] is None
