"""A learner's state on disk, written by one worker or by several, and read by any number of them.

learner.pt            schedule and decisions; from one worker, the optimizer too
weights.safetensors   trained weights by name                                    one worker
shards/               trained weights and the optimizer's tensors by name,       several workers
                      each worker's parts in a file of its own, in the format of torch.distributed.checkpoint
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hacrl.errors import RunDirectoryError
from hacrl.learner import Learner
from hacrl.policy import Policy, check_weights_fit, trained_weights
from hacrl.workers import Workers, part_of

_LEARNER, _WEIGHTS, _SHARDS = "learner.pt", "weights.safetensors", "shards"


def save_state(folder: Path, policy: Policy, learner: Learner, workers: Workers) -> None:
    """Write the trained weights and the learner's state into an existing folder; no frozen weights.

    Raises RunDirectoryError where the disk refuses.
    """
    if workers.size == 1:
        weights = {name: tensor.contiguous().cpu() for name, tensor in trained_weights(policy).items()}
        with told_refusal(folder):
            save_file(weights, folder / _WEIGHTS)
            torch.save(learner.state_dict(), folder / _LEARNER)
        return
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    state = learner.state_dict()
    state["optimizer"] = {"param_groups": state["optimizer"]["param_groups"]}

    def save_learner() -> None:
        with told_refusal(folder):
            torch.save(state, folder / _LEARNER)

    workers.on_first(save_learner)
    tensors = {f"weights/{name}": tensor for name, tensor in trained_weights(policy).items()}
    for name, parameter in policy.trained_parameters().items():
        for moment, value in learner.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{moment}/{name}"] = value
    try:
        dcp.save(tensors, checkpoint_id=folder / _SHARDS)
    except CheckpointException as error:
        raise _refused(folder, error) from error


@contextlib.contextmanager
def told_refusal(folder: Path) -> Iterator[None]:
    """Raise RunDirectoryError for whatever keeps files from being written, which torch and safetensors each tell in
    another way."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _refused(folder, error) from error


def _refused(folder: Path, error: BaseException) -> RunDirectoryError:
    # torch does not say that a disk is full, only that it came out at another place in the file than it should.
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    return RunDirectoryError(
        f"{folder}: the agent's state could not be written, with {free / 2**20:.1f} MiB free on that disk: {error}; "
        f"earlier checkpoints are untouched: make room or give access, then start again with the same command"
    )


def load_state(folder: Path, policy: Policy, learner: Learner, workers: Workers, *, weights_only: bool) -> None:
    """Take over what `save_state` wrote, by however many workers; the weights alone where `weights_only`.

    Raises FileNotFoundError for a missing file, RunDirectoryError for one that cannot be read, ModelError for another
    model's weights.
    """
    if (folder / _SHARDS).is_dir():
        moments = _load_shards(folder / _SHARDS, policy, workers, weights_only=weights_only)
    else:
        _load_weights(folder / _WEIGHTS, policy)
        moments = None
    if weights_only:
        return
    state = torch.load(folder / _LEARNER, map_location="cpu", weights_only=True)
    if moments is not None:
        state["optimizer"]["state"] = moments
    else:
        parts = state["optimizer"]["state"]
        for index, parameter in enumerate(learner.parameters):
            parts[index] = {moment: _moment(value, parameter) for moment, value in parts.get(index, {}).items()}
    state["optimizer"]["state"] = {index: part for index, part in state["optimizer"]["state"].items() if part}
    learner.load_state_dict(state)


@torch.no_grad()
def _load_weights(path: Path, policy: Policy) -> None:
    if not path.exists():
        raise FileNotFoundError(2, "no such file", str(path))
    # One at a time: several workers on a machine would otherwise each hold all of them.
    with safe_open(path, framework="pt") as file:
        check_weights_fit(policy, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
        for name, parameter in policy.own_parameters().items():
            parameter.copy_(part_of(file.get_tensor(name), like=parameter))


def _moment(value: Tensor, parameter: Tensor) -> Tensor:
    """One of the optimizer's tensors, laid out as its parameter is; a count of steps is the same for all workers."""
    return part_of(value, like=parameter) if value.shape == parameter.shape and value.dim() > 0 else value


@torch.no_grad()
def _load_shards(
    folder: Path, policy: Policy, workers: Workers, *, weights_only: bool
) -> Mapping[int, Mapping[str, Tensor]]:
    """Read weights in place; the optimizer's tensors come back by the number of their parameter."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    if not (folder / ".metadata").exists():
        raise FileNotFoundError(2, "no such file", str(folder / ".metadata"))
    saved: Mapping[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {name: tuple(entry.size) for name, entry in saved.items()}
    check_weights_fit(
        policy, {name.removeprefix("weights/"): shape for name, shape in shapes.items() if name.startswith("weights/")}
    )
    parameters = policy.own_parameters()
    targets: dict[str, Tensor] = {f"weights/{name}": parameter.detach() for name, parameter in parameters.items()}
    moments: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(parameters))}
    if not weights_only:
        number = {name: index for index, name in enumerate(parameters)}
        for key, shape in shapes.items():
            kind, _, rest = key.partition("/")
            if kind == "optimizer":
                moment, _, name = rest.partition("/")
                parameter = parameters[name]
                like_it = shape == tuple(parameter.shape) and len(shape) > 0
                target = torch.zeros_like(parameter.detach()) if like_it else torch.zeros(shape)
                targets[key] = moments[number[name]][moment] = target
    try:
        with warnings.catch_warnings():
            # It is told twice that one process reads alone.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(targets, checkpoint_id=folder, no_dist=workers.size == 1)
    except CheckpointException as error:
        causes = "; ".join(f"worker {rank}: {cause}" for rank, (cause, _) in error.failures.items())
        raise RunDirectoryError(f"{folder}: cannot be read: {causes}; restore the folder's files") from error
    return moments
