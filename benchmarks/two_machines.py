"""SmolLM2 on one machine and Gemma on another, each of which is killed once: does the run go on, and to the same end?

python examples/fetch_models.py
python benchmarks/two_machines.py --results benchmarks/results/two_machines.json      # needs root, Linux

Three machines are played on this one, each in a network namespace of its own (tests/drill/namespaces.py): the head with
the loop, and one for each agent, to which it is pinned. Whatever runs on an agent's machine is killed when a step has
been recorded, and Ray is started there again some seconds later, as after a reboot. The same run in one process,
undisturbed, tells what the outcome has to be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hacrl.durable_files import write_json

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests/drill")]

from namespaces import Machine, Machines, not_permitted  # noqa: E402
from run_states import metric_lines, rollout_lines  # noqa: E402

CONFIG = HERE.parent / "examples/smollm2-gemma3.yaml"
AGENTS = ("smollm2", "gemma3")
# After which step the machine of which agent dies.
KILLS = {2: 0, 4: 1}
REBOOT_SECONDS = 5.0
LIMIT_SECONDS = 3600.0


def command(output: Path, overrides: list[str]) -> list[str]:
    settings = [
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "export=none",
        "checkpoint.every=2",
        "checkpoint.keep_last=1",
    ]
    hacrl = str(Path(sys.executable).parent / "hacrl")
    return [hacrl, "train", str(CONFIG), f"output={output}", *settings, *overrides]


def recorded(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def disturbed(run: Path, overrides: list[str]) -> dict[str, Any]:
    """The run on three machines; what was killed when, and what became of it."""
    events: list[dict[str, Any]] = []
    with Machines(3) as machines:
        machines.start_ray(cpus=(0, 1, 1))
        pins = [f"agents.{number}.resources.node={machines[number + 1].address}" for number in range(2)]
        cluster = ["execution.name=ray", f"execution.address={machines.ray_address}", "execution.wait_s=120"]
        begin = time.time()
        process = machines[0].popen(command(run, [*overrides, *pins, *cluster]))
        kills = dict(KILLS)
        while process.poll() is None and time.time() - begin < LIMIT_SECONDS:
            time.sleep(0.5)
            step = recorded(run)
            if step in kills:
                machine: Machine = machines[kills[step] + 1]
                agent = AGENTS[kills.pop(step)]
                events.append({"after_step": step, "agent": agent, "killed": len(machine.processes())})
                died = time.time()
                machine.kill()
                time.sleep(REBOOT_SECONDS)
                machines.start_ray_on(machine, cpus=1)
                while recorded(run) <= step and process.poll() is None:
                    time.sleep(0.5)
                events[-1]["seconds_to_next_step"] = time.time() - died
                print(json.dumps(events[-1]), flush=True)
        if process.poll() is None:
            process.kill()
    return {"exit_code": process.returncode, "kills": events}


def main() -> None:
    parser = argparse.ArgumentParser(description="Two real models on two machines, each killed once.")
    parser.add_argument("--output", type=Path, default=Path("runs/two-machines"))
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("overrides", nargs="*", default=["steps=6", "prompts_per_step=2", "group_size=4"])
    options = parser.parse_args()
    if reason := not_permitted():
        sys.exit(reason)
    os.environ["OMP_NUM_THREADS"] = "1"
    shutil.rmtree(options.output, ignore_errors=True)
    alone, apart = options.output / "one-process", options.output / "two-machines"
    subprocess.run(command(alone, options.overrides), check=True)
    found = disturbed(apart, options.overrides)
    lines = [json.loads(line) for line in (apart / "metrics.jsonl").read_text().splitlines()]
    starts = json.loads((apart / "environment.json").read_text())["starts"]
    found |= {
        "overrides": options.overrides,
        "steps": [line["step"] for line in lines],
        "restarts": [line["execution/restarts"] for line in lines],
        "starts": len(starts),
        "metrics_equal_to_one_process": metric_lines(alone) == metric_lines(apart),
        "rollouts_equal_to_one_process": rollout_lines(alone) == rollout_lines(apart),
    }
    print(json.dumps(found, indent=1))
    if options.results:
        write_json(options.results, found)


if __name__ == "__main__":
    main()
