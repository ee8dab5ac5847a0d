"""How ranks end: all of them promptly, with a reason; silent and slow ranks are named."""
