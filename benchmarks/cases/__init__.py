"""Cases of both benchmarks: batches, operations, the contenders that compute them, and the comparison of results."""
