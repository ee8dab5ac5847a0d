"""README and docs/ are correct: links, commands, tables, figures."""
