"""Tests on several ranks without a recipe. This package has the shared models and meshes."""
