"""Public faults of other systems as test cases; log.md tells where each comes from."""
