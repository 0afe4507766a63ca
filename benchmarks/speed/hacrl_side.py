"""hacrl's side of a comparison: the real training loop, one step for each order."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from work import Driver, Work

from hacrl import RunConfig, training_steps
from hacrl.agent import Agent

HERE = Path(__file__).resolve()


def configuration(work: Work, output: Path) -> dict[str, Any]:
    return {
        "agents": [
            {
                "name": f"agent{index}",
                "model": model,
                "dtype": "float32",
                "learning_rate": work.learning_rate,
                "micro_batch_tokens": 2**20,
            }
            for index, model in enumerate(work.models)
        ],
        "tasks": {
            "train": {
                "function": f"{HERE.parent / 'work.py'}:tasks",
                "arguments": {"kind": work.kind, "count": work.steps * work.prompts},
            }
        },
        "reward": {"function": "exact", "arguments": {"final_answer": "hash"}}
        if work.kind == "demo"
        else f"{HERE.parent / 'work.py'}:digit_share",
        # TRL adds 1e-4 to the standard deviation of a group.
        "algorithm": {"name": work.method, "epsilon": 1e-4},
        "steps": work.steps,
        "prompts_per_step": work.prompts,
        "group_size": work.answers,
        "sampling": {"max_prompt_tokens": 64, "max_new_tokens": work.tokens, "batch_rows": work.batch_rows},
        # Neither side saves or evaluates between steps.
        "checkpoint": {"every": work.steps, "keep_best": False},
        "evaluation": {"at_start": False, "at_end": False},
        "export": "none",
        "output": str(output),
        "seed": work.seed,
    }


def main() -> None:
    driver = Driver()
    work = Work.from_json(sys.argv[1])
    sampled: dict[str, list[Any]] = {}
    complete = Agent._complete

    def recording(agent: Agent, tasks: Any, **arguments: Any) -> Any:
        completions = complete(agent, tasks, **arguments)
        prompts = {task.id: agent.encoder.prompt_ids(task.prompt) for task in tasks}
        sampled[agent.name] = [(prompts[item.task_id], item.token_ids) for item in completions]
        return completions

    if "record" in sys.argv[2:]:
        Agent._complete = recording  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(**configuration(work, Path(folder) / "run"))
        steps = training_steps(config)
        while driver.order() is not None:
            start = time.perf_counter()
            record = next(steps)
            seconds = time.perf_counter() - start
            driver.tell(
                {
                    "seconds": seconds,
                    "tokens": record.metrics["tokens_sampled"],
                    "metrics": dict(record.metrics),
                    "sampled": sampled,
                    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                }
            )
        steps.close()


if __name__ == "__main__":
    main()
