"""The scripts that make the bundled model; README.md says in which order."""
