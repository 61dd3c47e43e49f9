"""Models as data (descriptions, torch-free) and as one generic decoder built from parallel layers."""
