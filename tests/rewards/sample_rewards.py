"""Reward functions for the tests, loaded by path. `obedient` does what each text tells it to."""

from __future__ import annotations

import os
import sys
import time


class Scalar:
    """Looks like a tensor without dimensions."""

    ndim = 0

    def tolist(self):
        return 1.0


class UnpicklableError(Exception):
    """Cannot be rebuilt from its pickle, which would break a pool that sent it as it is."""

    def __init__(self, one, two):
        super().__init__(one)


def obedient(prompts, completions, answer):
    scores = []
    for text, right in zip(completions, answer, strict=True):
        command, _, value = text.partition(" ")
        if command == "hang":
            time.sleep(60)
        elif command == "exit":
            os._exit(int(value))
        elif command == "raise":
            raise UnpicklableError(value, None)
        elif command == "leave":
            sys.exit(0)
        elif command == "one":
            return [1.0]
        elif command == "scalar":
            return 1.0
        elif command == "tensor":
            return Scalar()
        elif command == "word":
            return ["1.0"] * len(completions)
        elif command == "count":
            scores.append(float(len(completions)))
        elif command == "pid":
            scores.append(float(os.getpid()))
        elif command == "imported":
            scores.append(float(value in sys.modules))
        elif command == "environment":
            scores.append(float(os.environ[value]))
        elif command == "slow":
            time.sleep(float(value))
            scores.append(0.25)
        elif command == "score":
            scores.append(None if value == "None" else float(value))
        else:
            scores.append(float(text == right))
    return scores


def plain(prompts, completions, **columns):
    return [1.0] * len(completions)


async def asynchronous(prompts, completions, *, bonus=0.0, **columns):
    return [len(text) + bonus for text in completions]


class Scorer:
    """A callable object that also tells the answers it sees."""

    def __call__(self, prompts, completions, answer):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    def answers(self, completions):
        return [text or None for text in completions]


scorer = Scorer()


def needs_columns(prompts, completions, question, answer, difficulty=0):
    return [1.0] * len(completions)


def conversation(prompts, completions, **columns):
    return [
        float(
            prompt[-1] == {"role": "user", "content": "hi"} and completion == [{"role": "assistant", "content": "yes"}]
        )
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def without_completions(prompts, answer):
    return [1.0]


def group_relative(prompts, completions, **columns):
    longest = max(len(text) for text in completions)
    return [float(len(text) == longest) for text in completions]


not_callable = 3
