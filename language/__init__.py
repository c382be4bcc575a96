"""Language models: the text path of multimodal models, and what their text encoders read."""
