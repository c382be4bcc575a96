"""Maps the folders at the repository's root to `calotype.<folder>`."""

from setuptools import find_packages, setup

ROOTS = ("core", "denoisers", "encoders", "language", "vae", "schedulers", "lora", "controlnet", "pipelines", "plate")
folders = [name for name in find_packages(".") if name.split(".")[0] in ROOTS]

setup(
    packages=[
        "calotype",
        *(f"calotype.{n}" for n in find_packages("src/calotype")),
        *(f"calotype.{n}" for n in folders),
    ],
    package_dir={"calotype": "src/calotype", **{f"calotype.{root}": root for root in ROOTS}},
    package_data={
        "calotype": ["py.typed"],
        "calotype.plate": ["assets/*", "*.md"],
        "calotype.plate.training": ["*.json", "*.png", "*.md"],
    },
)
