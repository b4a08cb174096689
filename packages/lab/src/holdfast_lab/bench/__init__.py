"""Benchmarks: ratios against the same code without Holdfast and against peers, interleaved."""
