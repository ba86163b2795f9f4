"""How steps travel between a client and its worker, exactly once each."""
