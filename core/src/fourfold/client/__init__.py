"""Ways to use engines: over sockets from an API server, or in process as LLM. Imports no torch."""
