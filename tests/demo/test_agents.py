"""The agents that ship with the package are small, ordinary Hugging Face folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl.demo import AGENTS_DIRECTORY
from hacrl.demo.build import RECIPES, Recipe, build, build_tokenizer, examples, heldout_accuracy
from hacrl.demo.pretraining import batches
from hacrl.demo.tasks import problem

NAMES = [recipe.name for recipe in RECIPES]


def test_both_agents_together_stay_under_5_megabytes() -> None:
    files = [path for path in AGENTS_DIRECTORY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5e6
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors"}


def test_agents_differ_in_architecture_size_tokenizer_and_chat_template() -> None:
    models = [AutoModelForCausalLM.from_pretrained(AGENTS_DIRECTORY / name) for name in NAMES]
    tokenizers = [AutoTokenizer.from_pretrained(AGENTS_DIRECTORY / name) for name in NAMES]
    assert [type(model).__name__ for model in models] == ["Qwen3ForCausalLM", "LlamaForCausalLM"]
    assert models[0].num_parameters() > 1.3 * models[1].num_parameters()
    assert tokenizers[0].get_vocab() != tokenizers[1].get_vocab()
    assert tokenizers[0].chat_template != tokenizers[1].chat_template
    solution = problem("heldout", 0, 0).solution()
    assert len(tokenizers[0](solution)["input_ids"]) > len(tokenizers[1](solution)["input_ids"])


@pytest.mark.parametrize("name", NAMES)
def test_texts_survive_the_tokenizer(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(AGENTS_DIRECTORY / name)
    solutions = [problem("heldout", 0, index).solution() for index in range(50)]
    for text in [*solutions, "  two  blanks\n\n", "Äpfel 🍎", "1234567"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_agree_between_tokenizer_and_model(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(AGENTS_DIRECTORY / name)
    model = AutoModelForCausalLM.from_pretrained(AGENTS_DIRECTORY / name)
    assert tokenizer.eos_token_id is not None
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    for settings in (model.config, model.generation_config):
        assert (settings.eos_token_id, settings.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem("heldout", 0, 0).question}], add_generation_prompt=True, tokenize=False
    )
    assert len(tokenizer(rendered, add_special_tokens=False)["input_ids"]) < 30


@pytest.mark.parametrize("name", NAMES)
def test_each_agent_starts_good_at_one_kind_and_bad_at_the_others(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(AGENTS_DIRECTORY / name)
    model = AutoModelForCausalLM.from_pretrained(AGENTS_DIRECTORY / name, dtype=torch.float32)
    accuracy = heldout_accuracy(model, tokenizer, count=100)
    weak, strong = ("minus", "times") if name == "qwen" else ("times", "minus")
    assert accuracy[strong] > 0.6
    assert accuracy[weak] < 0.4
    assert accuracy["both"] < 0.4
    assert 0.2 < accuracy["all"] < 0.6


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_targets_cover_the_solution_and_the_end_token_only(recipe: Recipe) -> None:
    tokenizer = build_tokenizer(recipe)
    ids, targets = next(batches(examples(recipe), tokenizer, batch_size=3))
    for row_ids, row_targets in zip(ids, targets, strict=True):
        learned = row_targets[row_targets != -100]
        text = tokenizer.decode(learned)
        assert text.endswith(recipe.family.eos_token)
        assert "####" in text
        assert "Start" not in text
        assert torch.equal(row_ids[row_targets != -100], learned)


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_rebuild_gives_the_shipped_tokenizer(recipe: Recipe) -> None:
    shipped = AutoTokenizer.from_pretrained(AGENTS_DIRECTORY / recipe.name)
    rebuilt = build_tokenizer(recipe)
    assert rebuilt.get_vocab() == shipped.get_vocab()
    assert rebuilt.chat_template == shipped.chat_template


def test_building_twice_gives_the_same_files(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPES[1], clean_steps=2, mistaken_steps=1, batch_size=4)
    for run in ("first", "second"):
        build(recipe, tmp_path / run)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / run).iterdir()} for run in ("first", "second")
    )
    assert first == second
