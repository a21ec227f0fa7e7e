"""What pyproject.toml cannot say: the directory `kernels` is installed as the package `fly_attention`.

Never as `kernels`, which is the name of a package of Hugging Face's.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["fly", "fly.*"]),
        *(f"fly_attention{name.removeprefix('kernels')}" for name in find_packages(include=["kernels", "kernels.*"])),
    ],
    package_dir={"fly_attention": "kernels"},
)
