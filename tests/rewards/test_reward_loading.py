"""Finding, naming and checking reward functions before anything else loads."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hacrl.errors import RewardError
from hacrl.rewards import RewardSpec, load_rewards
from hacrl.rewards.reward import load_reward
from hacrl.rewards.reward_set import load_payload

SAMPLES = f"{Path(__file__).parent / 'sample_rewards.py'}"


def scaled(prompts, completions, scale, **columns):
    return [scale] * len(completions)


class Callable:
    def __call__(self, prompts, completions):
        return [1.0] * len(completions)


def test_importing_and_loading_stays_light():
    code = (
        "import sys; from hacrl.rewards import load_rewards, RewardSpec;"
        "load_rewards(['math', 'reasoning_gym', 'exact', RewardSpec(function='multiple_choice')]);"
        "print([m for m in ('torch', 'transformers', 'math_verify', 'sympy', 'numpy', 'dill') if m in sys.modules],"
        " hasattr(sys.modules.get('reasoning_gym'), 'create_dataset'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_names():
    specs = [functools.partial(scaled, scale=1.0), functools.partial(functools.partial(scaled), scale=2.0), Callable()]
    more = [lambda prompts, completions: [1.0], RewardSpec(function="exact", name="strings"), f"{SAMPLES}:plain"]
    names = [reward.name for reward in load_rewards([*specs, *more]).rewards]
    assert names == ["scaled", "scaled-2", "Callable", "lambda", "strings", "plain"]


def test_a_partial_needs_only_what_it_does_not_carry():
    load_rewards([functools.partial(scaled, scale=1.0)]).check_columns([])
    with pytest.raises(RewardError, match="'scaled' needs scale"):
        load_rewards([scaled]).check_columns(["answer"])
    load_rewards([RewardSpec(function=scaled, arguments={"scale": 1.0})]).check_columns([])


def test_a_column_does_not_fill_an_option_of_a_built_in():
    row = {"answer": "5", "final_answer": ["5"], "strict": "no"}
    reward = load_reward(RewardSpec(function="math", arguments={"strict": True}))
    assert reward.used_columns(row) == {"answer": "5"}
    assert reward.call(reward.gold, row) == r"\boxed{5}"
    columns = {name: [value] for name, value in row.items()}
    assert reward.call(reward.function, {"prompts": [None], "completions": ["#### 5"], **columns}) == [1.0]
    # A function of one's own takes every column that it names.
    own = load_reward(RewardSpec(function=lambda completions, final_answer="auto": final_answer))
    assert own.used_columns(row) == {"final_answer": ["5"]}


def test_missing_columns_are_told_together_with_those_there_are():
    rewards = load_rewards([f"{SAMPLES}:needs_columns", "reasoning_gym"])
    rewards.check_columns(["question", "answer", "metadata"])
    with pytest.raises(RewardError) as raised:
        rewards.check_columns(["question", "level"])
    message = str(raised.value)
    assert "'needs_columns' needs answer" in message
    assert "'reasoning_gym' needs answer, metadata" in message
    assert "available columns: level, question" in message
    assert "difficulty" not in message


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mathh", "neither a built-in .*math"),
        ("no_such_module:f", "no_such_module"),
        ("json:no_such", r"json has no 'no_such'; callables there: .*dumps"),
        (f"{SAMPLES}:nothing", "callables there: .*obedient"),
        (f"{SAMPLES}:not_callable", "int cannot be called"),
        ("missing/file.py:f", "there is no file"),
        (f"{SAMPLES}:without_completions", "no `completions`"),
        (3, "int cannot be called"),
    ],
)
def test_errors_name_place_value_and_remedy(function, message):
    with pytest.raises(RewardError, match=message):
        load_rewards([function])


def test_a_file_that_fails_to_run_is_told_each_time(tmp_path):
    (tmp_path / "broken.py").write_text("import not_there\n")
    for _ in range(2):
        with pytest.raises(RewardError, match=r"broken\.py failed with ModuleNotFoundError: .*not_there"):
            load_rewards([f"{tmp_path}/broken.py:f"])


def test_a_file_may_import_its_neighbour_and_shadows_no_library(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_json.py").write_text("VALUE = 2.0\n")
    (tmp_path / "json.py").write_text(
        "from neighbour_of_json import VALUE\ndef f(prompts, completions):\n    return [VALUE] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rewards = load_rewards(["json.py:f"])
    assert rewards.rewards[0].function([], [""]) == [2.0]
    assert hasattr(__import__("json"), "dumps")
    monkeypatch.chdir("/")
    assert load_payload(rewards.payload)[0].name == "f"


def test_unknown_arguments_are_refused():
    with pytest.raises(RewardError, match=r"unknown argument strickt; it takes .*strict"):
        load_rewards([RewardSpec(function="math", arguments={"strickt": True})])
    with pytest.raises(RewardError, match="unknown argument bonus"):
        load_rewards([RewardSpec(function=f"{SAMPLES}:obedient", arguments={"bonus": 1})])


def test_nothing_given_is_an_error():
    with pytest.raises(RewardError, match="none given"):
        load_rewards([])


def test_what_cannot_travel_says_so():
    lock = threading.Lock()

    def locked(prompts, completions):
        with lock:
            return [1.0]

    frames = (frame for frame in [1])

    def generating(prompts, completions):
        return list(frames)

    with pytest.raises(RewardError, match=r"'generating': it cannot be sent to a worker.*module-level"):
        load_rewards([generating])


def test_a_function_gets_only_the_columns_it_names():
    reward = load_reward(RewardSpec(function=f"{SAMPLES}:obedient"))
    assert reward.used_columns({"answer": 1, "large": 2}) == {"answer": 1}
    scorer = load_reward(RewardSpec(function="math", arguments={"strict": False}))
    assert scorer.used_columns({"answer": 1, "strict": 0, "x": 2}) == {"answer": 1, "x": 2}
