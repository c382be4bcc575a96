"""Attention: one call, several backends."""
