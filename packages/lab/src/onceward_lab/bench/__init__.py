"""Benchmarks: ratios against the same code without Onceward and against peers, interleaved."""
