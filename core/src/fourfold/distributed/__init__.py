"""The process groups of one rank, handed out by one explicit object."""
