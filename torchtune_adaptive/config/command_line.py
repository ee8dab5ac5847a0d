"""Read the config that `--config NAME` names, and apply the `key=value` overrides of the command line.

NAME is a path, the name of a config of torchtune, or the name of a config of this package (`adaptive/...`).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune.config._parse import TuneRecipeArgumentParser
from torchtune.config._utils import _merge_yaml_and_cli_args

from torchtune_adaptive.config.components import COMPONENT, in_a_line
from torchtune_adaptive.config.registry import config_files, file_named
from torchtune_adaptive.errors import ConfigError

UNREADABLE = (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException, IndexError, RecursionError)
"""Exceptions that libraries raise for invalid YAML and overrides (IndexError for a single `[`)."""


def config_and_overrides(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the file of the config, and the other arguments."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if words.count("--config") > 1:
        raise ConfigError("--config is given twice: pass it once, and override values with key=value")
    if "--config" not in words[:-1]:
        raise ConfigError("--config is missing: pass a path or the name of a config (adaptive/... or torchtune's)")
    at = words.index("--config")
    return locate(words[at + 1]), [*words[:at], *words[at + 2 :]]


def locate(name: str) -> Path:
    """Return the file of a config, given its name or path."""
    return file_named(name, config_files(), "config", "--config ")


def read_config(path: Path, overrides: Sequence[str]) -> DictConfig:
    """Return the config of a file, with overrides that have the same meaning as in torchtune."""
    parts = [f"~{key}" for key, part in _read_yaml(path).items() if isinstance(part, dict) and COMPONENT in part]
    removed = [word for word in overrides if word in parts]  # remove these below, because torchtune cannot
    overrides = [word for word in overrides if word not in removed]
    try:
        parser = TuneRecipeArgumentParser()
        cfg: DictConfig = _merge_yaml_and_cli_args(*parser.parse_known_args(["--config", str(path), *overrides]))
    except (*UNREADABLE, AssertionError, TypeError) as error:
        words = shlex.join(overrides)
        raise ConfigError(f"the command line ({words}) cannot be read: {in_a_line(error)}") from error
    for word in removed:
        del cfg[word[1:]]
    try:
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'the config'} cannot be resolved: {first_line}") from error
    return cfg


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and all(isinstance(key, str) for key in content):
            OmegaConf.load(path)  # refuses duplicate keys
            return content
    except UNREADABLE as error:
        raise ConfigError(f"--config {path} cannot be read: {in_a_line(error)}") from error
    kind = "nothing" if content is None else f"a {type(content).__name__}"
    raise ConfigError(f"--config {path} contains {kind}: it must be a mapping with strings as keys")
