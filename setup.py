"""Maps the folders at the repository's root to `calotype.<folder>`, and builds its kernels in C where that works."""

from glob import glob

from setuptools import Extension, find_packages, setup

ROOTS = ("core", "denoisers", "encoders", "language", "vae", "schedulers", "lora", "controlnet", "pipelines", "plate")
folders = [name for name in find_packages(".") if name.split(".")[0] in ROOTS]
# Without a C compiler or its OpenMP, or for another processor, the package does without. It is not linked to an OpenMP:
# torch has loaded its own, and two would fight over the cores.
kernels = Extension(
    "calotype.core.ops._native",
    sources=sorted(glob("core/ops/native/*.c")),
    depends=["core/ops/native/native.h"],
    extra_compile_args=["-O3", "-fopenmp"],
    optional=True,
)

setup(
    ext_modules=[kernels],
    packages=[
        "calotype",
        *(f"calotype.{n}" for n in find_packages("src/calotype")),
        *(f"calotype.{n}" for n in folders),
    ],
    package_dir={"calotype": "src/calotype", **{f"calotype.{root}": root for root in ROOTS}},
    package_data={
        "calotype": ["py.typed"],
        "calotype.core.ops": ["*.pyi"],
        "calotype.plate": ["assets/*", "*.md"],
        "calotype.plate.training": ["*.json", "*.png", "*.md"],
    },
)
