"""The one transformer that every model is built from.

Blocks over a stream of tokens, attention and its backends, rotary embedding, norms, feed-forward layers, modulation,
the key/value cache, and key maps that stream weights onto meta modules.
"""
