"""How ranks end: all of them, soon, with a reason; and who is named when one is silent, or slow."""
