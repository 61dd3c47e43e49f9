"""The engine core: scheduling, cache bookkeeping and request lifecycle over one executor. Imports no torch."""
