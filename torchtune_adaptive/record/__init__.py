"""What happened in a run or a search, for people to read and for runs to resume from."""
