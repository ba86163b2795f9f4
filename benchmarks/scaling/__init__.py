"""How sampling grows with endpoints, and what keeping many of them costs."""
