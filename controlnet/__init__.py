"""Control branches: not built yet."""
