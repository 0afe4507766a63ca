"""Reward functions: `(prompts, completions, **columns) -> scores`, called in worker processes with time limits.

Built-ins: `math`, `reasoning_gym`, `exact`, `multiple_choice`, each in the module of that name.
"""

from hacrl.rewards.gold import GoldScore, gold_scores
from hacrl.rewards.reward import BUILT_INS, Reward, RewardSpec
from hacrl.rewards.reward_set import RewardSet, load_rewards
from hacrl.rewards.scoring import Scoring
from hacrl.rewards.verdict import check_any_returned, check_any_scored, verdict_metrics
from hacrl.rewards.verifier import Verifier

__all__ = [
    "BUILT_INS",
    "GoldScore",
    "Reward",
    "RewardSet",
    "RewardSpec",
    "Scoring",
    "Verifier",
    "check_any_returned",
    "check_any_scored",
    "gold_scores",
    "load_rewards",
    "verdict_metrics",
]
