"""The flag of a rehearsal (started by `rehearse/`), which runs without computation or communication."""


class Rehearsal:
    """Whether this process is a rehearsal."""

    on = False


REHEARSAL = Rehearsal()
