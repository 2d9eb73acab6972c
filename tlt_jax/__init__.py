"""Reinforcement learning of reasoning language models in JAX with lossless speculative rollouts."""
