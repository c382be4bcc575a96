"""LoRA and its relatives: not built yet."""
