"""One agent's network: how it is loaded, which of its weights are trained, and log-probabilities under it."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hacrl.config import AgentConfig
from hacrl.errors import ModelError
from hacrl.seeds import derive_seed
from hacrl.workers import Workers, part_of

# Elements of the largest logits tensor that exists at any time (float32: 64 MiB).
LOGIT_CHUNK_ELEMENTS = 2**24


class Policy:
    """A causal language model, or one LoRA adapter on a base model that several policies may share.

    Trained weights are float32 whatever the compute type, so that small updates are not rounded away; frozen
    weights are held in the compute type. `active()` must surround every forward pass. After `shard`, each of several
    workers holds a part of every weight, and they compute log-probabilities at the same time or not at all.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        adapter: str | None,
        trains: bool,
        device: torch.device,
        compute_dtype: torch.dtype,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.adapter = adapter
        self.trains = trains
        self.device = device
        self.compute_dtype = compute_dtype
        self.gradient_checkpointing = gradient_checkpointing
        causal_lm = model.get_base_model() if adapter is not None else model  # type: ignore[operator]
        self.causal_lm = cast(Any, causal_lm)
        # Models took `past_key_values` before transformers renamed it to `cache`.
        parameters = inspect.signature(type(self.causal_lm).forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        # How often anything has been computed: what grows while the agent is at work.
        self.passes = 0
        self._sharded: Any = None  # encloses the model where its weights are shared out
        self._is_whole = False
        self.shares_prompts = False
        self.chunked_head = self._head_matches_model()
        # Gradient checkpointing and a cache exclude each other.
        self.shares_prompts = not gradient_checkpointing and self._shared_prompts_match()

    def shard(self, workers: Workers) -> None:
        """Keep this worker's part of every weight alone; layers are made whole one by one, while they compute.

        Gradients are summed over the workers, each of which must make as many passes, in the same order.
        """
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # Autocast would keep its own copy of each weight until the backward pass, and with all of them the whole model.
        # So layers are put together in the compute type. What enters them stays as it is: the sum that runs through the
        # layers is float32, as it is in one process. So are the weights around the layers, which autocast converts.
        precision = MixedPrecisionPolicy(
            param_dtype=None if self.compute_dtype is torch.float32 else self.compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        around = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in self._layers():
            fully_shard(layer, mesh=workers.mesh, mp_policy=precision, reshard_after_forward=True)
        # `reshard_after_forward`: after a pass without gradient nothing else would notice that weights have moved on.
        self._sharded = fully_shard(
            _Computation(self.model), mesh=workers.mesh, mp_policy=around, reshard_after_forward=True
        )
        for module in self._sharded.modules():
            if isinstance(module, FSDPModule):
                # Every row is already divided by the rows of the whole minibatch. gloo knows no scaled sum.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # Rows of one worker may miss an expert that those of another one use.
                module.set_reduce_scatter_unused_params(True)
        # The gradient of answers reaches their prompt through the cache, past the layers' outputs, where FSDP waits for
        # it to put weights together again.
        self.shares_prompts = False

    def _layers(self) -> list[nn.Module]:
        """The blocks that transformers keeps in one piece when it distributes a model."""
        kinds = set(getattr(self.causal_lm, "_no_split_modules", None) or ())
        blocks = [module for module in self.causal_lm.modules() if type(module).__name__ in kinds]
        # Embeddings may be the head as well, and stay outside. Inner blocks come before those that hold them.
        embeddings = self.causal_lm.get_input_embeddings()
        return [block for block in reversed(blocks) if all(part is not embeddings for part in block.modules())]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, every worker holds all weights, so that it can compute without the others; nothing may be trained.

        Workers enter and leave at the same time. Nothing happens where the policy is not sharded.
        """
        if self._sharded is None or self._is_whole:
            yield
            return
        from torch.distributed.fsdp import FSDPModule

        parts = [module for module in self._sharded.modules() if isinstance(module, FSDPModule)]
        for module in parts:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for module in parts:
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()

    def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Every use of the weights, through the module whose hooks put them together where they are shared out."""
        return function(*arguments) if self._sharded is None else self._sharded(function, *arguments)

    @property
    def config(self) -> Any:
        return self.causal_lm.config

    @property
    def vocabulary(self) -> int:
        return int(self.causal_lm.get_output_embeddings().weight.shape[0])

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Select this policy's adapter and arithmetic; evaluation mode unless `training()` says otherwise."""
        if self.adapter is not None:
            self.model.set_adapter(self.adapter)  # type: ignore[operator]
        with torch.autocast(
            self.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype is not torch.float32
        ):
            yield

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """`active()` in training mode: LoRA dropout and gradient checkpointing where they were asked for."""
        self.model.train()
        if self.gradient_checkpointing:
            self._switch_checkpointing("enable", {"use_reentrant": False})
            self.causal_lm.enable_input_require_grads()
        try:
            with self.active():
                yield
        finally:
            if self.gradient_checkpointing:
                self._switch_checkpointing("disable")
                self.causal_lm.disable_input_require_grads()
            self.model.eval()

    def _switch_checkpointing(self, verb: str, *arguments: Any) -> None:
        # transformers renamed the method; older releases have the second name only.
        names = (f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}")
        next(filter(None, (getattr(self.causal_lm, name, None) for name in names)))(*arguments)

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The base model's own behaviour: the starting weights of a LoRA policy."""
        with self.active(), self.model.disable_adapter():  # type: ignore[operator]
            yield

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        return self.own_parameters() if self.trains else {}

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """What training changes, or would change where this copy of the agent is not trained."""
        if self.adapter is None:
            return dict(self.model.named_parameters())
        return {name: parameter for name, parameter in self.model.named_parameters() if _belongs_to(name, self.adapter)}

    def decode_step(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        """Logits (B x V, float32) after the last position; `cache` is extended in place."""
        self.passes += 1
        return self._compute(self._decode_step, input_ids, attention_mask, position_ids, cache)

    def _decode_step(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        output = self.causal_lm(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: cache},
        )
        return output.logits[:, -1].float()

    def token_logprobs(
        self, input_ids_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, in nats, of every token marked in `mask_BT`; float32.

        Both results are B x T and zero elsewhere; the value at position t belongs to the token `input_ids_BT[:, t]`
        given all earlier ones, so position 0 must not be marked. Logits are divided by `temperature`. Gradient
        flows through the log-probabilities only. The vocabulary dimension exists for `LOGIT_CHUNK_ELEMENTS`
        elements at a time, in the forward and in the backward pass. Equal rows, which are common where answers are
        short, are computed once.
        """
        self.passes += 1
        return self._compute(self._token_logprobs, input_ids_BT, attention_mask_BT, mask_BT, temperature)

    def _token_logprobs(
        self, input_ids_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        different_D, same_as_B = _different_rows(input_ids_BT, attention_mask_BT, mask_BT)
        if len(different_D) < len(same_as_B):
            logprobs_DT, entropy_DT = self._token_logprobs(
                input_ids_BT[different_D], attention_mask_BT[different_D], mask_BT[different_D], temperature
            )
            return logprobs_DT[same_as_B], entropy_DT[same_as_B]
        targets_N = input_ids_BT[mask_BT]
        if self.shares_prompts and (groups := _PromptGroups.find(input_ids_BT, attention_mask_BT, mask_BT)) is not None:
            hidden_NH = self._hidden_after_shared_prompts(groups)
        else:
            hidden_NH = self._hidden(input_ids_BT, attention_mask_BT)[mask_BT.roll(-1, dims=1)]
        logprobs_N, entropy_N = _chunked_logprobs(
            hidden_NH,
            targets_N,
            self._head if self.chunked_head else nn.Identity(),
            temperature=temperature,
            chunk=max(1, LOGIT_CHUNK_ELEMENTS // self.vocabulary),
        )
        logprobs_BT = torch.zeros(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
        entropy_BT = torch.zeros_like(logprobs_BT)
        entropy_BT[mask_BT] = entropy_N
        return logprobs_BT.masked_scatter(mask_BT, logprobs_N), entropy_BT

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor, cache: Any = None) -> Tensor:
        """What the head takes, at every place of `input_ids`: last hidden states, or logits without `chunked_head`.

        With a cache, `attention_mask` covers its places too, and the cache is extended.
        """
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        caching = {"use_cache": False} if cache is None else {"use_cache": True, self.cache_argument: cache}
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **caching,
        }
        if self.chunked_head:
            return self.causal_lm.get_decoder()(**arguments).last_hidden_state
        return self.causal_lm(**arguments).logits

    def _hidden_after_shared_prompts(self, groups: _PromptGroups) -> Tensor:
        """The same as `_hidden` at the places before answer tokens (N x H), each different prompt computed once.

        Gradient flows from all answers through the cache into their common prompt.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        prompts = self._hidden(groups.prompt_ids_UP, groups.prompt_mask_UP, cache)
        cache.batch_select_indices(groups.prompt_of_row_B)
        first_B1H = prompts[:, -1:][groups.prompt_of_row_B]
        if groups.answer_ids_BA.shape[1] == 1:
            return first_B1H[groups.answer_mask_BA]
        # The last token of an answer predicts nothing that is asked for.
        attention = torch.cat([groups.prompt_mask_UP[groups.prompt_of_row_B], groups.answer_mask_BA.long()], 1)[:, :-1]
        later = self._hidden(groups.answer_ids_BA[:, :-1], attention, cache)
        return torch.cat([first_B1H, later], 1)[groups.answer_mask_BA]

    def _head(self, hidden_NH: Tensor) -> Tensor:
        logits = self.causal_lm.get_output_embeddings()(hidden_NH).float()
        config = self.causal_lm.config.get_text_config()
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (scaling := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / scaling
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def _head_matches_model(self) -> bool:
        """Whether decoder + `_head` gives the model's own logits; if not, log-probs take the model's full logits.

        Some architectures scale logits in ways of their own. A wrong guess would train on wrong probabilities
        without a sign, so the shortcut is tried against the model once instead of being trusted.
        """
        self.model.eval()
        ids = (torch.arange(6, device=self.device) * 7 + 1).remainder(self.vocabulary)[None]
        with self.active():
            try:
                own = self._head(self.causal_lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
            except (AttributeError, TypeError, RuntimeError):
                return False
            expected = self.causal_lm(input_ids=ids, use_cache=False).logits.float()
        return own.shape == expected.shape and torch.allclose(own, expected, rtol=1e-3, atol=1e-3)

    @torch.no_grad()
    def _shared_prompts_match(self) -> bool:
        """Whether prompts computed once, through the cache, give the probabilities of whole rows; tried once, too.

        Not every architecture has a cache whose rows can be selected (state-space layers, for instance).
        """
        ids = (torch.arange(24, device=self.device) * 7 + 1).remainder(self.vocabulary)
        prompts, answers = (ids[:5], ids[2:5]), ids[5:20].reshape(3, 5)
        rows = [torch.cat([prompts[index], answer]) for index, answer in zip((0, 0, 1), answers, strict=True)]
        attention = torch.tensor([[1] * 10, [1] * 9 + [0], [1] * 8 + [0, 0]], device=self.device)
        input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = attention.bool() & (torch.arange(10, device=self.device) >= torch.tensor([[5], [5], [3]]).to(ids))
        tolerance = 1e-3 if self.compute_dtype is torch.float32 else 5e-2
        with self.active():
            expected, _ = self.token_logprobs(input_ids, attention, mask, temperature=1.0)
            self.shares_prompts = True
            try:
                shared, _ = self.token_logprobs(input_ids, attention, mask, temperature=1.0)
            except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
                return False
            finally:
                self.shares_prompts = False
        return torch.allclose(shared, expected, rtol=tolerance, atol=tolerance)


class _Computation(nn.Module):
    """Encloses a model: computes what it is given, so that hooks run around uses of weights outside `model.forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PromptGroups:
    """Rows taken apart: U different prompts, padded on the left, and the answer of every row, padded on the right."""

    prompt_ids_UP: Tensor
    prompt_mask_UP: Tensor
    prompt_of_row_B: Tensor
    answer_ids_BA: Tensor
    answer_mask_BA: Tensor

    @classmethod
    def find(cls, input_ids_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor) -> _PromptGroups | None:
        """None where taking rows apart saves no computed token, or where a row is no prompt followed by an answer."""
        answers_B = mask_BT.sum(1)
        prompts_B = attention_mask_BT.sum(1) - answers_B
        lengths = list(zip(prompts_B.tolist(), answers_B.tolist(), strict=True))
        place_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
        follows = (place_T >= prompts_B[:, None]) & (place_T < (prompts_B + answers_B)[:, None])
        if min(min(pair) for pair in lengths) == 0 or not torch.equal(follows, mask_BT):
            return None
        rows = input_ids_BT.tolist()
        numbers: dict[tuple[int, ...], int] = {}
        prompt_of_row = [
            numbers.setdefault(tuple(row[:prompt]), len(numbers))
            for row, (prompt, _) in zip(rows, lengths, strict=True)
        ]
        longest_prompt, longest_answer = max(map(len, numbers)), max(answer for _, answer in lengths)
        if len(numbers) * longest_prompt + len(rows) * longest_answer >= mask_BT.numel():
            return None
        prompt_ids = [[0] * (longest_prompt - len(prompt)) + list(prompt) for prompt in numbers]
        prompt_mask = [[0] * (longest_prompt - len(prompt)) + [1] * len(prompt) for prompt in numbers]
        device = input_ids_BT.device
        answer_place_BA = (prompts_B[:, None] + torch.arange(longest_answer, device=device)).clamp(max=len(place_T) - 1)
        return cls(
            prompt_ids_UP=torch.tensor(prompt_ids, device=device),
            prompt_mask_UP=torch.tensor(prompt_mask, device=device),
            prompt_of_row_B=torch.tensor(prompt_of_row, device=device),
            answer_ids_BA=input_ids_BT.gather(1, answer_place_BA),
            answer_mask_BA=torch.arange(longest_answer, device=device) < answers_B[:, None],
        )


def _different_rows(input_ids_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The first of each kind of equal rows (D), and for every row (B) which of these it equals."""
    device = input_ids_BT.device
    # Padding is no part of a row, whatever ids fill it.
    ids_BT = torch.where(attention_mask_BT.bool(), input_ids_BT, -1)
    kinds, same_as_B = torch.cat([ids_BT, mask_BT.long()], 1).unique(dim=0, return_inverse=True)
    places_B = torch.arange(len(same_as_B), device=device)
    first_D = torch.full((len(kinds),), len(same_as_B), device=device).scatter_reduce(0, same_as_B, places_B, "amin")
    order = first_D.argsort()
    return first_D[order], order.argsort()[same_as_B]


def _chunked_logprobs(
    hidden_NH: Tensor, targets_N: Tensor, head: Callable[[Tensor], Tensor], *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    def part(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float() / temperature
        normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        with torch.no_grad():
            entropy = normaliser - torch.linalg.vecdot(logits.softmax(-1), logits)
        return logprobs, entropy.detach()

    if hidden_NH.shape[0] == 0:
        return hidden_NH.new_zeros(0, dtype=torch.float32), hidden_NH.new_zeros(0, dtype=torch.float32)
    parts = []
    for hidden, targets in zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True):
        if torch.is_grad_enabled() and hidden.requires_grad and len(hidden_NH) > chunk:
            # Logits are recomputed in the backward pass instead of being kept; those of a single chunk may be kept.
            parts.append(checkpoint(part, hidden, targets, use_reentrant=False))
        else:
            parts.append(part(hidden, targets))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


# ---------------------------------------------------------------- loading


def load_policies(agents: list[AgentConfig], *, seed: int) -> dict[str, Policy]:
    """Load every agent's policy; LoRA agents with the same base model, type and device share it in memory.

    Adapters are initialised from `seed` and the agent's name alone, so neither order nor number of agents matters.
    """
    bases: dict[tuple[Any, ...], nn.Module] = {}
    policies: dict[str, Policy] = {}
    for agent in agents:
        device = resolve_device(agent)
        compute_dtype = resolve_dtype(agent, device)
        if agent.lora is None:
            model = _load_model(agent, device, torch.float32 if agent.role != "author" else compute_dtype)
            model.requires_grad_(agent.role != "author")
        else:
            key = base_key(agent, device, compute_dtype)
            base = bases.get(key)
            if base is None:
                base = _load_model(agent, device, compute_dtype).requires_grad_(False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(seed, "adapter", agent.name))
                model = bases[key] = add_adapter(base, agent)
        model.eval()
        policies[agent.name] = Policy(
            model,
            adapter=_adapter_name(agent) if agent.lora is not None else None,
            trains=agent.role != "author",
            device=device,
            compute_dtype=compute_dtype,
            gradient_checkpointing=agent.gradient_checkpointing,
        )
    return policies


def resolve_device(agent: AgentConfig) -> torch.device:
    if agent.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(agent.device)
    except RuntimeError as error:
        raise ModelError(f"agent {agent.name}: device {agent.device!r} is not known to torch: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"agent {agent.name}: device {agent.device!r}, but torch sees {torch.cuda.device_count()} CUDA device(s); "
            f"use device: auto or cpu"
        )
    return device


def resolve_dtype(agent: AgentConfig, device: torch.device) -> torch.dtype:
    if agent.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if agent.dtype == "bfloat16" else torch.float32


def pretrained_arguments(agent: AgentConfig) -> dict[str, Any]:
    """What names an agent's files, in the form `from_pretrained` takes."""
    arguments: dict[str, Any] = {"trust_remote_code": agent.trust_remote_code}
    if agent.revision is not None:
        arguments["revision"] = agent.revision
    if agent.gguf_file is not None:
        arguments["gguf_file"] = agent.gguf_file
    return arguments


def _load_model(agent: AgentConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    arguments = pretrained_arguments(agent)
    if agent.attention is not None:
        arguments["attn_implementation"] = agent.attention
    try:
        model = AutoModelForCausalLM.from_pretrained(agent.model, dtype=dtype, **arguments)
    except Exception as error:  # broken weights, sizes that do not fit, missing libraries: no common error type
        where = "local folder" if Path(agent.model).exists() else "hub id (no such local folder)"
        raise ModelError(f"agent {agent.name}: cannot load model {agent.model!r} ({where}): {error}") from error
    if agent.gguf_file is not None:
        # transformers marks a dequantised model as quantised and then refuses to save it: move its weights into a
        # plain model of the same configuration.
        config = model.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        model = plain
    _remove_dropout(model)
    return cast(nn.Module, model.to(device))


def _remove_dropout(model: nn.Module) -> None:
    """Switch off a model's own dropout: with it, the learner's probabilities are not those that were sampled from.

    Only modules are changed, so an exported model keeps the configuration it came with. A LoRA's dropout, which the
    user asks for, is added later.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def base_key(agent: AgentConfig, device: torch.device, compute_dtype: torch.dtype) -> tuple[Any, ...]:
    """Equal for LoRA agents that share their base model in memory."""
    return (agent.model, agent.gguf_file, agent.revision, agent.attention, str(device), compute_dtype)


def add_adapter(model: nn.Module, agent: AgentConfig) -> nn.Module:
    """The model with the agent's own LoRA adapter, float32, beside any that it has already. Raises ModelError."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftModel, get_peft_model

    assert agent.lora is not None
    lora = PeftLoraConfig(
        r=agent.lora.rank,
        lora_alpha=agent.lora.alpha or 2 * agent.lora.rank,
        lora_dropout=agent.lora.dropout,
        target_modules=agent.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    name = _adapter_name(agent)
    try:
        if isinstance(model, PeftModel):
            model.add_adapter(name, lora)
        else:
            model = get_peft_model(model, lora, adapter_name=name)
    except ValueError as error:
        raise ModelError(f"agent {agent.name}: lora.target_modules {agent.lora.target_modules!r}: {error}") from error
    for key, parameter in model.named_parameters():
        if _belongs_to(key, name):
            parameter.data = parameter.data.float()
    return model


def _belongs_to(parameter: str, adapter: str) -> bool:
    """Whether a parameter is one of this adapter's: `...lora_A.NAME.weight`, or `...lora_embedding_A.NAME`."""
    # An agent may be called `1` or `model`, which also stand elsewhere in the names of parameters.
    return re.search(rf"\.lora_\w+\.{re.escape(adapter)}(\.|$)", parameter) is not None


def _adapter_name(agent: AgentConfig) -> str:
    # Module names must not hold dots; `:` stands in no agent's name, so two names stay two.
    return agent.name.replace(".", ":")


# ---------------------------------------------------------------- weights on disk


def trained_weights(policy: Policy) -> Mapping[str, Tensor]:
    """Everything that training changes, by parameter name; tied weights once."""
    return {name: parameter.detach() for name, parameter in policy.trained_parameters().items()}


def load_trained_weights(policy: Policy, weights: Mapping[str, Tensor]) -> None:
    """Copy weights saved by `trained_weights` into the policy, every name exactly once."""
    check_weights_fit(policy, {name: tuple(weight.shape) for name, weight in weights.items()})
    with torch.no_grad():
        for name, parameter in policy.own_parameters().items():
            parameter.copy_(part_of(weights[name], like=parameter))


def check_weights_fit(policy: Policy, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError unless weights of these names and shapes are the policy's own ones."""
    parameters = policy.own_parameters()
    if parameters.keys() != shapes.keys():
        odd = sorted(parameters.keys() ^ shapes.keys())[:4]
        raise ModelError(f"saved weights do not fit the model: {odd} stand on one side only")
    for name, parameter in parameters.items():
        if parameter.shape != shapes[name]:
            raise ModelError(
                f"saved weights do not fit the model: {name} has shape {shapes[name]}, the model's has "
                f"{tuple(parameter.shape)}"
            )
