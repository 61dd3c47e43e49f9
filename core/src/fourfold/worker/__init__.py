"""One rank: its device, its copy of every request, the forward pass and sampling. Decides nothing of what runs."""
