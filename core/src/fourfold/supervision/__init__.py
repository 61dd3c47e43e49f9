"""Child processes that start clean, are noticed when they end, and never outlive their parent."""
