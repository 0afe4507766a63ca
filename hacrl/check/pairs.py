"""What happens to text on its way from one agent to another, tried on the run's own prompts and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hacrl.config import RunConfig
from hacrl.encode import Encoder


@dataclass(frozen=True, kw_only=True, slots=True)
class PairReport:
    """One learner and one author whose rollouts it uses.

    `same_tokenizer`: ids are passed on and nothing is re-tokenised. `templates` is `same`, `different`, or says which
    of the two is plain. `prompt_ratio`, `answer_ratio`: the learner's tokens over the author's, None without texts.
    `round_trip_failures` of `texts`: not the same text after the learner's encoding and decoding; `example` is one.
    `answers_too_long`: by that ratio, answers at the author's limit are above the learner's.
    """

    learner: str
    author: str
    same_tokenizer: bool
    templates: str
    learner_eos: str
    author_eos: str
    prompt_ratio: float | None
    answer_ratio: float | None
    texts: int
    round_trip_failures: int
    example: str | None
    answers_too_long: bool


def pair_reports(
    config: RunConfig, encoders: Mapping[str, Encoder], prompts: Sequence[str], answers: Sequence[str]
) -> list[PairReport]:
    """One entry per learner and author, in the order of the agents; none where the algorithm shares nothing."""
    return [
        _report(config, encoders, learner.name, author, prompts, answers)
        for learner in config.agents
        for author in config.authors_for(learner)
        if author != learner.name
    ]


def token_text(encoder: Encoder, token_id: int) -> str:
    """A token as it is written in the vocabulary, special ones too."""
    return str(encoder.tokenizer.convert_ids_to_tokens(token_id))


def template_kind(encoder: Encoder) -> str:
    """`chat` or `plain`: what prompts go through."""
    return "chat" if encoder.uses_chat else "plain"


def _report(
    config: RunConfig,
    encoders: Mapping[str, Encoder],
    learner: str,
    author: str,
    prompts: Sequence[str],
    answers: Sequence[str],
) -> PairReport:
    mine, others = encoders[learner], encoders[author]
    same = mine.fingerprint == others.fingerprint
    failed = [] if same else [text for text in (*prompts, *answers) if not _round_trip(mine, text)]
    answer_ratio = _ratio(mine, others, answers)
    limits = {name: config.sampling_of(config.agent(name)).max_new_tokens for name in (learner, author)}
    return PairReport(
        learner=learner,
        author=author,
        same_tokenizer=same,
        templates=_templates(mine, others, learner, author),
        learner_eos=token_text(mine, mine.eos_token_id),
        author_eos=token_text(others, others.eos_token_id),
        prompt_ratio=_ratio(mine, others, prompts),
        answer_ratio=answer_ratio,
        texts=len(prompts) + len(answers),
        round_trip_failures=len(failed),
        example=failed[0] if failed else None,
        answers_too_long=limits[author] * (answer_ratio or 1.0) > limits[learner] * (1 + 1e-9),
    )


def _round_trip(encoder: Encoder, text: str) -> bool:
    return encoder.decode(encoder.encode_completion(text, finish_reason="length")) == text


def _ratio(mine: Encoder, others: Encoder, texts: Sequence[str]) -> float | None:
    def tokens(encoder: Encoder) -> int:
        return sum(len(encoder.encode_completion(text, finish_reason="length")) for text in texts)

    if mine.fingerprint == others.fingerprint:
        return 1.0
    theirs = tokens(others)
    return tokens(mine) / theirs if theirs else None


def _templates(mine: Encoder, others: Encoder, learner: str, author: str) -> str:
    if mine.uses_chat and others.uses_chat:
        return "same" if mine.tokenizer.chat_template == others.tokenizer.chat_template else "different"
    if not mine.uses_chat and not others.uses_chat:
        return "both plain"
    return f"{learner if others.uses_chat else author} plain"
