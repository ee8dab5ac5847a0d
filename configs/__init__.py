"""The configs of the recipes, installed as `torchtune_adaptive.configs` and named `adaptive/...` for --config."""
