"""The kinds of transformer block."""
