"""From `--config NAME` and `key=value` on the command line to a resolved config.

A name is a path, a name of torchtune's (which `tune run` has resolved to a path already) or `adaptive/...`, a config
installed with this package.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune.config._parse import TuneRecipeArgumentParser
from torchtune.config._utils import _merge_yaml_and_cli_args

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.registry import config_files, file_named
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import shown

UNREADABLE = (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException, IndexError, RecursionError)
"""What reading YAML and overrides may raise, IndexError for a `[`."""


def config_and_overrides(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The file of the config that the command line names, and everything else on it."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if words.count("--config") > 1:
        raise ConfigError("--config is given twice: give it once, and override values with key=value")
    if "--config" not in words[:-1]:
        raise ConfigError("--config is missing: give a path or the name of a config (adaptive/... or torchtune's)")
    at = words.index("--config")
    return locate(words[at + 1]), [*words[:at], *words[at + 2 :]]


def locate(name: str) -> Path:
    return file_named(name, config_files(), "config", "--config ")


def name_of(path: Path) -> str:
    """What `--config` may be given for a file: a name of ours or of torchtune's where it has one."""
    return {file: name for name, file in config_files().items()}.get(path, str(path))


def read_config(path: Path, overrides: Sequence[str]) -> DictConfig:
    """The config at a path with these overrides, which mean what they mean to torchtune."""
    _check_yaml(path)
    if nameless := [word for word in overrides if word.startswith("=")]:
        raise ConfigError(f"{nameless[0]} has no key: write key=value, without a space before the =")
    file: Any = OmegaConf.to_container(OmegaConf.load(path))
    parts = [f"~{key}" for key, part in file.items() if isinstance(part, dict) and COMPONENT in part]
    removed = [word for word in overrides if word in parts]  # torchtune removes any key but that of a component
    overrides = [word for word in overrides if word not in removed]
    try:
        parser = TuneRecipeArgumentParser()
        cfg: DictConfig = _merge_yaml_and_cli_args(*parser.parse_known_args(["--config", str(path), *overrides]))
    except (*UNREADABLE, AssertionError, TypeError) as error:
        culprit = _first_misfit(path, overrides)
        raise ConfigError(f"the command line cannot be read: {culprit}{_in_a_line(error)}") from error
    for word in removed:
        del cfg[word[1:]]
    try:
        cfg = OmegaConf.create(_at_home(OmegaConf.to_container(cfg)))
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'the config'} cannot be resolved: {first_line}") from error
    return cfg


def _at_home(value: Any) -> Any:
    """The same with `~/` in front of paths written out, which a shell does not do behind `key=`."""
    if isinstance(value, dict):
        return {key: _at_home(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_at_home(each) for each in value]
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{shown(value)} in the config contains a NUL character: remove it")
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _check_yaml(path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and all(isinstance(key, str) for key in content):
            OmegaConf.load(path)  # refuses what YAML lets pass, such as the same key twice
            return
    except UNREADABLE as error:
        raise ConfigError(f"--config {path} cannot be read: {_in_a_line(error)}") from error
    kind = "nothing" if content is None else f"a {type(content).__name__}"
    raise ConfigError(f"--config {path} contains {kind}: it must be a mapping whose keys are strings")


def _first_misfit(path: Path, overrides: Sequence[str]) -> str:
    """The first override that the config cannot take: a list, say, in place of a section."""
    file = OmegaConf.load(path)
    for word in overrides:
        with suppress(*UNREADABLE):
            override = OmegaConf.from_dotlist([word])
            try:
                OmegaConf.merge(file, override)
            except TypeError:
                return f"{word}: "
    return ""


def _in_a_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())
