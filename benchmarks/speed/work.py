"""The work that all sides do: a model, prompts, a reward, and the one-step-at-a-time conversation with the driver."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hacrl import Task
from hacrl.demo.settings import AGENTS
from hacrl.demo.tasks import train_tasks


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measured setting. `models` are folders, one agent each; `updates` are optimizer updates per step.

    Every step takes `prompts` new prompts and samples `answers` answers for each, of at most `tokens` tokens. `kind`:

    sums  any model, questions such as "What is 17 + 4?", and a reward that nearly always differs within a group, so
          that no side can leave out a row without an advantage; a random model's answers are all different, too.
    demo  the demo's agents, tasks and reward: trained policies whose answers are often equal, and groups that are often
          all right or all wrong, as in real training.
    """

    kind: str
    models: tuple[str, ...]
    method: str
    prompts: int
    answers: int
    tokens: int
    updates: int
    learning_rate: float
    steps: int
    batch_rows: int
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        fields = json.loads(text)
        return cls(**{**fields, "models": tuple(fields["models"])})


def questions(count: int) -> list[str]:
    draw = random.Random(1)
    return [f"What is {draw.randint(0, 99)} + {draw.randint(0, 99)}?" for _ in range(count)]


def tasks(kind: str, count: int) -> list[Task]:
    """Task source of the measured runs: `benchmarks/speed/work.py:tasks`."""
    if kind == "demo":
        return train_tasks(count=count, seed=0)
    return [Task(id=str(index), prompt=question) for index, question in enumerate(questions(count))]


def digit_share(prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:  # noqa: ARG001
    """Reward of `sums`."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) + len(text) / 1000 for text in completions]


def model_folder(name: str, temporary: Path) -> tuple[str, Path]:
    """Kind of work and model of a command's `--model`: `tiny`, `demo`, or a folder."""
    if name == "demo":
        return "demo", AGENTS / "qwen"
    return "sums", tiny_model(temporary / "tiny") if name == "tiny" else Path(name).resolve()


def tiny_model(folder: Path, *, hidden: int = 128, layers: int = 4) -> Path:
    """A random Qwen3 of 0.85 M parameters with a byte-level vocabulary of 500."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        [f"{text} user assistant {index}" for index, text in enumerate(questions(5000))], trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template="{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Driver:
    """The other end of the pipe: a side waits for an order, makes one step, and tells what it saw."""

    def __init__(self) -> None:
        # Libraries print to stdout as they please; the conversation keeps its own copy of it.
        self._out = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr

    def order(self) -> dict[str, Any] | None:
        """What the driver wants of the next step; None: no more steps."""
        line = sys.stdin.readline()
        return json.loads(line) if line.strip() else None

    def tell(self, seen: dict[str, Any]) -> None:
        self._out.write(json.dumps(seen) + "\n")
        self._out.flush()
