"""The Ray executor: an actor per rank, in a placement group of a cluster that is there or that it starts."""

from __future__ import annotations
