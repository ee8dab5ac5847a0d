"""README and the pages of docs/ say what is so: links, commands, tables, figures."""
