"""What `prefixcache bench` runs: workloads, clients that time them, tables and pictures."""
