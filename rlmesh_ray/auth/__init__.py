"""Authentication for servers and clients: tokens, token files, TLS files and the interceptor."""
