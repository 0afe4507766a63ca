"""What a reward function is handed for one completion: plain text, or TRL's list of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hacrl.types import Prompt


def as_prompt(prompt: Prompt) -> str | list[dict[str, str]]:
    """A prompt in the form reward functions expect: text stays text, messages become a list of plain dicts."""
    if isinstance(prompt, str):
        return prompt
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def as_completion(prompt: Prompt, text: str) -> str | list[dict[str, str]]:
    """A completion in the form TRL gives it: text for a text prompt, one assistant message for a conversation."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def completion_text(completion: str | Sequence[Any]) -> str:
    """The text of a completion in either form; of a conversation the last message counts."""
    if isinstance(completion, str):
        return completion
    last: Any = completion[-1]
    return str(last["content"])
