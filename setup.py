"""What pyproject.toml cannot say: packages that are found, and one beside them whose folder lies elsewhere."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["torchtune_adaptive*"]), "torchtune_adaptive.configs"])
