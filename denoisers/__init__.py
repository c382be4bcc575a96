"""Denoisers: what they are told, how they are guided, one file per family."""
