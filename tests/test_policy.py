"""Log-probabilities under a policy, the chunked head, adapters on a shared base, weights on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hacrl.policy as policy_module
from hacrl.config import AgentConfig
from hacrl.errors import ModelError
from hacrl.policy import Policy, load_policies, load_trained_weights, trained_weights


def agent(name: str, model: Path, **options: Any) -> AgentConfig:
    return AgentConfig(name=name, model=str(model), **options)


@pytest.fixture
def policy(tiny_models: dict[str, Path]) -> Policy:
    return load_policies([agent("qwen", tiny_models["qwen"])], seed=0)["qwen"]


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three rows of lengths 9, 6 and 2, padded on the right; everything but the first two tokens is answer."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(5, 200, (3, 9), generator=generator)
    attention = (torch.arange(9)[None] < torch.tensor([9, 6, 2])[:, None]).long()
    mask = attention.bool() & (torch.arange(9)[None] >= 2)
    return input_ids, attention, mask


def reference_logprobs(policy: Policy, temperature: float) -> torch.Tensor:
    input_ids, attention, mask = rows()
    logits = policy.causal_lm(input_ids=input_ids, attention_mask=attention).logits.float() / temperature
    values = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(3, 1), values], 1) * mask


def test_token_logprobs_and_gradient_equal_the_full_softmax(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    input_ids, attention, mask = rows()
    expected = reference_logprobs(policy, 0.7)
    expected.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    policy.model.zero_grad()
    # Chunks of three positions: the answer tokens span several.
    monkeypatch.setattr(policy_module, "LOGIT_CHUNK_ELEMENTS", 3 * policy.vocabulary)
    with policy.active():
        logprobs, entropy = policy.token_logprobs(input_ids, attention, mask, temperature=0.7)
    logprobs.sum().backward()
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)
    assert policy.chunked_head
    assert not entropy.requires_grad
    assert (entropy[mask] > 0).all()
    assert (entropy[~mask] == 0).all()


def test_no_logits_tensor_exceeds_the_chunk(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor rows x positions x vocabulary never exists, in the backward pass either."""
    limit = 2 * policy.vocabulary
    monkeypatch.setattr(policy_module, "LOGIT_CHUNK_ELEMENTS", limit)
    seen = []
    head = policy.causal_lm.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.numel()))
    with policy.active():
        logprobs, _ = policy.token_logprobs(*rows(), temperature=1.0)
    logprobs.sum().backward()
    assert max(seen) <= limit
    assert sum(seen) == 2 * int(rows()[2].sum()) * policy.vocabulary  # forward, and once more in backward


def test_an_unknown_logit_transform_falls_back_to_the_models_own_logits(policy: Policy) -> None:
    forward = type(policy.causal_lm).forward

    class Scaled(type(policy.causal_lm)):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            output = forward(self, *arguments, **options)
            output.logits = output.logits * 3
            return output

    policy.causal_lm.__class__ = Scaled
    scaled = Policy(
        policy.causal_lm, adapter=None, trains=True, device=policy.device, compute_dtype=policy.compute_dtype
    )
    assert not scaled.chunked_head
    with scaled.active():
        logprobs, _ = scaled.token_logprobs(*rows(), temperature=1.0)
    torch.testing.assert_close(logprobs, reference_logprobs(scaled, 1.0), rtol=1e-5, atol=1e-5)


def test_soft_capped_logits_take_the_chunked_head() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that the cap bites
    capped = Policy(model, adapter=None, trains=True, device=torch.device("cpu"), compute_dtype=torch.float32)
    assert capped.chunked_head
    with capped.active():
        logprobs, _ = capped.token_logprobs(*rows(), temperature=1.0)
    torch.testing.assert_close(logprobs, reference_logprobs(capped, 1.0), rtol=1e-4, atol=1e-4)


def test_adapters_share_one_base_and_do_not_touch_each_other(tiny_models: dict[str, Path]) -> None:
    lora = {"rank": 2}
    both = load_policies(
        [agent("one", tiny_models["qwen"], lora=lora), agent("two", tiny_models["qwen"], lora=lora)], seed=3
    )
    one, two = both["one"], both["two"]
    assert one.causal_lm.get_input_embeddings() is two.causal_lm.get_input_embeddings()
    assert not one.trained_parameters().keys() & two.trained_parameters().keys()
    with torch.no_grad():
        for name, parameter in one.trained_parameters().items():
            if "lora_B" in name:
                parameter.fill_(0.5)
    with two.active():
        untouched, _ = two.token_logprobs(*rows(), temperature=1.0)
    with one.active():
        changed, _ = one.token_logprobs(*rows(), temperature=1.0)
    with one.without_adapter():
        base, _ = one.token_logprobs(*rows(), temperature=1.0)
    torch.testing.assert_close(untouched, base)
    assert (changed - base).abs().max() > 0.01
    changed.sum().backward()
    assert all(parameter.grad is not None for parameter in one.trained_parameters().values())
    assert all(parameter.grad is None for parameter in two.trained_parameters().values())


def test_an_adapters_start_depends_on_seed_and_name_alone(tiny_models: dict[str, Path]) -> None:
    lora = {"rank": 2}
    alone = load_policies([agent("two", tiny_models["qwen"], lora=lora)], seed=3)["two"]
    second = load_policies(
        [agent("one", tiny_models["qwen"], lora=lora), agent("two", tiny_models["qwen"], lora=lora)], seed=3
    )["two"]
    for name, weight in trained_weights(alone).items():
        assert torch.equal(weight, trained_weights(second)[name])


def test_trained_weights_are_float32_even_where_arithmetic_is_bfloat16(tiny_models: dict[str, Path]) -> None:
    """At lr 1e-6 a bfloat16 weight of 1.0 would never move: the step is far below its spacing of 2^-8."""
    policy = load_policies([agent("qwen", tiny_models["qwen"], dtype="bfloat16")], seed=0)["qwen"]
    assert {parameter.dtype for parameter in policy.trained_parameters().values()} == {torch.float32}
    norm = policy.trained_parameters()["model.norm.weight"]
    optimizer = torch.optim.AdamW([norm], lr=1e-6, weight_decay=0.0)
    before = norm.detach().clone()
    for _ in range(3):
        with policy.active():
            logprobs, _ = policy.token_logprobs(*rows(), temperature=1.0)
        logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (norm != before).all()
    frozen = load_policies([agent("qwen", tiny_models["qwen"], dtype="bfloat16", role="author")], seed=0)["qwen"]
    assert {parameter.dtype for parameter in frozen.model.parameters()} == {torch.bfloat16}
    assert frozen.trained_parameters() == {}


def test_weights_of_another_model_are_refused(tiny_models: dict[str, Path]) -> None:
    qwen = load_policies([agent("qwen", tiny_models["qwen"])], seed=0)["qwen"]
    llama = load_policies([agent("llama", tiny_models["llama"])], seed=0)["llama"]
    with pytest.raises(ModelError, match="do not fit"):
        load_trained_weights(llama, trained_weights(qwen))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no/such-folder-here"}, "no/such-folder-here"),
        ({"device": "tpu9"}, "tpu9"),
        ({"lora": {"rank": 2, "target_modules": ["no_such_layer"]}}, "no_such_layer"),
    ],
)
def test_what_cannot_be_loaded_names_agent_and_value(
    tiny_models: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    config = AgentConfig(**{"name": "qwen", "model": str(tiny_models["qwen"]), **options})
    with pytest.raises(ModelError, match=message) as caught:
        load_policies([config], seed=0)
    assert "agent qwen" in str(caught.value)


def test_a_models_own_dropout_is_off_and_its_configuration_untouched(tmp_path: Path) -> None:
    """Probabilities with dropout are not those that were sampled from; GSPO's clip of 3e-4 would act on the noise."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    assert config.resid_pdrop == 0.1
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    gpt2 = load_policies([agent("gpt2", tmp_path)], seed=0)["gpt2"]
    with gpt2.active():
        sampled, _ = gpt2.token_logprobs(*rows(), temperature=1.0)
    with gpt2.training():
        trained, _ = gpt2.token_logprobs(*rows(), temperature=1.0)
    assert torch.equal(sampled, trained)
    assert gpt2.config.resid_pdrop == 0.1


def shared_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five rows on two prompts of lengths 6 and 3, answers of lengths 4, 1, 3, 2 and 4."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 200, (length,), generator=generator) for length in (6, 3)]
    parts = [(0, 4), (1, 1), (0, 3), (1, 2), (0, 4)]
    rows = [torch.cat([prompts[which], torch.randint(5, 200, (n,), generator=generator)]) for which, n in parts]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    starts = torch.tensor([len(prompts[which]) for which, _ in parts])[:, None]
    place = torch.arange(input_ids.shape[1])
    return input_ids, (place < lengths).long(), (place < lengths) & (place >= starts)


@pytest.mark.parametrize("family", ["qwen", "llama", "gemma-sliding"])
def test_a_prompt_computed_once_for_its_answers_changes_neither_value_nor_gradient(
    tiny_models: dict[str, Path], family: str
) -> None:
    if family == "gemma-sliding":
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        torch.manual_seed(0)
        config = Gemma3TextConfig(
            vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )  # fmt: skip
        policy = Policy(
            Gemma3ForCausalLM(config),
            adapter=None,
            trains=True,
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
        )
    else:
        policy = load_policies([agent(family, tiny_models[family])], seed=0)[family]
    assert policy.shares_prompts
    computed = []
    policy.causal_lm.get_input_embeddings().register_forward_hook(
        lambda _module, _inputs, output: computed.append(output.shape[0] * output.shape[1])
    )
    results = []
    for shares in (True, False):
        policy.shares_prompts = shares
        policy.model.zero_grad()
        with policy.training():
            logprobs, entropy = policy.token_logprobs(*shared_rows(), temperature=0.7)
        (logprobs * torch.arange(logprobs.shape[1])).sum().backward()
        results.append((logprobs.detach(), entropy, {n: p.grad.clone() for n, p in policy.model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(gradient, results[1][2][name], rtol=1e-3, atol=1e-5)
    assert computed == [2 * 6, 5 * 3, 5 * 10]


def test_a_policy_whose_cache_cannot_be_selected_computes_whole_rows(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import DynamicCache

    def unsupported(self: Any, indices: torch.Tensor) -> None:
        raise NotImplementedError

    monkeypatch.setattr(DynamicCache, "batch_select_indices", unsupported)
    policy = load_policies([agent("qwen", tiny_models["qwen"])], seed=0)["qwen"]
    assert not policy.shares_prompts
    with policy.active():
        logprobs, _ = policy.token_logprobs(*rows(), temperature=0.7)
    torch.testing.assert_close(logprobs, reference_logprobs(policy, 0.7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("names", [("1", "peer"), ("model", "peer"), ("a.b", "a_b")])
def test_an_adapter_is_its_own_whatever_the_agents_are_called(
    tiny_models: dict[str, Path], names: tuple[str, str]
) -> None:
    lora = {"lora": {"rank": 2, "target_modules": ["q_proj", "embed_tokens"]}}
    first, second = load_policies([agent(name, tiny_models["qwen"], **lora) for name in names], seed=0).values()
    assert first.model is second.model
    parts = [set(policy.trained_parameters()) for policy in (first, second)]
    # A and B of two layers and of the embeddings.
    assert [len(part) for part in parts] == [6, 6]
    assert not parts[0] & parts[1]


def test_weights_of_another_size_and_broken_files_are_told(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    small, large = (
        load_policies([agent("qwen", tiny_models["qwen"], lora={"rank": rank})], seed=0)["qwen"] for rank in (2, 4)
    )
    with pytest.raises(ModelError, match=r"lora_A.*has shape \(4, "):
        load_trained_weights(small, trained_weights(large))
    for file in tiny_models["qwen"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelError, match="cannot load model"):
        load_policies([agent("qwen", tmp_path)], seed=0)


@pytest.mark.parametrize("shares", [True, False])
def test_equal_rows_are_computed_once_and_each_gives_its_own_gradient(
    tiny_models: dict[str, Path], shares: bool
) -> None:
    policy = load_policies([agent("qwen", tiny_models["qwen"])], seed=0)["qwen"]
    policy.shares_prompts = shares
    computed = []
    policy.causal_lm.get_input_embeddings().register_forward_hook(
        lambda _module, _inputs, output: computed.append(output.shape[0] * output.shape[1])
    )
    once = shared_rows()
    order = torch.tensor([3, 0, 0, 1, 2, 3, 4, 0])
    factors = torch.arange(1.0, 9.0)
    ids, attention, mask = (tensor[order] for tensor in once)
    ids = torch.where(attention.bool(), ids, torch.arange(8)[:, None])  # padding tells rows apart in nothing
    results = []
    for repeated in (True, False):
        policy.model.zero_grad()
        if repeated:
            logprobs, entropy = policy.token_logprobs(ids, attention, mask, temperature=0.7)
            assert sum(computed) == (2 * 6 + 5 * 3 if shares else 5 * 10)
        else:
            values = [policy.token_logprobs(*(tensor[[row]] for tensor in once), temperature=0.7) for row in range(5)]
            logprobs, entropy = (torch.cat(parts)[order] for parts in zip(*values, strict=True))
        (logprobs.sum(1) * factors).sum().backward()
        results.append((logprobs.detach(), entropy, {n: p.grad.clone() for n, p in policy.model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(gradient, results[1][2][name], rtol=1e-3, atol=1e-5)
