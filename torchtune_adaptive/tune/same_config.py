"""One config on all ranks. A node that was started with another would train another model, or wait forever."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import shown

OF_A_NODE = ("metric_logger", "profiler", "adaptive.memory_limit")
"""What nodes may have of their own, besides paths."""
A_PATH = re.compile(r"(dir|path|file|files)(\[\d+\])?$")
"""Keys of paths; another value is one if it begins like one."""
MOST_TOLD = 3


def check_same_config(cfg: DictConfig) -> None:
    """Collective: refuses a run whose ranks were given different values. Paths may differ: disks do."""
    mine = dict(_values("", OmegaConf.to_container(cfg)))
    digests = from_all_ranks(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    other = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
    everywhere = from_all_ranks(mine)
    first, second = everywhere[0], everywhere[other]
    differing = [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
    told = [
        f"{key} is {first.get(key, 'null')} on rank 0 and {second.get(key, 'null')} on rank {other}"
        for key in differing[:MOST_TOLD]
    ]
    more = f" (and {len(differing) - MOST_TOLD} more)" if len(differing) > MOST_TOLD else ""
    raise ConfigError(f"{'; '.join(told)}{more}: start all nodes with the same config and overrides")


def _values(key: str, value: object) -> Iterator[tuple[str, str]]:
    """What has to be the same, by dotted keys, as an error shows it. Nulls are left out, as keys may be."""
    if value is None or key in OF_A_NODE:
        return
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _values(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _values(f"{key}[{at}]", inner)
    elif isinstance(value, float) and value.is_integer():
        yield key, shown(int(value))
    elif not (isinstance(value, str) and (A_PATH.search(key) or value.startswith(("/", "./", "../", "~")))):
        yield key, shown(value)
