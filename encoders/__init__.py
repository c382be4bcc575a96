"""Text encoders: from prompts to the states that denoisers attend to."""
