"""Text in and out: tokens, templates, stop strings. Imports no torch."""
