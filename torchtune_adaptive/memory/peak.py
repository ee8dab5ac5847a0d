"""What a step needed, phase by phase. No torch: searches decide from it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """The memory that one probe needed, already agreed: the same value on every rank."""

    phase_bytes: Mapping[str, int]
    """Peak of each phase of the step, in the order they run; some may be missing where `fits` is False."""
    fits: bool
    """False where some rank ran out of memory."""
    retries: int = 0
    """Times the allocator had to flush its cache to go on: it fit, but training at this size would crawl."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.fits and not self.phase_bytes:
            raise ValueError("a probe that fit has measured at least one phase")
        object.__setattr__(self, "phase_bytes", dict(self.phase_bytes))

    @property
    def peak_bytes(self) -> int | None:
        """The step's peak; None where it ran out of memory, since what the rest would need is unknown."""
        return max(self.phase_bytes.values()) if self.fits else None
