"""TRL's side of a comparison: GRPOTrainer at sequence level, which is GSPO, one step for each order.

An order may hold `completions`, token ids for every prompt of the step: they are then trained on instead of being
sampled, so that both sides' updates can be compared number by number.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from work import Driver, Work, digit_share, tasks

from hacrl.rewards.exact import exact
from hacrl.tasks import batch


class Steps(TrainerCallback):  # type: ignore[misc]
    """Waits for an order before each generation, and tells the seconds until the trainer asks for the next."""

    def __init__(self, driver: Driver, updates: int, seconds: dict[str, float]) -> None:
        self.driver, self.updates, self.seconds = driver, updates, seconds
        self.made = 0
        self.start: float | None = None
        self.order: dict[str, Any] | None = None
        self.trainer: Any = None

    def on_step_begin(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        if self.made % self.updates == 0:
            self.tell()
            self.order = self.driver.order()
            if self.order is None:
                control.should_training_stop = True
                raise StopIteration
            self.seconds.clear()
            self.start = time.perf_counter()
        self.made += 1

    def tell(self) -> None:
        if self.start is None:
            return
        seconds = time.perf_counter() - self.start
        logs = [entry for entry in self.trainer.state.log_history if "loss" in entry][-self.updates :]
        self.driver.tell(
            {
                "seconds": seconds,
                "tokens": logs[0]["completions/mean_length"] * self.trainer.sampled_rows,
                "where": dict(self.seconds),
                "logs": logs,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )


def main() -> None:
    driver = Driver()
    work = Work.from_json(sys.argv[1])
    (folder,) = work.models
    torch.manual_seed(work.seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    everything = tasks(work.kind, work.steps * work.prompts)
    rows = [
        {
            "prompt": [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else list(task.prompt),
            "answer": task.columns.get("answer"),
        }
        for step in range(1, work.steps + 1)
        for task in batch(everything, step=step, prompts_per_step=work.prompts, seed=work.seed)
    ]
    sampled_rows = work.prompts * work.answers
    seconds: dict[str, float] = {}

    def reward(completions: Any, answer: Any, **_: Any) -> list[float | None]:
        if work.kind == "demo":
            return exact([], completions, answer=answer, final_answer="hash")
        return [*digit_share([], [completion[0]["content"] for completion in completions])]

    steps = Steps(driver, work.updates, seconds)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[steps],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=sampled_rows // work.updates,
            gradient_accumulation_steps=1,
            steps_per_generation=work.updates,
            num_generations=work.answers,
            max_completion_length=work.tokens,
            importance_sampling_level="sequence",
            loss_type="grpo",
            beta=0.0,
            epsilon=3e-4,
            epsilon_high=4e-4,
            learning_rate=work.learning_rate,
            lr_scheduler_type="constant",
            max_steps=work.steps * work.updates,
            temperature=1.0,
            shuffle_dataset=False,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            seed=work.seed,
        ),
    )
    trainer.sampled_rows = sampled_rows
    steps.trainer = trainer
    generate = trainer._generate_single_turn

    def given_or_sampled(prompt_ids: Any, *arguments: Any, **others: Any) -> Any:
        given = (steps.order or {}).get("completions")
        if given is None:
            start = time.perf_counter()
            result = generate(prompt_ids, *arguments, **others)
            seconds["sample"] = seconds.get("sample", 0.0) + time.perf_counter() - start
            return result
        assert [list(ids) for ids in prompt_ids] == [prompt for prompt, _ in given], "prompts differ"
        return [answer for _, answer in given], None

    trainer._generate_single_turn = given_or_sampled
    try:
        trainer.train()
    except StopIteration:
        return
    steps.tell()


if __name__ == "__main__":
    main()
