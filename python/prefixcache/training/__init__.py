"""Training on rollouts without mismatch. It needs the extra `torch`."""

from prefixcache.training.policy import Policy, Rollout

__all__ = ["Policy", "Rollout"]
