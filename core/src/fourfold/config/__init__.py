"""The config tree: frozen dataclasses, checked when built, never changed. Options and docs come from it."""
