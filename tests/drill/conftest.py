"""What all drills share: runs that are judged against an undisturbed one, and the list of outcomes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drill import Drill
from drilled_run import RUN_SECONDS, START_SECONDS, DrilledRun, drilled_config


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and importlib.util.find_spec("ray") is None:
            item.add_marker(pytest.mark.skip(reason="Ray is not installed: hacrl[ray]"))


@pytest.fixture(scope="session")
def undisturbed(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run directory of the same run without a fault, made once for each set of changes to the configuration."""
    made: dict[str, Path] = {}

    def folder(changes: dict[str, Any]) -> Path:
        changes = {name: value for name, value in changes.items() if name != "execution"}
        if "resources" in changes:
            # On this machine alone: how many processes an agent has alters results, and where they are does not.
            changes["resources"] = [
                {name: value for name, value in own.items() if name in ("workers", "samplers")}
                for own in changes["resources"]
            ]
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            run = DrilledRun(
                config=drilled_config(tiny_models, tmp_path_factory.mktemp("undisturbed") / "run", **changes)
            )
            run.start()
            try:
                moment = run.now("no fault")
                assert run.wait(moment, within_s=RUN_SECONDS, go_on_within_s=START_SECONDS) == 0, run.printed()
            finally:
                run.end()
            made[key] = run.folder
        return made[key]

    return folder


@pytest.fixture
def drill(
    request: pytest.FixtureRequest,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    undisturbed: Callable[..., Path],
) -> Iterator[Drill]:
    drill = Drill(request.node.name, tiny_models, tmp_path, undisturbed)
    yield drill
    for run in drill.runs:
        run.end()
