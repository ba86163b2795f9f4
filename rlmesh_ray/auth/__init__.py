"""Authentication for servers and clients: tokens, token files and TLS files."""
