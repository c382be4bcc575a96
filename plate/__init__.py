"""The bundled model: its files in `assets/`, and the scripts that made them in `training/`."""
