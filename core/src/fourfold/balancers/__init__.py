"""Policies that choose the engine of a request. They see loads and marks of prefixes, no sockets and no tokens."""
