"""The configuration page says what its models say, and every YAML file of the repository is a valid one."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hacrl.config import load_config

ROOT = Path(__file__).parents[1]
# The methods of a comparison, which tests/test_testbed.py loads with each of its configurations.
METHODS = ROOT / "benchmarks/testbed/methods.yaml"
FOLDERS = ("examples/**", "benchmarks/*", "hacrl/presets")
CONFIGS = sorted({path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.yaml")} - {METHODS})


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_configuration", ROOT / "docs/generate_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_page_is_up_to_date(generator: ModuleType) -> None:
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == generator.page(), "run: make docs"


def test_configuration_page_names_every_option(generator: ModuleType) -> None:
    page = generator.page()
    for _, model in generator._sections():
        for name in model.model_fields:
            assert f"| `{name}` |" in page
        for name, field in model.model_fields.items():
            assert field.description or name == "name", f"{model.__name__}.{name} has no description"


def test_example_on_the_configuration_page_is_valid(generator: ModuleType) -> None:
    block = generator.HEAD.split("Smallest useful file:\n\n")[1].split("\n\n")[0]
    config = load_config(yaml.safe_load(textwrap.dedent(block)))
    assert [agent.name for agent in config.agents] == ["qwen", "llama"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    load_config(path)
