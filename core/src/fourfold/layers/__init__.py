"""Layers as one rank holds them: how they are cut, and the torch twins of their arithmetic."""
