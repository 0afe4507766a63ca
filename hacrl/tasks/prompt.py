"""A prompt as data sources hold it -> the `Prompt` that agents render."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from hacrl.errors import TaskError
from hacrl.types import Message, Prompt

PLACEHOLDER = "{prompt}"
ROLES = ("system", "user", "assistant")


def check_template(template: str, *, name: str) -> None:
    """Raise `TaskError` unless the template has a place for the prompt."""
    if PLACEHOLDER not in template:
        raise TaskError(
            f"{name}: template {_short(template)} has no {PLACEHOLDER}, so every task would be the same; put "
            f"{PLACEHOLDER} where the prompt goes"
        )


def build_prompt(value: object, *, system: str | None, template: str, place: str) -> Prompt:
    """Text or a list of {role, content} -> `Prompt`, with template and system message applied.

    The template goes around a text, or around the last user message. `place` starts every error message, e.g.
    `train: row 17: column 'prompt'`.

    Raises: TaskError for anything that is not a question put to the agent: no text, unknown roles, a conversation
    that does not end with the user.
    """
    if isinstance(value, str):
        if not value.strip():
            raise TaskError(f"{place}: the prompt is empty; remove the row or name another column")
        # Not str.format: prompts and templates are full of braces (LaTeX, code).
        text = template.replace(PLACEHOLDER, value)
        if system is None:
            return text
        return (Message(role="system", content=system), Message(role="user", content=text))
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise TaskError(
            f"{place}: the prompt is {_short(value)} ({type(value).__name__}); it must be text or a list of "
            f"{{role, content}} messages"
        )
    messages = _messages(cast(Sequence[object], value), place=place)
    if system is not None:
        if messages[0]["role"] == "system":
            raise TaskError(
                f"{place}: the prompt has its own system message {_short(messages[0]['content'])}, and the option "
                f"`system` is set as well; leave one of them out"
            )
        messages.insert(0, Message(role="system", content=system))
    question = template.replace(PLACEHOLDER, messages[-1]["content"])
    return (*messages[:-1], Message(role="user", content=question))


def _messages(value: Sequence[object], *, place: str) -> list[Message]:
    if not value:
        raise TaskError(f"{place}: the list of messages is empty; remove the row or name another column")
    messages: list[Message] = []
    for number, item in enumerate(value):
        where = f"{place}: message {number}"
        if not isinstance(item, Mapping):
            raise TaskError(f"{where} is {_short(item)} ({type(item).__name__}); it must be {{role, content}}")
        turn = cast(Mapping[str, Any], item)
        role, content = turn.get("role"), turn.get("content")
        if role not in ROLES:
            raise TaskError(f"{where} has role {role!r}; known roles are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise TaskError(f"{where} has content {_short(content)} ({type(content).__name__}); only text is possible")
        if not content.strip():
            raise TaskError(f"{where} ({role}) has empty content; remove the message or the row")
        if role == "system" and number > 0:
            raise TaskError(f"{where} is a system message; a system message can only stand first")
        messages.append(Message(role=role, content=content))
    last = messages[-1]["role"]
    if last != "user":
        raise TaskError(
            f"{place}: the conversation ends with a message of the {last}, so there is nothing to answer; it must end "
            f"with a user message" + (" (an answer cannot be begun for the agent)" if last == "assistant" else "")
        )
    return messages


def _short(value: object, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"
