"""Sampling of answers: the `Sampler` protocol and its engines."""
