"""The algorithms as pure tensor functions: torch in, torch out, nothing else of the package imported.

    algorithm   what the trainer asks of an algorithm, and the types it hands over
    ops         masked means, the sequence ratio, group statistics, KL
    capability  how strong each agent is now, and the ratio between two agents
    gspo        sequence ratio, own rows (the objective HACPO keeps for own rows)
    grpo        token ratio, own rows
    naive       every row, joint mean and standard deviation, nothing else
    hacpo       the method, in the order of the paper

Axis suffixes: L learner, A author, P prompt, G rollout within a group, B row, T token. NaN in a reward tensor means
"no such rollout, or not scored". Log-probabilities are natural logarithms.
"""
