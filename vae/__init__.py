"""Autoencoders between pixels and latents, and previews of latents."""
