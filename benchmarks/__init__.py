"""The same work on this compiler and its peers, in one run: `python -m benchmarks --help`, docs/benchmarks.md."""
