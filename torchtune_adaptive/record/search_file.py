"""The result of a search as a file, which a later run under the same circumstances takes over."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from torchtune_adaptive.atomic_files import keep_file, read_json
from torchtune_adaptive.search.profile import Profile
from torchtune_adaptive.search.rows import SearchResult

SEARCH_FILE = "batch_search.json"

Result = TypeVar("Result", SearchResult, Profile)


def write_search(
    directory: Path, result: SearchResult | Profile, sequence_length: int, fingerprint: Mapping[str, object]
) -> None:
    """Writes `batch_search.json`, for `read_search` and for people; a line says so where that is not possible."""
    record = {
        "fingerprint": dict(fingerprint),
        "sequence_length": sequence_length,
        "result": result.to_json(),
    }
    content = (json.dumps(record, indent=2) + "\n").encode()
    keep_file(directory / SEARCH_FILE, content, "the next run will search again")


def read_search(directory: Path, fingerprint: Mapping[str, object], kind: type[Result]) -> Result | None:
    """The result of an earlier search under the same fingerprint.

    None if there is none, or one of another fingerprint. Raises ValueError for a file that cannot be read, or that
    `write_search` did not write.
    """
    path = directory / SEARCH_FILE
    try:
        record = read_json(path)
        # The fingerprint first: a file of another version may hold a result that this one cannot read.
        if record is None or record["fingerprint"] != json.loads(json.dumps(dict(fingerprint))):
            return None
        return kind.from_json(record["result"])
    except KeyError as error:
        raise ValueError(
            f"{path} is not the record of a search (it has no {error}), and has to be written anew"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the record of a search ({error}), and has to be written anew") from error
