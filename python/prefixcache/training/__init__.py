"""Training on rollouts without mismatch. It needs the extra `prefixcache[torch]`."""

from prefixcache.training.policy import Policy, Rollout

__all__ = ["Policy", "Rollout"]
