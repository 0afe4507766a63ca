"""Two random-weight models with tokenizers of their own, small enough for every test: no download, no training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)


def build_tiny_models(folder: Path) -> dict[str, Path]:
    """`qwen` and `llama`: other architecture, vocabulary, special tokens and chat template; hidden 32, 2 layers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedModel,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    def tokenizer(size: int, special: list[str], *, eos: str, pad: str, template: str) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(_corpus(), trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=eos, pad_token=pad, chat_template=template, model_max_length=256
        )

    def save(name: str, model: PreTrainedModel, tokens: PreTrainedTokenizerFast) -> Path:
        model.generation_config = GenerationConfig(eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id)
        model.save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
        return folder / name

    common = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokens = tokenizer(
            320,
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            eos="<|im_end|>",
            pad="<|endoftext|>",
            template=CHATML,
        )
        ids = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id, "bos_token_id": None}
        qwen = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokens), **common, **ids))
        folders = {"qwen": save("qwen", qwen, tokens)}

        tokens = tokenizer(290, ["<pad>", "<s>", "</s>"], eos="</s>", pad="<pad>", template=INST)
        ids = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id, "bos_token_id": 1}
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **common, **ids))
        folders["llama"] = save("llama", llama, tokens)
    return folders


def _corpus() -> Iterator[str]:
    for left in range(10):
        for right in range(10):
            yield f"What is {left} plus {right}? The answer is {left + right}."
