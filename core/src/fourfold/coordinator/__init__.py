"""What engines of one deployment have to know of each other, in a process of its own. No torch."""
