"""The process of one vLLM engine, run by its path with the interpreter of an environment that has vLLM: nothing but
vLLM and the standard library may be imported here. `vllm_sampler.py` is the other side.

    python vllm.py FD FOLDER PARENT

FD is the inherited end of a pipe (`multiprocessing.connection`). A request is a pair (name of a method of `Engine`,
keyword arguments), its reply ("result", value) or ("error", text). Should the process PARENT die, FOLDER is removed and
this process ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any


class Engine:
    """vLLM's offline engine behind plain lists and numbers; `load` comes first."""

    def load(self, **settings: Any) -> str:
        """Start vLLM with keyword arguments of `vllm.LLM`; the kind of device that it runs on, `cpu` or `cuda`."""
        from vllm import LLM
        from vllm.platforms import current_platform

        self.on_cpu = current_platform.is_cpu()
        if self.on_cpu:
            # Compiling takes longer than it saves, again for each model.
            settings["enforce_eager"] = True
            settings["enable_sleep_mode"] = False
            # A prompt cut into parts takes back a random number after each, which generators on a CPU cannot.
            settings["enable_chunked_prefill"] = False
        self.llm = LLM(**settings)
        return str(current_platform.device_type)

    def reload(self, *, folder: str) -> None:
        """Take over all weights from `folder`."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if self.on_cpu:
            self.llm.collective_rpc(_repack_head)

    def sample(
        self,
        *,
        prompts: list[list[int]],
        seeds: list[list[int]],
        stop_token_ids: list[int],
        temperature: float,
        top_p: float,
        max_new_tokens: int,
    ) -> list[list[tuple[list[int], list[float], bool]]]:
        """One answer for each seed of each prompt: ids, log-probabilities, and whether it ended by itself."""
        from vllm import SamplingParams

        # Keys and values of former weights must not serve new ones; and without any, a call repeats another's rounding.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")
        requests = [({"prompt_token_ids": ids}, seed) for ids, own in zip(prompts, seeds, strict=True) for seed in own]
        outputs = self.llm.generate(
            [prompt for prompt, _ in requests],
            [
                SamplingParams(
                    temperature=temperature,
                    top_p=top_p,
                    seed=seed,
                    max_tokens=max_new_tokens,
                    stop_token_ids=stop_token_ids,
                    ignore_eos=True,  # the ends are those given, and no other
                    logprobs=0,
                    detokenize=False,
                )
                for _, seed in requests
            ],
            use_tqdm=False,
        )
        answers = iter(_answer(output.outputs[0]) for output in outputs)
        return [[next(answers) for _ in own] for own in seeds]

    def sleep(self) -> None:
        self.llm.sleep(level=1)

    def wake(self) -> None:
        self.llm.wake_up()


def _answer(output: Any) -> tuple[list[int], list[float], bool]:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"an answer ended by {output.finish_reason!r}")
    ids = list(output.token_ids)
    logprobs = [float(found[token].logprob) for token, found in zip(ids, output.logprobs, strict=True)]
    return ids, logprobs, output.finish_reason == "stop"


def _repack_head(worker: Any) -> None:
    """On a CPU vLLM computes with packed copies of weights, and a head tied to the embedding keeps its old one."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(worker.get_model(), "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        dispatch_cpu_unquantized_gemm(head, False)


# ---------------------------------------------------------------- the process


def serve(engine: Any, connection: Connection) -> None:
    """Answer requests until the other end is closed."""
    # OSError: a parent that dies with a reply unread resets the connection instead of closing it.
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, arguments = connection.recv()
            try:
                reply = ("result", getattr(engine, name)(**arguments))
            except Exception as error:
                traceback.print_exc()
                reply = ("error", f"{type(error).__name__}: {error}")
            connection.send(reply)


def end_with_parent(parent: int, folder: str, ending: threading.Lock) -> None:
    """Once `parent` is dead, end as well, whatever this process is doing."""
    while os.getppid() == parent:
        time.sleep(0.5)
    end(folder, ending)


def end(folder: str, ending: threading.Lock) -> None:
    """Remove `folder`, then kill this process group: vLLM's own processes, which are not waited for, and this one."""
    ending.acquire()  # for good: a second thread that comes here must not kill the first in the midst of removing
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main(engine: Any) -> None:
    file_descriptor, folder = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(file_descriptor, False)
    ending = threading.Lock()
    threading.Thread(target=end_with_parent, args=(int(sys.argv[3]), folder, ending), daemon=True).start()
    serve(engine, Connection(file_descriptor))
    end(folder, ending)


if __name__ == "__main__":
    # This folder has files called vllm.py and transformers.py, which must not hide the libraries.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    main(Engine())
