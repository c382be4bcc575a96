"""The one transformer that every model is built from: blocks, attention, rotary embedding, norms, key/value cache, weight loading."""
