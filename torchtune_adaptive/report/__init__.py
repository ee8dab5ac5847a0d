"""What happened in a run or a search: a journal, tables and pictures."""
