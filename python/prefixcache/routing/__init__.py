"""Which of many replicas gets a prompt; knows nothing of how replicas are run or reached."""

from prefixcache.routing.prefix_routing import Choice, PrefixRouting, Routed, RoutingWeights

__all__ = ["Choice", "PrefixRouting", "Routed", "RoutingWeights"]
