"""From `--config NAME` and `key=value` on the command line to a resolved config.

A name is a path, a name of torchtune's (which `tune run` has resolved to a path already) or `adaptive/...`, a config
installed with this package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config

from torchtune_adaptive.config.registry import config_files, file_named
from torchtune_adaptive.errors import ConfigError

UNREADABLE = (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException, RecursionError, IndexError)
"""What reading YAML and overrides may raise: RecursionError where it is nested thousands deep, IndexError for a `[`."""


def read_command_line(argv: list[str]) -> DictConfig:
    """The config that the command line describes. Rewrites the config's name in `argv` to its path."""
    at = _position_of_config(argv)
    argv[at] = str(locate(argv[at]))
    _check_yaml(Path(argv[at]))
    if nameless := [word for word in argv if word.startswith("=")]:
        raise ConfigError(f"{nameless[0]} has no key: write key=value, without a space before the =")
    cfg = _parse()
    _check_interpolations(cfg)
    return cfg


def read_config(path: Path, overrides: Sequence[str]) -> DictConfig:
    """The config at a path, as a run with these overrides would read it."""
    typed = sys.argv
    sys.argv = [typed[0], "--config", str(path), *overrides]  # torchtune's parser looks nowhere else
    try:
        return read_command_line(sys.argv)
    finally:
        sys.argv = typed


def locate(name: str) -> Path:
    """The file of a config given by its path or its name."""
    return file_named(name, config_files(), "config", "--config ")


def name_of(path: Path) -> str:
    """What `--config` may be given for a file: a name of ours or of torchtune's where it has one."""
    return {file: name for name, file in config_files().items()}.get(path, str(path))


def _position_of_config(argv: list[str]) -> int:
    argv[:] = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if argv.count("--config") > 1:
        raise ConfigError("--config is given twice: give it once, and override values with key=value")
    if "--config" not in argv[:-1]:
        raise ConfigError("--config is missing: give a path or the name of a config (adaptive/... or torchtune's)")
    return argv.index("--config") + 1


def _check_yaml(path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and all(isinstance(key, str) for key in content):
            OmegaConf.load(path)  # refuses what YAML lets pass, such as the same key twice
            return
    except UNREADABLE as error:
        raise ConfigError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
    found = "nothing" if content is None else f"a {type(content).__name__}"
    raise ConfigError(f"--config {path} contains {found}: it must be a mapping whose keys are strings")


def _parse() -> DictConfig:
    """sys.argv through torchtune's own parser, so that overrides mean what they mean there."""
    parsed: list[DictConfig] = []

    def keep(cfg: DictConfig) -> None:
        parsed.append(cfg)

    try:
        config.parse(keep)()
    except SystemExit:
        if not parsed:
            raise
    except (*UNREADABLE, AssertionError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the command line cannot be read: {_misfit()}{reason}") from error
    return parsed[0]


def _misfit() -> str:
    """The first override that the config cannot take: a list, say, in place of a section."""
    file = OmegaConf.load(sys.argv[sys.argv.index("--config") + 1])
    for word in sys.argv[1:]:
        with suppress(*UNREADABLE):
            override = OmegaConf.from_dotlist([word])
            try:
                OmegaConf.merge(file, override)
            except TypeError:
                return f"{word}: "
    return ""


def _check_interpolations(cfg: DictConfig) -> None:
    try:
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'the config'} cannot be resolved: {first_line}") from error
    except RecursionError as error:
        raise ConfigError("the config cannot be resolved: it is nested too deeply") from error
