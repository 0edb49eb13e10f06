"""`prefixcache replay`: traces through the real cache, without a model."""
