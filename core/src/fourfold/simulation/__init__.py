"""Many engines under a load, in virtual time: what a load balancer does to waiting, caches and evenness. No torch."""
