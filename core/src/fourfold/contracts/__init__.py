"""What plugins implement: one typed Protocol a file, no implementation."""
