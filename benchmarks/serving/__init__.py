"""How fast policies are served, beside a gRPC server that does nothing and the released rlmesh."""
