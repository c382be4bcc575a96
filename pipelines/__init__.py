"""From a request to pictures in files."""
