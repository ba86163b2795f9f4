"""The private parts of gRPC, Ray and RLlib that this package uses, and what it does without them.

Nothing else in the package names such a part. All were seen with grpcio 1.85 and Ray 2.60.
"""
