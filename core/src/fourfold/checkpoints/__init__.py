"""Where models come from and how their tensors are read; torch only inside tensor reading."""
